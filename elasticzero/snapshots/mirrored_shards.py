"""Writes the mirrored parts of other ranks into shared memory when a generation ends by a lost
peer.

What lies there is, for agents and for the next generation, a replica of the owner's shard of that
step. Memory for it is allocated then and not before, and freed once the next generation holds a
snapshot of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from elasticzero.checkpoint.ram.slots import release_free_slots
from elasticzero.checkpoint.ram.staging import SharedMemoryStager
from elasticzero.ipc.assignment import Assignment
from elasticzero.snapshots.manifest_draft import WriterInfo, draft
from elasticzero.state.auxiliary import BoundaryCopy
from elasticzero.state.model import RankState
from elasticzero.state.rng import RngState, preserve_rng, seed_all


class MirroredShards:
    """Captures the mirrors that one worker keeps."""

    def __init__(
        self,
        assignment: Assignment,
        strategy: str,
        device: torch.device,
        states: Callable[[], Mapping[int, RankState]],
    ) -> None:
        """Allocates no memory yet.

        Args:
            assignment: This rank's place and settings.
            strategy: The strategy's name.
            device: The device whose random generators a shard has.
            states: Returns the state of each mirrored rank, as of the last boundary.
        """
        self._assignment = assignment
        self._strategy = strategy
        self._device = device
        self._states = states
        self._prefix = f"mirror-{assignment.local_rank}-"
        self._roots = [Path(root) for root in (assignment.snapshot_root, assignment.overflow_root)]

    def capture(self, copy: BoundaryCopy) -> None:
        """Writes a shard for each mirrored rank; raises `StorageError`.

        Buffers and tracked objects are equal on all ranks, so this rank's serve. The owner's global
        random generators begin anew from its rank and the step; those that its script tracks are
        this rank's.
        """
        for rank, share in self._states().items():
            a = self._assignment
            own_writer = WriterInfo.of(a, self._strategy, a.world_size, complete=False)
            writer = replace(own_writer, rank=rank)
            with preserve_rng(self._device):
                seed_all(0, rank, copy.step)
                rng = replace(RngState.capture(self._device), tracked=copy.rng.tracked)
            trained = share.trained()
            manifest, pieces = draft(share, replace(copy, rng=rng), writer)
            memory = SharedMemoryStager(
                self._roots[0],
                self._assignment.local_rank,
                self._roots[1] if self._assignment.overflow_root else None,
                name=f"{self._prefix}{rank}",
            )
            memory.write(manifest, rank, pieces, None, extra=True, trained=trained)
            memory.close()

    def release(self) -> None:
        """Frees the memory of shards that an earlier generation wrote, once none needs them."""
        for root in self._roots if self._assignment.overflow_root else self._roots[:1]:
            release_free_slots(root, self._prefix)
