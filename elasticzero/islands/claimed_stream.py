"""Reads what an island has been given of a stream, in whatever order that comes."""

from __future__ import annotations

from typing import Any

from elasticzero.data.loader import RankSchedule
from elasticzero.data.position import DataPosition, GlobalBatch
from elasticzero.data.streams.loader import StreamBatches, StreamReader
from elasticzero.ipc.rounds import NONE
from elasticzero.islands.stream_plan import SECTION, IslandStreamPlan


class ClaimedStream:
    """Yields the micro-batches of one rank of an island.

    Readers go on while samples follow each other, and into sections of which nothing is read. For
    samples that lie elsewhere others are opened, at the nearest mark before.
    """

    def __init__(
        self, reader: StreamReader, schedule: RankSchedule, plan: IslandStreamPlan
    ) -> None:
        """Begins with `prepare`.

        Args:
            reader: Opens the stream.
            schedule: What this rank computes of the loop.
            plan: The plan of that.
        """
        self._reader, self._schedule, self._plan = reader, schedule, plan
        self._batches: StreamBatches | None = None

    def prepare(self, position: DataPosition) -> None:
        """Reads as much as is needed to name the island's next batch; all ranks call this together.

        Args:
            position: Where the island is.
        """
        while (upcoming := self._plan.upcoming(position)) is not None:
            _, start = upcoming
            if self._batches is None or not self._plan.comes_next(position, start):
                self._come_to(position, start)
            else:
                self._batches.learn_enough(position, *divmod(start, SECTION))
            if self._plan.next(position) is not None:
                return
            self._plan.check_stream(position.island or NONE)

    def _come_to(self, position: DataPosition, start: int) -> None:
        """Has readers give the sample at `start` next."""
        at, (number, place) = position.island or NONE, divmod(start, SECTION)
        (standing, first), is_open = divmod(self._plan.stand[0], SECTION), self._batches is not None
        if not is_open or standing != number or first > place:
            self.drop()
            marks = at.left.marks if at.mark is None else (at.mark, *at.left.marks)
            first = self._plan.enter(start, marks)
            self._batches = StreamBatches(self._reader, self._schedule, position)
        assert self._batches is not None
        self._plan.stands_at(start, position.steps)
        self._batches.skip(number, first, place)
        self._batches.learn_enough(position, number, place)

    def drop(self) -> None:
        """Drops what was read ahead."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def begin_at(self, position: DataPosition) -> None:
        """Does nothing: the readers are there already."""

    def __next__(self) -> Any:
        assert self._batches is not None, "a batch begins that was not prepared"
        return next(self._batches)

    def in_world(self, schedule: RankSchedule, position: DataPosition) -> ClaimedStream:
        """Reads on as a rank of another world."""
        self.drop()
        self._schedule = schedule
        self.prepare(position)
        return self

    def look_ahead(self, batch: GlobalBatch, after: DataPosition) -> None:
        """Makes sure that the batch after this one can be named, as far as it is read on."""
        assert self._batches is not None
        self._batches.look_ahead(batch, after)
        self._plan.stands_at(batch.epoch * SECTION + batch.stop, after.steps)

    def close(self) -> None:
        """Tells the processes that load data to end."""
        self.drop()
