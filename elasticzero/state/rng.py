"""Captures, restores and seeds the global random generators of a process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elasticzero.data.hashing import mix64
from elasticzero.data.seeding import seed_generators


@dataclass(frozen=True, slots=True)
class RngState:
    """Captures and restores the global random generators of this process."""

    torch_cpu: Tensor
    cuda: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def capture(cls, device: torch.device) -> RngState:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state())

    def apply(self, device: torch.device) -> None:
        torch.set_rng_state(self.torch_cpu)
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the generators' states by kind, as uint8 of constant size."""
        _, state_words, gauss = self.python
        python = np.array(state_words, dtype=np.uint32).tobytes() + _float_or_none(gauss)
        _, keys, place, has_gauss, cached = self.numpy
        tail = np.array([place, has_gauss], dtype=np.int64).tobytes() + np.float64(cached).tobytes()
        tensors = {
            "torch": self.torch_cpu,
            "python": _bytes_tensor(python),
            "numpy": _bytes_tensor(keys.astype(np.uint32).tobytes() + tail),
        }
        return tensors | ({"cuda": self.cuda} if self.cuda is not None else {})

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> RngState:
        python = tensors["python"].numpy().tobytes()
        state_words = tuple(int(word) for word in np.frombuffer(python[:-9], dtype=np.uint32))
        gauss = float(np.frombuffer(python[-8:], dtype=np.float64)[0]) if python[-9] else None
        state = tensors["numpy"].numpy().tobytes()
        keys = np.frombuffer(state[:-24], dtype=np.uint32)
        place, has_gauss = (int(n) for n in np.frombuffer(state[-24:-8], dtype=np.int64))
        cached = float(np.frombuffer(state[-8:], dtype=np.float64)[0])
        return cls(
            tensors["torch"],
            tensors.get("cuda"),
            (3, state_words, gauss),
            ("MT19937", keys, place, has_gauss, cached),
        )


def _float_or_none(value: float | None) -> bytes:
    return bytes([value is not None]) + np.float64(value or 0.0).tobytes()


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def seed_all(seed: int, rank: int, step: int) -> None:
    """Seeds every generator for a rank that has no state of its own to resume from.

    Args:
        seed: A seed that all ranks have in common.
        rank: The rank, which gets numbers of its own.
        step: The step from which training goes on.
    """
    seed_generators(mix64(mix64(mix64(seed) + rank) + step))


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Restores the random generators at the end of the block."""
    before = RngState.capture(device)
    try:
        yield
    finally:
        before.apply(device)
