"""Takes the order of an epoch's samples from a sampler of the script's, such as a weighted one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from elasticzero.data.sampling import Indices, Positions, SampleOrder
from elasticzero.data.seeding import generators_seeded
from elasticzero.data.slices import slice_seed
from elasticzero.errors import UserError

_KEPT_EPOCHS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOrder(SampleOrder):
    """Maps the positions of every epoch to what a sampler gives for it.

    The sampler is iterated once an epoch, with generators that are seeded by seed and epoch, so
    that all ranks and worlds get the same indices.
    """

    sampler: Any
    _epochs: dict[int, Indices] = field(default_factory=dict, repr=False, compare=False)
    """The indices of the epochs used last."""

    @property
    def described(self) -> dict[str, Any]:
        of_sampler = {
            "sampler": type(self.sampler).__name__,
            "digest of its first epoch": self._digest(),
        }
        return {"samples": self.samples, "seed": self.seed, **of_sampler}

    def at(self, epoch: int, positions_P: Positions) -> Indices:
        return self._indices(epoch)[positions_P.astype(np.int64)]

    def _digest(self) -> int:
        """Returns a digest of the first epoch, by which another order shows."""
        indices = self._indices(0).astype(np.uint64)
        weights = np.arange(1, len(indices) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return int((indices * weights).sum() >> np.uint64(2))

    def _indices(self, epoch: int) -> Indices:
        epochs = self._epochs
        if epoch not in epochs:
            while len(epochs) >= _KEPT_EPOCHS:
                del epochs[min(epochs)]
            epochs[epoch] = self._draw(epoch)
        return epochs[epoch]

    def _draw(self, epoch: int) -> Indices:
        seed = slice_seed(self.seed, 0, epoch, 0, "read")
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        generator = getattr(self.sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        with generators_seeded(seed):
            indices = [int(index) for index in self.sampler]
        if len(indices) != self.samples:
            raise UserError(
                f"the sampler, a {type(self.sampler).__name__}, says that it has {self.samples} "
                f"indices and gave {len(indices)} in epoch {epoch}: each epoch has the same number"
            )
        return np.array(indices, np.int64)


def order_by(sampler: Any, seed: int) -> SamplerOrder:
    """Returns the order that a sampler gives; raises `UserError` if it has no length."""
    if isinstance(sampler, Mapping) or not hasattr(sampler, "__len__"):
        raise UserError(
            f"session.batches was given sampler=, a {type(sampler).__name__} without a length: "
            "give an object whose `iter` gives an epoch's indices, and `len` their number"
        )
    return SamplerOrder(samples=len(sampler), seed=seed, sampler=sampler)
