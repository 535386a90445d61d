"""Gives all ranks, between two forwards, what rank 0 has of the small state."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from elasticzero.comm.process_group import ProcessGroups
from elasticzero.errors import is_peer_error
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.joined import cut, join

log = logging.getLogger(__name__)

ALIGNED_BYTES = 16
"""Bytes of which the tensors of each dtype in a message begin at a multiple."""
_Place = tuple[str, torch.dtype, tuple[int, ...]]
"""The name, dtype and shape of a tensor of a message."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Describes the tensors of one dtype, which lie end to end in a message: thousands of small
    ones are then put together, and taken apart, by one call each."""

    dtype: torch.dtype
    names: list[str]
    shapes: list[tuple[int, ...]]

    @classmethod
    def all_of(cls, layout: Iterable[_Place]) -> list[_Run]:
        """Returns the runs of a layout."""
        runs: dict[torch.dtype, _Run] = {}
        for name, dtype, shape in layout:
            run = runs.setdefault(dtype, cls(dtype, [], []))
            run.names.append(name)
            run.shapes.append(shape)
        return list(runs.values())

    @property
    def bytes(self) -> int:
        return sum(map(math.prod, self.shapes)) * self.dtype.itemsize


class RankZeroTensors:
    """Gives all ranks named tensors of rank 0, again and again, whatever each rank has.

    Rules:
     RZ1  All ranks know the names, dtypes and shapes of the last message: its layout. A message is
         the size of a new layout's text, 0 if it is the same, and tensors of the last layout, those
         of one dtype after the other.
     RZ2  Where the size is not 0, the layout and the tensors follow in two messages of their own.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        """Begins with an empty layout, which all ranks know."""
        self._groups = groups
        self._layout: list[_Place] = []
        self._runs: list[_Run] = []

    def share(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns rank 0's tensors; all ranks call this together.

        tensors: those of this rank, which are not changed. Raises torch's error if a peer is lost.
        """
        groups, is_first = self._groups, self._groups.rank_info.rank == 0
        layout = [(n, t.dtype, t.shape) for n, t in tensors.items()] if is_first else self._layout
        text = b"" if layout == self._layout else _encoded(layout)
        size = torch.tensor([len(text)], device=groups.device)
        values = self._packed(tensors) if is_first and not text else self._room()
        received = groups.broadcast_bytes(torch.cat([_padded(size), values]))
        size_of_text = int(received[: size.nbytes].view(size.dtype).item())
        if not size_of_text:
            return tensors if is_first else self._parts(received[ALIGNED_BYTES:])
        told = torch.zeros(size_of_text, dtype=torch.uint8, device=groups.device)
        if is_first:
            told = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(groups.device)
        self._layout = _decoded(bytes(groups.broadcast_bytes(told).cpu().numpy()))
        self._runs = _Run.all_of(self._layout)
        received = groups.broadcast_bytes(self._packed(tensors) if is_first else self._room())
        return tensors if is_first else self._parts(received)

    def _room(self) -> Tensor:
        """Returns memory for tensors of the last layout."""
        count = sum(_rounded(run.bytes) for run in self._runs)
        return torch.zeros(count, dtype=torch.uint8, device=self._groups.device)

    def _packed(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the bytes of tensors of the last layout."""
        device, parts = self._groups.device, []
        for run in self._runs:
            of_run = [tensors[name] for name in run.names]
            if any(tensor.device != device for tensor in of_run):
                of_run = [tensor.to(device) for tensor in of_run]
            parts.append(_padded(join(of_run)))
        return torch.cat(parts) if parts else self._room()

    def _parts(self, packed: Tensor) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        start = 0
        for run in self._runs:
            flat = packed[start : start + run.bytes].view(run.dtype)
            tensors.update(zip(run.names, cut(flat, run.shapes), strict=True))
            start += _rounded(run.bytes)
        return {name: tensors[name] for name, _, _ in self._layout}


def _rounded(count: int) -> int:
    return -(-count // ALIGNED_BYTES) * ALIGNED_BYTES


def _padded(flat: Tensor) -> Tensor:
    """Returns the bytes of a 1-D tensor, of a number to which others may be added."""
    values = flat.view(torch.uint8)
    return torch.nn.functional.pad(values, (0, _rounded(values.numel()) - values.numel()))


def _encoded(layout: Iterable[_Place]) -> bytes:
    table = [[name, str(dtype).removeprefix("torch."), list(s)] for name, dtype, s in layout]
    return json.dumps(table).encode()


def _decoded(text: bytes) -> list[_Place]:
    return [(n, getattr(torch, dtype), tuple(s)) for n, dtype, s in json.loads(text)]


class SharedState:
    """Gives all ranks the small state of rank 0: what modules keep besides parameters, and the
    order of gradient buckets.

    After the loss of a peer, which the boundary raises, each rank keeps its own. That is as valid
    for the step: a complete snapshot has one rank's, and a divided one has rank 0's.

    Rules:
     RZ3  What modules keep is shared right after a step, before the script goes on with what it
         makes of it, and before an evaluation; the order of buckets at the boundary.
     RZ4  Where a rank may be of the release before, all ranks do as that one does: they share the
         buffers that a model saves at the boundary, in one message with the order of buckets, and
         no extra state.
    """

    def __init__(
        self, groups: ProcessGroups | None, auxiliary: AuxiliaryState, link: AgentClient
    ) -> None:
        """Begins with no peer lost.

        Args:
            groups: The process groups; None for one process alone, which shares nothing.
            auxiliary: The small state of this rank.
            link: The client of the agent, which says whether the generation has ended.
        """
        self._groups, self._auxiliary, self._link = groups, auxiliary, link
        self._one_release = link.assignment.one_release
        self._from_rank_zero = None if groups is None else RankZeroTensors(groups)
        self._compared = False
        """True once the buffers of a step were compared with rank 0's."""
        self.lost: RuntimeError | None = None
        """The error of a peer that was lost while what modules keep was shared after a step."""

    def enter_world(self) -> None:
        """Goes on among the ranks of another world, of which some may know no message."""
        if self._groups is not None:
            self._from_rank_zero = RankZeroTensors(self._groups)

    def share(self, *, compares: bool = False) -> None:
        """Gives all ranks what the modules of rank 0 keep; all ranks call this together.

        Args:
            compares: Whether it is said which buffers this rank has otherwise, if it was not yet.
        """
        if self._groups is None or self._from_rank_zero is None:
            return
        if not self._one_release:
            self._groups.broadcast(self._auxiliary.buffers.saved())
        elif self._auxiliary.modules_keep_state:
            present = self._auxiliary.state_of_modules()
            shared = self._from_rank_zero.share(present)
            if shared is not present:
                if compares and not self._compared:
                    self._compared = True
                    self._note_differences(shared, present)
                self._auxiliary.put_state_of_modules(shared, present)

    def _note_differences(
        self, shared: Mapping[str, Tensor], present: Mapping[str, Tensor]
    ) -> None:
        """Says, on one rank and where training begins, which buffer follows a rank's samples.

        Args:
            shared: What the modules of rank 0 keep.
            present: What those of this rank keep.
        """
        assignment = self._link.assignment
        if assignment.rank != 1 or assignment.resume.tier != "fresh":
            return
        names = self._auxiliary.differing_buffers(shared, present)
        if names:
            others = "" if len(names) == 1 else f" and {len(names) - 1} more"
            log.warning(
                f"note: after a step, buffer {names[0]!r}{others} is not the same on all ranks, as "
                "where a forward fills it from the rank's own samples; all ranks go on with that "
                "of rank 0, so that results depend on the world size: compute it from what "
                "session.gather returns"
            )

    def share_after_step(self, *, compares: bool = False) -> None:
        """Does the same where RZ3 has it after a step; records the error of a lost peer.

        Args:
            compares: The same as for `share`.
        """
        if not self._one_release or self.lost is not None or self._link.aborted is not None:
            return
        try:
            self.share(compares=compares)
        except RuntimeError as error:
            if not is_peer_error(error) and self._link.aborted is None:
                raise
            self.lost = error

    def share_at_boundary(self) -> RuntimeError | None:
        """Gives all ranks what RZ3 and RZ4 leave for the boundary; returns the error of a lost
        peer. All ranks call this together."""
        buffers = {} if self._one_release else self._auxiliary.buffers.saved()
        shared = {**buffers, **self._auxiliary.of_rank_zero()}
        return broadcast_from_rank_zero(self._groups, shared, self._link)


def broadcast_from_rank_zero(
    groups: ProcessGroups | None, tensors: Mapping[str, Tensor], link: AgentClient
) -> RuntimeError | None:
    """Fills these tensors with rank 0's; all ranks call this together.

    Args:
        groups: The process groups; None for one process alone, which changes nothing.
        tensors: The tensors that are filled in place, of the same shapes on all ranks.
        link: The client of the agent, which says whether the generation has ended.

    Returns:
        The error of a lost peer, after which each rank has its own values; None: there was none.
    """
    if groups is None or not tensors or link.aborted is not None:
        return None
    try:
        groups.broadcast(tensors)
    except RuntimeError as error:
        if not is_peer_error(error) and link.aborted is None:
            raise
        return error
    return None


def verify_unless_no_collective(groups: ProcessGroups | None) -> RuntimeError | None:
    """Raises if results may be wrong; returns a lost peer's error if none has been begun."""
    untouched = groups is not None and groups.no_collective_since_verified
    try:
        if groups is not None:
            groups.verify_collectives()
    except RuntimeError as error:
        if not untouched or not is_peer_error(error):
            raise
        return error
    return None
