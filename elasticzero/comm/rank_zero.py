"""Gives all ranks, between two forwards, what rank 0 has of the small state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from elasticzero.comm.process_group import ProcessGroups
from elasticzero.errors import is_peer_error
from elasticzero.ipc.agent_client import AgentClient

ALIGNED_BYTES = 16
"""Bytes of which each tensor of a message begins at a multiple."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Describes a tensor of a message."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class RankZeroTensors:
    """Gives all ranks named tensors of rank 0, again and again, whatever each rank has.

    Rules:
     RZ1  All ranks know the names, dtypes and shapes of the last message: its layout. A message is
         the size of a new layout's text, 0 if it is the same, and tensors of the last layout.
     RZ2  Where the size is not 0, the layout and the tensors follow in two messages of their own.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        """Begins with an empty layout, which all ranks know."""
        self._groups = groups
        self._layout: tuple[_Place, ...] = ()

    def share(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns rank 0's tensors; all ranks call this together.

        tensors: those of this rank, which are not changed. Raises torch's error if a peer is lost.
        """
        groups, is_first = self._groups, self._groups.rank_info.rank == 0
        layout = tuple(_Place(n, t.dtype, tuple(t.shape)) for n, t in tensors.items())
        text = b"" if layout == self._layout else _encoded(layout)
        size = torch.tensor([len(text)], device=groups.device)
        knows = is_first and not text
        values = _packed(tensors.values(), groups.device) if knows else self._room()
        received = groups.broadcast_bytes(torch.cat([_padded(size), values]))
        size_of_text = int(received[: size.nbytes].view(size.dtype).item())
        if not size_of_text:
            return tensors if is_first else self._parts(received[ALIGNED_BYTES:])
        told = torch.zeros(size_of_text, dtype=torch.uint8, device=groups.device)
        if is_first:
            told = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(groups.device)
        self._layout = _decoded(bytes(groups.broadcast_bytes(told).cpu().numpy()))
        values = _packed(tensors.values(), groups.device) if is_first else self._room()
        received = groups.broadcast_bytes(values)
        return tensors if is_first else self._parts(received)

    def _room(self) -> Tensor:
        """Returns memory for tensors of the last layout."""
        count = sum(_rounded(place.bytes) for place in self._layout)
        return torch.zeros(count, dtype=torch.uint8, device=self._groups.device)

    def _parts(self, packed: Tensor) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        start = 0
        for place in self._layout:
            part = packed[start : start + place.bytes].view(place.dtype)
            tensors[place.name] = part.view(place.shape)
            start += _rounded(place.bytes)
        return tensors


def _rounded(count: int) -> int:
    return -(-count // ALIGNED_BYTES) * ALIGNED_BYTES


def _padded(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, _rounded(flat.numel()) - flat.numel()))


def _packed(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    parts = [_padded(tensor.to(device)) for tensor in tensors]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8, device=device)


def _encoded(layout: tuple[_Place, ...]) -> bytes:
    table = [[p.name, str(p.dtype).removeprefix("torch."), list(p.shape)] for p in layout]
    return json.dumps(table).encode()


def _decoded(text: bytes) -> tuple[_Place, ...]:
    return tuple(_Place(n, getattr(torch, dtype), tuple(s)) for n, dtype, s in json.loads(text))


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
