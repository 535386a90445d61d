"""The size of micro-batches: given, whole, automatic."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from elasticzero.data.loader import BatchReader, RankSchedule
from elasticzero.data.position import DataPosition, GlobalBatch
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.errors import UserError

PLAN = BatchPlan(order=SampleOrder(samples=100), global_batch=20, steps=1)
BATCH = GlobalBatch(epoch=0, start=0, stop=20)


def schedule(**options: Any) -> RankSchedule:
    return RankSchedule(plan=PLAN, rank=0, world_size=2, **options)


def sizes(rank: RankSchedule) -> list[int]:
    return [len(part.positions) for part in rank.parts(BATCH, 1)]


def test_an_automatic_size_is_the_whole_part_until_memory_is_short() -> None:
    assert sizes(schedule(micro_batch="auto")) == [10]
    assert sizes(schedule(micro_batch="auto", micro_batch_limit=4)) == [4, 4, 2]
    assert sizes(schedule(micro_batch_limit=4)) == [10]


def test_only_an_automatic_size_can_be_halved() -> None:
    [part] = schedule(micro_batch="auto").parts(BATCH, 1)
    assert schedule(micro_batch="auto").halved(part) == 5
    assert schedule(micro_batch=10).halved(part) is None
    [one, *_] = schedule(micro_batch="auto", micro_batch_limit=1).parts(BATCH, 1)
    assert schedule(micro_batch="auto").halved(one) is None


@pytest.mark.parametrize("size", [0, -1, "half"])
def test_another_size_is_refused(size: Any) -> None:
    with pytest.raises(UserError, match="at least 1, or auto"):
        schedule(micro_batch=size)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "workers",
    [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)],
)
def test_batches_go_on_in_another_world_as_if_they_began_there(seed: int, workers: int) -> None:
    """Wherever that is, at an epoch's end or near the loop's, and again in a third world."""
    chance = random.Random(seed)
    plan = BatchPlan(order=SampleOrder(samples=23, seed=seed), global_batch=6, epochs=3)
    micro = chance.choice([None, 1, 2])
    reader = BatchReader(dataset=range(23), device=torch.device("cpu"), num_workers=workers)

    def placed(rank: int, world_size: int) -> RankSchedule:
        return RankSchedule(plan=plan, rank=rank, world_size=world_size, micro_batch=micro)

    schedule, position = placed(2, 3), DataPosition()
    data: Any = reader.open(schedule, position)
    for place in (placed(1, 2), placed(0, 1), None):
        for _ in range(100 if place is None else chance.randrange(5)):
            if (step := plan.next(position)) is None:
                return
            batch, position = step
            indices = plan.indices(batch)
            for part in schedule.parts(batch, 1):
                first, last = part.positions.start - batch.start, part.positions.stop - batch.start
                assert next(data).tolist() == indices[first:last]
        if place is not None:
            schedule = place
            data = data.in_world(schedule, position)
