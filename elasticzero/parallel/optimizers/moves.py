"""Moves the state of pieces between ranks, where a boundary makes them the ranks of another world.

All ranks know how the elements are divided before and after it, so that none asks for anything.
Each looks at its own pieces alone, however many ranks there are.
Rules:
 MV1  A rank keeps what it has. The rest of its pieces comes from the ranks that have it, in one
      message from each.
 MV2  What is kept for a parameter as a whole, such as a count of steps, comes with the first part
      of it to a rank that had none; a rank that had one keeps its own.
 MV3  What comes lies in memory of its own. Nothing of the present state changes before the rank has
      entered the world, so that a change that fails leaves the state of the boundary on all ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from elasticzero.parallel.optimizers.piece_entries import KeptEntry
from elasticzero.rank_groups.group import message_device
from elasticzero.spans import EMPTY, Span, intersect
from elasticzero.step_clock import wait_for
from elasticzero.text import size_text

TAG = 0x657C
"""Keeps these messages apart from those of gradients, of parameters and of a script."""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Place:
    """Says where a parameter lies in a run of elements that the ranks divide."""

    start: int
    """The position of its first element in the run."""
    numel: int
    bounds: Sequence[int]
    """The position of the first element of each rank's part, and the end of the last one's."""

    def span(self, rank: int) -> Span:
        """Returns the elements that a rank has; `EMPTY` if it has none."""
        first = max(self.bounds[rank] - self.start, 0)
        return intersect(
            Span(0, self.numel), Span(first, max(self.bounds[rank + 1] - self.start, first))
        )


@dataclass(frozen=True, slots=True)
class Division:
    """Says how the ranks of a world divide the elements of parameters."""

    places: Mapping[str, Place]

    def span(self, rank: int, name: str) -> Span:
        """Returns the elements of a parameter that a rank has; `EMPTY` if it has none."""
        return self.places[name].span(rank)

    def spans(self, rank: int) -> dict[str, Span]:
        """Returns the elements that a rank has of each parameter of which it has some."""
        return {name: span for name in self.places if (span := self.span(rank, name))}

    def holders(self, name: str, within: Span) -> list[tuple[int, Span]]:
        """Returns the ranks that have elements of a parameter, and which, in the elements' order.

        Args:
            name: The parameter.
            within: The elements that are asked for, at least one.
        """
        place = self.places[name]
        holders: list[tuple[int, Span]] = []
        rank = bisect_right(place.bounds, place.start + within.start) - 1
        while rank + 1 < len(place.bounds) and place.bounds[rank] < place.start + within.stop:
            if part := intersect(place.span(rank), within):
                holders.append((rank, part))
            rank += 1
        return holders


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Names elements of a parameter whose state one rank has, and another one is to have."""

    name: str
    span: Span
    source: int
    target: int
    """It is the same as `source` where a rank keeps them."""
    whole: bool
    """True if they come with what is kept for the parameter as a whole (MV2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceState:
    """Holds what is stored of a piece: of some elements of a parameter."""

    start: int
    """The first of these elements."""
    tensors: Mapping[str, Tensor]
    """Holds what is stored under each key; an elementwise entry is flat."""
    entries: Mapping[str, KeptEntry]

    @classmethod
    def empty(
        cls, span: Span, entries: Mapping[str, KeptEntry], device: torch.device = CPU
    ) -> PieceState:
        """Returns one with room for a piece.

        Args:
            span: The elements of the piece.
            entries: What is stored of the parameter.
            device: Where there is room for what is stored of each element.
        """
        tensors = {
            key: torch.empty(len(span), dtype=entry.spec.dtype, device=device)
            if entry.elementwise
            else torch.empty(entry.spec.shape, dtype=entry.spec.dtype)
            for key, entry in entries.items()
        }
        return cls(start=span.start, tensors=tensors, entries=entries)

    def in_shape(self, shape: Sequence[int]) -> dict[str, Tensor]:
        """Returns what is stored under each key, elementwise entries in the piece's shape."""
        return {
            key: tensor.view(shape) if self.entries[key].elementwise else tensor
            for key, tensor in self.tensors.items()
        }

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


def plan(
    rank: int, present: Division, following: Division, ranks: Sequence[int | None]
) -> list[Move]:
    """Returns the moves by which one rank gets its pieces of the next world, and gives others
    theirs, in an order that is the same for both ends of a message.

    Args:
        rank: The rank, in the present world.
        present: The division of the present world.
        following: That of the next one.
        ranks: The rank in the present world of each rank of the next one; None: it is none of
            these, and gets its pieces elsewhere.
    """
    moves: list[Move] = []
    if rank in ranks:
        for name, span in following.spans(ranks.index(rank)).items():
            kept = bool(present.span(rank, name))
            if kept:
                moves.append(Move(name=name, span=EMPTY, source=rank, target=rank, whole=True))
            for source, part in present.holders(name, span):
                first = part.start == span.start
                whole = first and not kept
                moves.append(Move(name=name, span=part, source=source, target=rank, whole=whole))
    for name, span in present.spans(rank).items():
        for number, part in following.holders(name, span):
            if (target := ranks[number]) is None or target == rank:
                continue
            first = part.start == following.span(number, name).start
            whole = first and not present.span(target, name)
            moves.append(Move(name=name, span=part, source=rank, target=target, whole=whole))
    return sorted(moves, key=lambda move: (move.name, move.span.start))


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
        group: The group of all ranks.
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
    device = message_device(group)
    messages = {t: _message(parts, device) for t, parts in sent.items() if parts}
    rooms = {
        source: torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8, device=device)
        for source, parts in received.items()
        if parts
    }
    exchanges = [dist.P2POp(dist.irecv, room, s, group, TAG) for s, room in rooms.items()]
    exchanges += [dist.P2POp(dist.isend, text, t, group, TAG) for t, text in messages.items()]
    wait_for(dist.batch_isend_irecv(exchanges) if exchanges else ())
    for source, space in rooms.items():
        _give_out(space, received[source])


def _message(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the bytes of tensors, one after another, on a device."""
    return torch.cat([part.to(device).contiguous().view(torch.uint8) for part in parts])


def lack_of_memory(nbytes: int, growth: float, device: torch.device) -> str:
    """Returns why state of a rank cannot move; empty: it can. What it sends, what comes to it and
    the place for that lie beside what it has.

    Args:
        nbytes: Size of the rank's part.
        growth: By what that is multiplied in the next world.
        device: Where it lies; only memory of a GPU is looked at.
    """
    if device.type != "cuda":
        return ""
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if free >= nbytes * (1 + 2 * growth):
        return ""
    return f"its GPU has {size_text(free)} left, and state of {size_text(nbytes)} has to move"


def _give_out(message: Tensor, parts: Sequence[Tensor]) -> None:
    """Copies the bytes of a message to the tensors that it was made of."""
    sizes = [part.nbytes for part in parts]
    for part, text in zip(parts, message.split(sizes), strict=True):
        part.view(torch.uint8).copy_(text)
