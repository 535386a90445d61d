"""Gives each slice of a global batch the random generators and buffers that it has in any world."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from elasticzero.data.position import GlobalBatch, MicroBatch
from elasticzero.data.seeding import seed_generators
from elasticzero.data.slices import Use, slice_seed
from elasticzero.state.model import MODEL


class SliceStates:
    """Sets the state in which a rank computes the slices of a loop with `virtual_batch=`.

    Random generators are seeded for each slice. Each slice begins with the buffers of the boundary
    before its global batch, and those that the first slice leaves are the next boundary's: rank 0
    always computes that one, and its buffers are broadcast. Where that slice has no samples, the
    buffers stay as they are.
    """

    def __init__(self, seed: int, dataset: int, buffers: Mapping[str, Tensor]) -> None:
        """Takes the loop's seed, the number of its dataset object, and the model's buffers."""
        self._seed = seed
        self._dataset = dataset
        self._buffers = buffers
        self._kept: dict[str, Tensor] = {}
        """The buffers after the first slice."""

    def begin(self, batch: GlobalBatch, part: MicroBatch, boundary: Mapping[str, Tensor]) -> None:
        """Prepares for a slice. boundary: the copies of the buffers, by full name."""
        with torch.no_grad():
            for name, buffer in self._buffers.items():
                buffer.copy_(boundary[MODEL + name])
        if part.slice == 0 and not part.weight:
            self._keep()
        self._seed_for(batch, part.positions.start, "compute")

    def end(self, batch: GlobalBatch, part: MicroBatch) -> None:
        """Takes the buffers of the first slice, and gives them back after the last one."""
        if part.slice == 0 and part.weight:
            self._keep()
        if part.last:
            with torch.no_grad():
                for name, kept in self._kept.items():
                    self._buffers[name].copy_(kept)
            self._kept = {}
            self._seed_for(batch, batch.start, "after")

    def _keep(self) -> None:
        self._kept = {name: b.detach().clone() for name, b in self._buffers.items()}

    def _seed_for(self, batch: GlobalBatch, start: int, use: Use) -> None:
        seed_generators(slice_seed(self._seed, self._dataset, batch.epoch, start, use))
