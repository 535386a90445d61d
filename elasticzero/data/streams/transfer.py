"""Brings the tensors of batches from data workers to the training process.

Torch sends each tensor in a file of shared memory, which is made, filled for the first time, mapped
and given back: that costs both processes more than to read the samples. Here small tensors are in
the message itself. Where a batch is joined of several workers' parts, and so copied anyhow, the
larger ones are in an arena: shared memory with slots for parts of batches, which are used in turn.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

INLINE_BYTES = 16 << 10
"""Maximum size of a tensor that is sent in the message."""
_INLINE_DTYPES = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64)
SLACK = 1.5
"""Size of a slot, as a multiple of the part for which it was made, since others may be larger."""
MOST_BYTES = 256 << 20
"""Maximum size of an arena; parts for which it would be larger come as torch sends them."""
ALIGNMENT = 64

_arenas: dict[str, dict[str, Tensor]] = {}
"""The arenas that this process has received, by their owner and their own name."""


class Sent(ABC):
    """Stands for a tensor in a message."""

    @abstractmethod
    def tensor(self) -> Tensor:
        """Returns the tensor, which a later message may change."""

    def own_tensor(self) -> Tensor:
        """Returns the tensor where no later message changes it."""
        return self.tensor()

    def pin_memory(self, device: object = None) -> Tensor:
        """Returns the tensor in pinned memory, as `DataLoader` asks each part of a batch to."""
        return self.tensor().pin_memory()


class InMessage(Sent):
    """Holds a small tensor."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @classmethod
    def of(cls, tensor: Tensor) -> Any:
        """Returns the tensor in this form if it is small."""
        small = tensor.nbytes <= INLINE_BYTES and tensor.device.type == "cpu"
        plain = tensor.layout == torch.strided and tensor.dtype in _INLINE_DTYPES
        return cls(tensor.numpy()) if small and plain and not tensor.requires_grad else tensor

    def tensor(self) -> Tensor:
        return torch.from_numpy(self._array)


class InArena(Sent):
    """Names the place of a tensor in an arena; the first one to name an arena brings it along."""

    def __init__(
        self,
        owner: str,
        name: str,
        at: int,
        like: tuple[torch.dtype, tuple[int, ...]],
        memory: Tensor | None = None,
    ) -> None:
        """Takes the place of a tensor.

        Args:
            owner: Names the process that receives the arena.
            name: The arena's name.
            at: The tensor's first byte in the arena.
            like: The tensor's dtype and shape.
            memory: The arena itself, for the first tensor that names it; None: it was brought
                before.
        """
        self._fields = (owner, name, at, like, memory)
        if memory is not None:
            _arenas.setdefault(owner, {})[name] = memory

    def __reduce__(self) -> Any:
        return InArena, self._fields

    def tensor(self) -> Tensor:
        """Returns the tensor where it lies; its slot is used again later."""
        owner, name, at, (dtype, shape), _ = self._fields
        size = math.prod(shape) * dtype.itemsize
        return _arenas[owner][name][at : at + size].view(dtype).view(shape)

    def own_tensor(self) -> Tensor:
        return self.tensor().clone()


def forget_arenas(owner: str) -> None:
    """Gives the arenas of an owner back, once no message names them any more."""
    _arenas.pop(owner, None)


class Arena:
    """Collates parts of batches, as `default_collate` does, into slots of shared memory."""

    def __init__(self, owner: str, slots: int) -> None:
        """Takes no memory yet.

        Args:
            owner: Names the process that receives the arena.
            slots: Number of slots, more than there are parts that are not copied yet.
        """
        self._owner = owner
        self._slots = slots
        self._name = ""
        self._memory: Tensor | None = None
        self._is_new = False
        self._slot_bytes = 0
        self._slot = 0
        self._used = 0
        """Bytes of the slot that hold tensors of the present part."""
        self._needed_bytes = 0
        """Bytes that the present part would fill."""

    def collate(self, samples: list[Any]) -> Any:
        """Returns the batch of these samples, in which `InArena` stands for larger tensors."""
        self._slot = (self._slot + 1) % self._slots
        batch = self._collated(samples)
        slot_bytes = int(self._needed_bytes * SLACK)
        if self._needed_bytes > self._slot_bytes and slot_bytes * self._slots <= MOST_BYTES:
            self._make(slot_bytes)
            batch = self._collated(samples)
        return batch

    def _collated(self, samples: list[Any]) -> Any:
        self._used = self._needed_bytes = 0
        return collate(samples, collate_fn_map={**default_collate_fn_map, Tensor: self._stack})

    def _make(self, slot_bytes: int) -> None:
        self._slot_bytes = _aligned(slot_bytes)
        self._memory = torch.empty(self._slots * self._slot_bytes, dtype=torch.uint8)
        self._memory.share_memory_()
        self._name = os.urandom(8).hex()
        self._is_new = True

    def _stack(self, tensors: Sequence[Tensor], *, collate_fn_map: Any = None) -> Any:
        """Stacks tensors in the slot; elsewhere where they are small, special, or find no room."""
        first = tensors[0]
        size = first.nbytes * len(tensors)
        plain = type(first) is Tensor and first.layout == torch.strided and first.is_cpu
        if size <= INLINE_BYTES or not plain or first.requires_grad:
            return default_collate(list(tensors))
        self._needed_bytes += _aligned(size)
        if self._memory is None or self._used + size > self._slot_bytes:
            return default_collate(list(tensors))
        at = self._slot * self._slot_bytes + self._used
        self._used += _aligned(size)
        shape = (len(tensors), *first.shape)
        place = self._memory[at : at + size].view(first.dtype).view(shape)
        torch.stack(list(tensors), out=place)
        memory, self._is_new = self._memory if self._is_new else None, False
        return InArena(self._owner, self._name, at, (first.dtype, shape), memory)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
