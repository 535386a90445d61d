"""Captures, restores and seeds random generators: the global ones of a process, and a script's
own."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elasticzero.data.hashing import mix64
from elasticzero.data.seeding import seed_generators

TRACKED_KIND = "tracked-"
"""What stands before the name of a generator of the script's own, among the kinds."""
BIT_GENERATOR_BYTES = 16384
"""Bytes for the state of a numpy generator; the longest, MT19937's, takes less than 8,000."""
Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


@dataclass(frozen=True, slots=True)
class RngState:
    """Captures and restores the random generators of this process."""

    torch_cpu: Tensor
    cuda: Tensor | None
    python: Any
    numpy: Any
    tracked: Mapping[str, Tensor] = field(default_factory=dict)
    """The states of the script's own generators, by the names under which it tracks them."""

    @classmethod
    def capture(
        cls, device: torch.device, tracked: Mapping[str, Generator] | None = None
    ) -> RngState:
        """Returns the states of now. tracked: the script's own generators, by name."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        states = {name: _state_of(generator) for name, generator in (tracked or {}).items()}
        return cls(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state(), states)

    def apply(self, device: torch.device, tracked: Mapping[str, Generator] | None = None) -> None:
        """Gives the generators these states; those of the script that have none stay as they are.

        tracked: the script's own generators, by name.
        """
        torch.set_rng_state(self.torch_cpu)
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        for name, generator in (tracked or {}).items():
            if name in self.tracked:
                _set_state(generator, self.tracked[name])

    def tensors(self) -> dict[str, Tensor]:
        """Returns the generators' states by kind, as uint8 of constant size."""
        tensors = {
            "torch": self.torch_cpu,
            "python": _from_python(self.python),
            "numpy": _from_numpy(self.numpy),
        }
        if self.cuda is not None:
            tensors["cuda"] = self.cuda
        return tensors | {TRACKED_KIND + name: state for name, state in self.tracked.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> RngState:
        return cls(
            tensors["torch"],
            tensors.get("cuda"),
            _to_python(tensors["python"]),
            _to_numpy(tensors["numpy"]),
            {
                kind.removeprefix(TRACKED_KIND): state
                for kind, state in tensors.items()
                if kind.startswith(TRACKED_KIND)
            },
        )


def _state_of(generator: Generator) -> Tensor:
    """Returns a generator's state, in a size that all states of its kind have."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return _from_python(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return _from_numpy(generator.get_state())
    text = json.dumps(generator.bit_generator.state, default=lambda array: array.tolist())
    return _bytes_tensor(text.encode().ljust(BIT_GENERATOR_BYTES))


def _set_state(generator: Generator, state: Tensor) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(_to_python(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_to_numpy(state))
    else:
        generator.bit_generator.state = json.loads(state.numpy().tobytes())


def _from_python(state: Any) -> Tensor:
    _, state_words, gauss = state
    return _bytes_tensor(np.array(state_words, dtype=np.uint32).tobytes() + _float_or_none(gauss))


def _to_python(stored: Tensor) -> Any:
    data = stored.numpy().tobytes()
    state_words = tuple(int(word) for word in np.frombuffer(data[:-9], dtype=np.uint32))
    gauss = float(np.frombuffer(data[-8:], dtype=np.float64)[0]) if data[-9] else None
    return 3, state_words, gauss


def _from_numpy(state: Any) -> Tensor:
    _, keys, place, has_gauss, cached = state
    tail = np.array([place, has_gauss], dtype=np.int64).tobytes() + np.float64(cached).tobytes()
    return _bytes_tensor(keys.astype(np.uint32).tobytes() + tail)


def _to_numpy(stored: Tensor) -> Any:
    data = stored.numpy().tobytes()
    keys = np.frombuffer(data[:-24], dtype=np.uint32)
    place, has_gauss = (int(n) for n in np.frombuffer(data[-24:-8], dtype=np.int64))
    return "MT19937", keys, place, has_gauss, float(np.frombuffer(data[-8:], dtype=np.float64)[0])


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
