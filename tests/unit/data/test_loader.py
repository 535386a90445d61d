"""The size of micro-batches: given, whole, automatic."""

from __future__ import annotations

from typing import Any

import pytest

from elasticzero.data.loader import RankSchedule
from elasticzero.data.position import GlobalBatch
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.errors import UserError

PLAN = BatchPlan(order=SampleOrder(samples=100), global_batch=20, steps=1)
BATCH = GlobalBatch(epoch=0, start=0, stop=20)


def schedule(**options: Any) -> RankSchedule:
    return RankSchedule(plan=PLAN, rank=0, world_size=2, **options)


def sizes(rank: RankSchedule) -> list[int]:
    return [len(part.positions) for part in rank.parts(BATCH)]


def test_an_automatic_size_is_the_whole_part_until_memory_is_short() -> None:
    assert sizes(schedule(micro_batch="auto")) == [10]
    assert sizes(schedule(micro_batch="auto", micro_batch_limit=4)) == [4, 4, 2]
    assert sizes(schedule(micro_batch_limit=4)) == [10]


def test_only_an_automatic_size_can_be_halved() -> None:
    [part] = schedule(micro_batch="auto").parts(BATCH)
    assert schedule(micro_batch="auto").halved(part) == 5
    assert schedule(micro_batch=10).halved(part) is None
    [one, *_] = schedule(micro_batch="auto", micro_batch_limit=1).parts(BATCH)
    assert schedule(micro_batch="auto").halved(one) is None


@pytest.mark.parametrize("size", [0, -1, "half"])
def test_another_size_is_refused(size: Any) -> None:
    with pytest.raises(UserError, match="at least 1, or auto"):
        schedule(micro_batch=size)
