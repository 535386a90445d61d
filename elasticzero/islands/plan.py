"""Divides the samples that an island has been given into its inner batches. Pure but for the table
of what it has been given.

The samples of all epochs of a loop lie in one order. An island is given pieces of it as training
goes on (`ipc/rounds.py`), each of one epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elasticzero.data.position import DataPosition, GlobalBatch
from elasticzero.data.sampling import BatchPlan
from elasticzero.ipc.rounds import NONE, GivenSamples, IslandProgress, SamplesLeft
from elasticzero.islands.progress import after_step


class ClaimTable:
    """Holds the samples that the island has now, which loaders that read ahead look up as well."""

    def __init__(self) -> None:
        self.claims: tuple[GivenSamples, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandPlan(BatchPlan):
    """Divides what an island has been given into batches."""

    table: ClaimTable = field(compare=False)

    @property
    def epoch_samples(self) -> int:
        """Returns the number of samples of an epoch that are used."""
        return used_in_epoch(self)

    @property
    def total(self) -> int:
        """Returns the number of samples of the whole loop."""
        limits = []
        if self.epochs is not None:
            limits.append(self.epochs * self.epoch_samples)
        if self.steps is not None:
            limits.append(self.steps * self.global_batch)
        return min(limits)

    @property
    def section(self) -> int:
        """Returns the number of positions in a section: those of an epoch."""
        return self.epoch_samples

    @property
    def sections(self) -> int:
        """Returns the number of sections of an epoch: it is one."""
        return 1

    @property
    def epoch_positions(self) -> int:
        """Returns the number of positions in an epoch."""
        return self.epoch_samples

    @property
    def limit(self) -> None:
        """Returns None: the number of positions says how many samples the loop has."""
        return

    @property
    def ends(self) -> tuple[int, ...]:
        """Returns none: all positions have samples."""
        return ()

    def begun_by(self, position: DataPosition) -> IslandProgress:
        """Returns the progress of an island whose state is that of a job without islands, which has
        used the samples in their order.

        Args:
            position: The position of that state.
        """
        used = min(position.epoch * self.epoch_samples + position.offset, self.total)
        return replace(NONE, left=SamplesLeft(next=used, committed=used))

    def ends_epoch(self, position: DataPosition) -> bool:
        """Returns False: islands come to the end of an epoch at different times."""
        return False

    def wrapped(self, position: DataPosition) -> DataPosition:
        """Returns the same position."""
        return position

    def next(self, position: DataPosition) -> tuple[GlobalBatch, DataPosition] | None:
        """Returns (the island's batch at `position`, the position after it), or None where it has
        no samples now."""
        at = position.island or NONE
        for claim in self.table.claims:
            start = max(claim.start, at.upto) if claim.number == at.claim else claim.start
            if claim.number < at.claim or start >= claim.stop:
                continue
            stop = min(start + claim.batch, claim.stop)
            epoch, first = divmod(start, self.epoch_samples)
            batch = GlobalBatch(epoch=epoch, start=first, stop=first + stop - start)
            island = after_step(at, claim.number, stop, stop - start)
            after = replace(
                position, epoch=epoch, offset=batch.stop, steps=position.steps + 1, island=island
            )
            return batch, after
        return None


def used_in_epoch(plan: BatchPlan) -> int:
    """Returns the number of samples of an epoch that a plan uses."""
    samples = plan.order.samples
    return samples - samples % plan.global_batch if plan.drop_last else samples
