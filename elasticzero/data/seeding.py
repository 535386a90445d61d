"""Seeds the global random generators of a process, also where a data worker reads samples."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seeds the generators of torch (CPU and GPUs), Python and numpy. seed: of 64 bits."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def generators_seeded(seed: int) -> Iterator[None]:
    """Runs the block with the CPU's generators seeded, and gives them back their states."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


@dataclass(frozen=True, slots=True)
class SeededRequest:
    """Names the samples of one batch, and the seed of what is drawn while they are read."""

    seed: int
    indices: list[int]


class SeededSamples:
    """Presents a dataset to torch's `DataLoader`, and seeds the generators for each batch.

    The samples and what `collate_fn` does so depend neither on the process that reads them nor on
    what it has read before.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, request: SeededRequest) -> Any:
        """Returns the samples of a batch; the dataset's own `__getitems__` is used if it has
        one."""
        seed_generators(request.seed)
        whole = getattr(self._dataset, "__getitems__", None)
        if whole is not None:
            return whole(request.indices)
        return [self._dataset[index] for index in request.indices]
