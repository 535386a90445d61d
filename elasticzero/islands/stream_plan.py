"""Divides what an island has been given of a stream into its inner batches. Pure but for the table
of what it has been given, and what its ranks have read.

A stream's readers give their samples in turn (`data/streams/turn.py`), and how many each has is not
known before. So that islands read different shards, the readers are divided into sections: runs of
some readers, with a turn of their own. The plan's epochs are sections: of S sections, section s of
epoch e is number e·S + s. In the order of all samples each has `SECTION` positions, of which those
after its last sample stay without one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from elasticzero.data.position import DataPosition, GlobalBatch
from elasticzero.data.sampling import loop_start
from elasticzero.data.streams.plan import StreamPlan, progress_of
from elasticzero.data.streams.turn import ReadProgress
from elasticzero.errors import UserError
from elasticzero.ipc.rounds import (
    NONE,
    GivenSamples,
    IslandProgress,
    SamplesLeft,
    StreamMark,
    nearest_mark,
)
from elasticzero.islands.plan import ClaimTable
from elasticzero.islands.progress import after_step
from elasticzero.options.settings import DataChange

SECTION = 1 << 40
"""Positions of a section, more than any has samples."""
ENDLESS = 1 << 62
"""Positions of a loop that its steps alone end."""


@dataclass(kw_only=True)
class IslandStreamPlan(StreamPlan):
    """Divides what an island has been given into batches, as far as its ranks have read."""

    table: ClaimTable
    stand: tuple[int, int] = (-1, -1)
    """Position from which the open readers give samples next, and the steps of the loop by then."""
    opened: set[int] = field(default_factory=set)
    """Sections of which the open readers do not give all samples any more."""
    ended: dict[int, int] = field(default_factory=dict)
    """Number of samples that are used of each section that was read to its end."""
    empty: int = 0
    """Number of sections without a sample that were met one after the other."""

    @property
    def sections(self) -> int:
        """Returns the number of sections of an epoch: about as many as each has readers."""
        return math.isqrt(self.order.readers)

    @property
    def section(self) -> int:
        """Returns the number of positions in a section."""
        return SECTION

    @property
    def epoch_positions(self) -> int:
        """Returns the number of positions in an epoch."""
        return self.sections * SECTION

    @property
    def total(self) -> int:
        """Returns the number of positions in the whole loop."""
        return ENDLESS if self.epochs is None else self.epochs * self.epoch_positions

    @property
    def limit(self) -> int | None:
        """Returns the most samples of the whole loop; None: as many as there are."""
        return None if self.steps is None else self.steps * self.global_batch

    def start(
        self,
        position: DataPosition,
        loop: int,
        dataset: int = 0,
        allowed: Collection[DataChange] = (),
    ) -> DataPosition:
        """Returns the position at which the loop begins, as `BatchPlan.start` does; nothing is read
        then."""
        self._forget()
        self.ended |= {end // SECTION: end % SECTION for end in (position.island or NONE).ends}
        return loop_start(self, position, loop, dataset, allowed)

    def begun_by(self, position: DataPosition) -> IslandProgress:
        """Returns the progress of an island whose state is that of a job without islands.

        Such a job has taken the samples of all readers in turn. So it has a first part of the order
        of each section.

        Args:
            position: The position of that state.
        """
        used = position.steps * self.global_batch
        following = (position.epoch - position.first_epoch + 1) * self.epoch_positions
        if not position.offset:
            following -= self.epoch_positions
            return replace(NONE, left=SamplesLeft(next=following, committed=used))
        rows, readers = position.stream, self.order.readers
        drawn_V = progress_of(rows, position.offset, readers).drawn(position.offset)
        pieces, marks = [], []
        for number in range(following // SECTION - self.sections, following // SECTION):
            run = self.readers_in(number)
            at = number * SECTION + int(drawn_V[run.start : run.stop].sum())
            pieces.append((at, (number + 1) * SECTION))
            if rows is not None:
                marks.append(StreamMark(at=at, rows=tuple(tuple(rows[v]) for v in run)))
        left = SamplesLeft(
            next=following, earlier=tuple(pieces), committed=used, marks=tuple(marks)
        )
        return replace(NONE, left=left)

    # What the readers have.

    def unread(self, epoch: int) -> ReadProgress:
        """Returns the progress of a section of which nothing is read: others' readers have none."""
        nothing = ReadProgress.nothing(self.order.readers)
        total_V, run = nothing.total_V * 0, self.readers_in(epoch)
        total_V[run.start : run.stop] = nothing.total_V[run.start : run.stop]
        return ReadProgress(nothing.read_V, total_V)

    def readers_in(self, epoch: int) -> range:
        """Returns the readers of a section."""
        place, count = epoch % self.sections, self.sections
        readers = self.order.readers
        return range(place * readers // count, (place + 1) * readers // count)

    def epoch_of(self, epoch: int) -> int:
        """Returns the epoch of the stream that a section is of."""
        return epoch // self.sections

    def units(self, rank: int, world_size: int, groups: int | None) -> list[Sequence[range]]:
        """Returns the units of a rank by section, as `StreamPlan.units` does.

        Raises:
            UserError: A section has fewer readers than there are ranks.
        """
        (units,) = super().units(rank, world_size, groups)
        runs = [self.readers_in(number) for number in range(self.sections)]
        if world_size > min(map(len, runs)):
            raise UserError(
                f"the stream has {self.order.readers} readers, of which islands read "
                f"{min(map(len, runs))} at a time, and this island has {world_size} ranks, each of "
                f"which needs one: give ez.Stream readers={world_size**2}, or more"
            )
        return [[unit for unit in units if unit.start in run] for run in runs]

    def check_samples(self, epoch: int) -> None:
        """Notes the end of a section that was read to its end; it may have no sample."""
        if self.of(epoch).whole:
            decided = self.of(epoch).decided
            left_out = decided % self.global_batch if self.drop_last else 0
            self.ended[epoch] = decided - left_out
            self.empty = 0 if decided else self.empty + 1

    def check_stream(self, progress: IslandProgress) -> None:
        """Raises `UserError` if several epochs have no sample.

        Args:
            progress: How far the island is.
        """
        if self.empty > 4 * self.sections and not progress.left.committed:
            raise UserError("the stream gave no sample at all: check its shards")

    def enter(self, start: int, marks: Collection[StreamMark]) -> int:
        """Forgets what was read, for readers that are opened anew to come to a position.

        Args:
            start: The position, in the order of all samples.
            marks: Marks from which they may begin.

        Returns:
            The place in its section from which they begin.
        """
        self._forget()
        number = start // SECTION
        mark, run = nearest_mark(marks, start, SECTION), self.readers_in(number)
        if mark is None or len(mark.rows) != len(run):
            return 0
        rows = [(0,) * len(mark.rows[0])] * self.order.readers
        rows[run.start : run.stop] = mark.rows
        place = mark.at - number * SECTION
        self.rows[number] = tuple(rows)
        self.progress[number] = progress_of(rows, place, self.order.readers)
        self.check_samples(number)
        return place

    def _forget(self) -> None:
        self.progress, self.rows, self.stand = {}, {}, (-1, -1)
        self.opened.clear()
        self._drawn.clear()

    def stands_at(self, start: int, steps: int) -> None:
        """Notes from where the open readers give samples next. Those before, should the island be
        given them again, are behind them.

        Args:
            start: The position, in the order of all samples.
            steps: Number of steps of the loop by then.
        """
        self.stand = start, steps
        self.opened.add(start // SECTION)
        in_claims = {claim.start // SECTION for claim in self.table.claims}
        self.ended = {
            number: samples
            for number, samples in self.ended.items()
            if number in in_claims or number in self.progress
        }

    @property
    def ends(self) -> tuple[int, ...]:
        """Returns the positions after the last samples of the sections that were read to their
        ends."""
        return tuple(number * SECTION + samples for number, samples in sorted(self.ended.items()))

    def _is_decided(self, number: int, stop: int) -> bool:
        """Returns whether it is known which of a section's places before `stop` have a sample."""
        needed = -(-stop // self.global_batch) * self.global_batch if self.drop_last else stop
        return self.of(number).whole or self.of(number).decided >= needed

    # What the island does next.

    def upcoming(self, position: DataPosition) -> tuple[GivenSamples, int] | None:
        """Returns the claim that the island goes on with, and the position of its next sample;
        None: it has none that is not known to be without samples."""
        at = position.island or NONE
        for claim in self.table.claims:
            start = max(claim.start, at.upto) if claim.number == at.claim else claim.start
            number, place = divmod(start, SECTION)
            is_there = place < self.ended.get(number, SECTION)
            if claim.number >= at.claim and start < claim.stop and is_there:
                return claim, start
        return None

    def comes_next(self, position: DataPosition, start: int) -> bool:
        """Returns whether the open readers give the sample at `start` next, or are opened by that.

        Args:
            position: Where the island is.
            start: A position in the order of all samples.
        """
        number, place = divmod(start, SECTION)
        is_ahead = position.steps > self.stand[1]
        at = (position.island or NONE).upto if is_ahead else self.stand[0]
        # Readers of a section are closed as those of a later one give samples.
        return at == start or (not place and number not in self.opened and number > at // SECTION)

    def next(self, position: DataPosition) -> tuple[GlobalBatch, DataPosition] | None:
        """Returns (the island's batch at `position`, the position after it), or None where it has
        no samples now, or more must be read to tell."""
        upcoming = self.upcoming(position)
        if upcoming is None or not self.comes_next(position, upcoming[1]):
            return None
        claim, start = upcoming
        number, place = divmod(start, SECTION)
        stop = place + min(claim.batch, claim.stop - start)
        stop = min(stop, self.ended.get(number, stop))
        if not self._is_decided(number, stop):
            return None
        batch = GlobalBatch(epoch=number, start=place, stop=stop)
        upto = number * SECTION + stop
        island = after_step(
            position.island or NONE, claim.number, upto, stop - place, self._mark(number, upto)
        )
        after = replace(
            position,
            epoch=self.epoch_of(number),
            offset=stop,
            steps=position.steps + 1,
            stream=None,
            island=island,
        )
        return batch, after

    def _mark(self, number: int, at: int) -> StreamMark | None:
        rows, run = self.rows.get(number), self.readers_in(number)
        if rows is None:
            return None
        return StreamMark(at=at, rows=tuple(tuple(row) for row in rows[run.start : run.stop]))

    def lacks(self, position: DataPosition, batches: int) -> int | None:
        """Returns the section of which more must be known to name so many batches from `position`
        on; None: enough is known, or what comes then is read from another place."""
        for _ in range(batches):
            upcoming = self.upcoming(position)
            if upcoming is None or not self.comes_next(position, upcoming[1]):
                return None
            following = self.next(position)
            if following is None:
                return upcoming[1] // SECTION
            position = following[1]
        return None

    def ends_epoch(self, position: DataPosition) -> bool:
        """Returns False: islands come to the end of an epoch at different times."""
        return False

    def wrapped(self, position: DataPosition) -> DataPosition:
        """Returns the same position."""
        return position
