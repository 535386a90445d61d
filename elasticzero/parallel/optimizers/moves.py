"""Moves the state of pieces between ranks, where a boundary makes them the ranks of another world.

All ranks know which pieces each of them has before and after it, so that none asks for anything.
Rules:
 MV1  A rank keeps what it has. The rest of its pieces comes from the ranks that have it, in one
      message from each.
 MV2  What is kept for a parameter as a whole, such as a count of steps, comes with the first part
      of it to a rank that had none; a rank that had one keeps its own.
 MV3  What comes lies in memory of its own. Nothing of the present state changes before the rank has
      entered the world, so that a change that fails leaves the state of the boundary on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from elasticzero.parallel.optimizers.piece_entries import KeptEntry
from elasticzero.spans import EMPTY, Span, covering
from elasticzero.step_clock import wait_for

TAG = 0x657C
"""Keeps these messages apart from those of gradients, of parameters and of a script."""

Spans = Mapping[str, Span]
"""The elements that one rank has of each parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Names elements of a parameter whose state one rank has, and another one is to have."""

    name: str
    span: Span
    source: int
    target: int
    """The same as `source` where a rank keeps them."""
    whole: bool
    """True if they come with what is kept for the parameter as a whole (MV2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceState:
    """Holds what is stored of a piece: of some elements of a parameter."""

    start: int
    """The first of these elements."""
    tensors: Mapping[str, Tensor]
    """By key; elementwise ones have one element for each."""
    entries: Mapping[str, KeptEntry]

    @classmethod
    def empty(cls, span: Span, entries: Mapping[str, KeptEntry]) -> PieceState:
        """Returns one with room for a piece.

        Args:
            span: The elements of the piece.
            entries: What is stored of the parameter.
        """
        tensors = {
            key: torch.empty(
                len(span) if entry.elementwise else entry.spec.shape, dtype=entry.spec.dtype
            )
            for key, entry in entries.items()
        }
        return cls(start=span.start, tensors=tensors, entries=entries)

    def parts(self, move: Move) -> list[Tensor]:
        """Returns what belongs to a move, each flat; views where the tensors are contiguous."""
        parts = []
        for key, entry in self.entries.items():
            flat = self.tensors[key].detach().reshape(-1)
            if entry.elementwise:
                parts.append(flat[move.span.start - self.start : move.span.stop - self.start])
            elif move.whole:
                parts.append(flat)
        return parts


def plan(present: Sequence[Spans], following: Sequence[Spans]) -> list[Move]:
    """Returns the moves by which each rank comes to have its pieces of the next world.

    Args:
        present: What each rank has.
        following: What each of the same ranks is to have; nothing where it leaves.
    """
    holders: dict[str, list[tuple[int, Span]]] = {}
    for rank, spans in enumerate(present):
        for name, span in spans.items():
            holders.setdefault(name, []).append((rank, span))
    moves: list[Move] = []
    for target, spans in enumerate(following):
        for name, span in spans.items():
            kept = present[target].get(name)
            held = holders[name] if kept is None else [(target, kept), *holders[name]]
            parts = covering(span, held)
            if kept is not None:
                parts = [(target, EMPTY), *parts]
            for index, (source, part) in enumerate(parts):
                moves.append(
                    Move(name=name, span=part, source=source, target=target, whole=index == 0)
                )
    return moves


def bring(
    moves: Iterable[Move],
    rank: int,
    held: Callable[[str], PieceState],
    room: Mapping[str, PieceState],
    group: dist.ProcessGroup,
) -> None:
    """Fills the pieces of the next world; all ranks of the present one call this together.

    Args:
        moves: What `plan` has returned.
        rank: This rank.
        held: Returns what this rank has of a parameter.
        room: Takes what this rank is to have, by parameter.
        group: The group of all ranks, on the CPU.
    """
    states: dict[str, PieceState] = {}
    sent: dict[int, list[Tensor]] = {}
    received: dict[int, list[Tensor]] = {}
    for move in moves:
        if move.source == rank:
            if move.name not in states:
                states[move.name] = held(move.name)
            sent.setdefault(move.target, []).extend(states[move.name].parts(move))
        if move.target == rank:
            received.setdefault(move.source, []).extend(room[move.name].parts(move))
    for place, part in zip(received.pop(rank, ()), sent.pop(rank, ()), strict=True):
        place.copy_(part)
    # An optimizer that keeps nothing has nothing to send.
    messages = {target: _message(parts) for target, parts in sent.items() if parts}
    rooms = {
        source: torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8)
        for source, parts in received.items()
        if parts
    }
    works = [dist.irecv(space, source, group=group, tag=TAG) for source, space in rooms.items()]
    works += [dist.isend(text, target, group=group, tag=TAG) for target, text in messages.items()]
    wait_for(works)
    for source, space in rooms.items():
        _give_out(space, received[source])


def _message(parts: Sequence[Tensor]) -> Tensor:
    """Returns the bytes of tensors, one after another."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def _give_out(message: Tensor, parts: Sequence[Tensor]) -> None:
    """Copies the bytes of a message to the tensors that it was made of."""
    sizes = [part.nbytes for part in parts]
    for part, text in zip(parts, message.split(sizes), strict=True):
        part.view(torch.uint8).copy_(text)
