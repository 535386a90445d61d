"""Divides the epochs of a loop over a stream into global batches, from what is known of them. Pure.

Where a reader goes on is part of the training state, in one row for each reader, equal on all
ranks: `[total, count, skip, *place]`, of which all but the first are a `ReaderMark`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from elasticzero.data.position import UNKNOWN, DataPosition, GlobalBatch, MicroBatch
from elasticzero.data.sampling import loop_start
from elasticzero.data.slices import slices_of_groups
from elasticzero.data.streams.dealing import StreamOrder, check_groups, group_sums, units_of
from elasticzero.data.streams.turn import Counts, ReadProgress
from elasticzero.errors import UserError
from elasticzero.options.settings import DataChange
from elasticzero.spans import Span


@dataclass(kw_only=True)
class StreamPlan:
    """Divides the epochs of a loop into global batches, as far as the ranks have read."""

    order: StreamOrder
    global_batch: int
    epochs: int | None = None
    steps: int | None = None
    drop_last: bool = False
    never_one: bool = False
    """No micro-batch has one sample, as far as that can be had: a BatchNorm needs two."""
    progress: dict[int, ReadProgress] = field(default_factory=dict)
    """How far the readers have read, by epoch; it grows."""
    rows: dict[int, Any] = field(default_factory=dict)
    """Where readers go on in each epoch; it becomes newer."""
    _drawn: dict[tuple[int, int], Counts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise UserError(f"global_batch is {self.global_batch}; it must be at least 1")
        if self.epochs is None and self.steps is None:
            raise UserError("session.batches needs epochs=… or steps=…, to know where to end")

    def start(
        self,
        position: DataPosition,
        loop: int,
        dataset: int = 0,
        allowed: Collection[DataChange] = (),
    ) -> DataPosition:
        """Returns the position at which the loop begins, as `BatchPlan.start` does."""
        position = loop_start(self, position, loop, dataset, allowed)
        progress = progress_of(position.stream, position.offset, self.order.readers)
        self.progress, self.rows = {position.epoch: progress}, {position.epoch: position.stream}
        return position

    def learn(self, epoch: int, read_V: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Takes in how far all readers have read in an epoch, and where they go on.

        Args:
            epoch: The epoch.
            read_V: Number of samples that each reader has read.
            rows: For each reader its number of samples, or `UNKNOWN`, and where it goes on.

        Raises:
            UserError: A reader has ended where it did not before, or the stream has no sample.
        """
        before, total_V = self.of(epoch), np.array([row[0] for row in rows], np.int64)
        # One that reads again what was known to have an end may not have come to it yet.
        total_V = np.where(total_V == UNKNOWN, before.total_V, total_V)
        for reader in np.flatnonzero(
            (before.total_V != UNKNOWN) & (before.total_V != total_V)
        ).tolist():
            raise UserError(
                f"reader {reader} of the stream has {total_V[reader]} samples in epoch "
                f"{self.epoch_of(epoch)}, and had {before.total_V[reader]} before: its shards have "
                "changed. Go on with the same data, or start afresh in another checkpoint directory"
            )
        self.progress[epoch] = ReadProgress(np.array(read_V, np.int64), total_V)
        self.rows[epoch] = tuple(
            (int(total), *row[1:]) for total, row in zip(total_V, rows, strict=True)
        )
        self._drawn.clear()
        self.check_samples(epoch)

    def check_samples(self, epoch: int) -> None:
        """Raises `UserError` if an epoch has no sample."""
        if self.of(epoch).whole and not self.of(epoch).decided:
            raise UserError("the stream gave no sample at all: check its shards")

    def forget_before(self, epoch: int) -> None:
        """Drops what is known of the epochs before this one, in which training stands."""
        for past in [number for number in self.progress if number < epoch]:
            del self.progress[past], self.rows[past]

    def of(self, epoch: int) -> ReadProgress:
        """Returns how far the readers have read in an epoch."""
        return self.progress.get(epoch) or self.unread(epoch)

    def unread(self, epoch: int) -> ReadProgress:
        """Returns the progress of an epoch of which nothing is read."""
        return ReadProgress.nothing(self.order.readers)

    def readers_in(self, epoch: int) -> range:
        """Returns the readers that have samples in an epoch."""
        return range(self.order.readers)

    def epoch_of(self, epoch: int) -> int:
        """Returns the epoch of the stream whose samples the readers give in an epoch of this
        plan."""
        return epoch

    def units(self, rank: int, world_size: int, groups: int | None) -> list[Sequence[range]]:
        """Returns the readers of a rank in units that one process has, for each set of readers that
        give samples together.

        Args:
            rank: The rank.
            world_size: Number of ranks.
            groups: Number of groups of readers; None: global batches are not cut into slices.

        Raises:
            UserError: The stream has fewer readers than there are ranks.
        """
        readers = self.order.readers
        if world_size > readers:
            raise UserError(
                f"the stream has {readers} readers, and the world {world_size} ranks, each of "
                "which needs one: give ez.Stream readers=, as many as ranks at least"
            )
        return [units_of(rank, world_size, readers, groups)]

    def drawn(self, epoch: int, places: int) -> Counts:
        """Returns how many samples of each reader the first places of an epoch take."""
        key = epoch, places
        if key not in self._drawn:
            if len(self._drawn) > 64:
                self._drawn.clear()
            self._drawn[key] = self.of(epoch).drawn(places)
        return self._drawn[key]

    def lacks(self, position: DataPosition, batches: int) -> int | None:
        """Returns the epoch of which more must be known to draw so many batches from `position`
        on; None: enough is known."""
        offset, epoch = position.offset, position.epoch
        if self.steps is not None:
            batches = min(batches, self.steps - position.steps)
        beyond = self.global_batch if self.drop_last else 1  # tells whether the epoch ends
        needed = batches * self.global_batch + beyond if batches > 0 else 0
        while needed > 0 and not self._is_past(position, epoch):
            progress = self.of(epoch)
            left = progress.decided - offset
            if not progress.whole:
                return epoch if left < needed else None
            needed, offset, epoch = needed - left, 0, epoch + 1
        return None

    def _is_past(self, position: DataPosition, epoch: int) -> bool:
        return self.epochs is not None and epoch >= position.first_epoch + self.epochs

    def ends_epoch(self, position: DataPosition) -> bool:
        """Returns whether no global batch of the position's epoch is left."""
        progress = self.of(position.epoch)
        if not progress.whole:
            return False
        left = progress.decided - position.offset
        return left <= 0 or (self.drop_last and left < self.global_batch)

    def wrapped(self, position: DataPosition) -> DataPosition:
        """Returns the same position, moved to the beginning of the next epoch if its epoch has
        ended."""
        if not self.ends_epoch(position):
            return position
        return replace(position, epoch=position.epoch + 1, offset=0, stream=None)

    def next(self, position: DataPosition) -> tuple[GlobalBatch, DataPosition] | None:
        """Returns (the global batch at `position`, the position after it), or None at the end.

        `lacks(position, 1)` must be None.
        """
        position = self.wrapped(position)
        epoch, offset = position.epoch, position.offset
        if self._is_past(position, epoch):
            return None
        if self.steps is not None and position.steps >= self.steps:
            return None
        stop = min(offset + self.global_batch, self.of(epoch).decided)
        batch = GlobalBatch(epoch=epoch, start=offset, stop=stop)
        after = replace(
            position, offset=stop, steps=position.steps + 1, stream=self.rows.get(epoch)
        )
        return batch, after

    def share(self, batch: GlobalBatch, rank: int, world_size: int) -> tuple[Span, int]:
        """Returns the part of `batch` that belongs to `rank`, and the largest number of samples
        that a rank has.

        The part has as many positions as the rank has samples; which samples they are follows from
        its readers.
        """
        counts = self.counts(batch)
        by_rank = [int(counts[r::world_size].sum()) for r in range(world_size)]
        start = batch.start + sum(by_rank[:rank])
        return Span(start, start + by_rank[rank]), max(by_rank)

    def slices(
        self, batch: GlobalBatch, rank: int, world_size: int, size: int
    ) -> Iterator[MicroBatch]:
        """Returns `rank`'s slices of `batch`, each of which is of one group of readers."""
        samples_G = group_sums(self.counts(batch), self.global_batch // size)
        return slices_of_groups(batch, samples_G, rank, world_size, size, never_one=self.never_one)

    def check_slices(self, size: int, world_size: int) -> None:
        """Raises `UserError` unless the readers can be divided into one group for each slice."""
        check_groups(self.order.readers, self.global_batch // size, world_size)

    def indices(self, batch: GlobalBatch) -> list[int]:
        """Raises `UserError`: the samples of a stream have no index."""
        raise UserError("session.batch_indices: the samples of a stream have no index")

    def counts(self, batch: GlobalBatch) -> Counts:
        """Returns how many samples of each reader a batch takes."""
        return self.drawn(batch.epoch, batch.stop) - self.drawn(batch.epoch, batch.start)

    def steps_from(self, position: DataPosition) -> int | None:
        """Returns the number of global batches to the end of the loop; None: it is unknown."""
        if self.steps is None or self.epochs is not None:
            return None
        return max(0, self.steps - position.steps)


def progress_of(stream: Any, offset: int, readers: int) -> ReadProgress:
    """Returns what a position in the data says of its epoch.

    Args:
        stream: The rows of the readers; None: none has read anything.
        offset: Number of samples of the epoch that are used.
        readers: Number of readers of the stream.
    """
    progress = ReadProgress.nothing(readers)
    if stream is None:
        return progress
    progress = ReadProgress(progress.read_V, np.array([row[0] for row in stream], np.int64))
    # So many samples of each reader have been drawn, hence read.
    return ReadProgress(progress.drawn(offset), progress.total_V)
