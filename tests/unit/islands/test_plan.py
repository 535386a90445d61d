"""Where a loop goes on that was an island's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticzero.data.position import DataPosition
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.ipc.rounds import NONE, SamplesLeft
from elasticzero.islands.kinds import without_islands


def plan(**options: bool) -> BatchPlan:
    return BatchPlan(order=SampleOrder(samples=50), global_batch=8, epochs=3, **options)


def at(next: int, *earlier: tuple[int, int]) -> DataPosition:
    missing = sum(stop - start for start, stop in earlier)
    left = SamplesLeft(next=next, earlier=earlier, committed=next - missing)
    return DataPosition(epoch=7, offset=3, steps=99, island=replace(NONE, left=left))


@pytest.mark.parametrize(
    ("position", "epoch", "offset", "steps", "again"),
    [
        (at(0), 0, 0, 0, 0),
        (at(16), 0, 16, 2, 0),
        (at(20), 0, 20, 3, 0),
        (at(50), 1, 0, 7, 0),
        (at(66), 1, 16, 9, 0),
        (at(66, (58, 60), (62, 64)), 1, 8, 8, 4),
        (at(150), 3, 0, 21, 0),
    ],
)
def test_it_goes_on_at_the_first_sample_that_is_in_no_round(
    position: DataPosition, epoch: int, offset: int, steps: int, again: int
) -> None:
    after, text = without_islands(position, plan())
    assert (after.epoch, after.offset, after.steps) == (epoch, offset, steps)
    assert f"from sample {offset} of epoch {epoch} on: {again} samples" in text
    assert after.island is None
    assert (plan().next(after) is None) == (epoch == 3)


def test_a_dropped_end_of_an_epoch_counts_not() -> None:
    after, _ = without_islands(at(48 + 8), plan(drop_last=True))
    assert (after.epoch, after.offset, after.steps) == (1, 8, 7)
