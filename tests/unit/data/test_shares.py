"""Parts of a global batch by the ranks' speeds: what they come to, and when they change."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from elasticzero.data.loader import RankSchedule
from elasticzero.data.position import DataPosition, GlobalBatch
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.data.shares import (
    GAIN,
    RankSpeed,
    Shares,
    ShareTable,
    balanced,
    counts,
    part_of,
)

PLAN = BatchPlan(order=SampleOrder(samples=1000), global_batch=60, steps=12)


def measured(speeds: list[float], counts_R: tuple[int, ...]) -> list[RankSpeed]:
    """What ranks of these speeds, in samples a second, measure with so many samples each."""
    return [RankSpeed(speed, count / speed) for speed, count in zip(speeds, counts_R, strict=True)]


def dealt(samples: int, shares: Shares | None, ranks: int) -> tuple[int, ...]:
    even = tuple([1.0 / ranks] * ranks)
    result = counts(samples, shares or even, 1, 1)
    assert result is not None
    return result


def test_a_slow_rank_gets_less_until_all_end_together() -> None:
    speeds = [50.0, 100.0, 100.0]
    shares = balanced(measured(speeds, (20, 20, 20)), None, 1.3)
    assert shares == pytest.approx((0.2, 0.4, 0.4))
    assert dealt(60, shares, 3) == (12, 24, 24)
    assert balanced(measured(speeds, (12, 24, 24)), shares, 1.3) == shares


def test_a_rank_that_is_quick_again_gets_its_share_back() -> None:
    speeds = [100.0, 100.0, 101.0]
    assert balanced(measured(speeds, (12, 24, 24)), (0.2, 0.4, 0.4), 1.3) is None


@pytest.mark.parametrize(
    ("speeds", "factor"),
    [([80.0, 100.0, 100.0], 1.3), ([100.0, 100.0, 100.0], 1.0), ([50.0, 100.0, 100.0], 3.0)],
)
def test_ranks_that_are_hardly_slower_keep_equal_shares(speeds: list[float], factor: float) -> None:
    assert balanced(measured(speeds, (20, 20, 20)), None, factor) is None


def test_a_rank_that_has_measured_nothing_changes_nothing() -> None:
    speeds = [RankSpeed(50.0, 0.4), RankSpeed(0.0, 0.0), RankSpeed(100.0, 0.2)]
    assert balanced(speeds, None, 1.3) is None
    assert balanced(speeds, (0.2, 0.4, 0.4), 1.3) == (0.2, 0.4, 0.4)


def test_any_ranks_come_to_a_step_that_no_share_makes_shorter() -> None:
    """Each time the longest part of the step becomes shorter by GAIN, or all stays as it is."""
    draws = random.Random(5)
    for _ in range(300):
        ranks = draws.randint(2, 9)
        speeds = [draws.uniform(10.0, 200.0) for _ in range(ranks)]
        shares: Shares | None = None
        for _ in range(6):
            dealt_R = dealt(20_000, shares, ranks)
            before_s = max(count / speed for count, speed in zip(dealt_R, speeds, strict=True))
            following = balanced(measured(speeds, dealt_R), shares, 1.2)
            if following == shares:
                break
            after_R = dealt(20_000, following, ranks)
            after_s = max(count / speed for count, speed in zip(after_R, speeds, strict=True))
            assert after_s < (1.0 - GAIN / 2) * before_s, (speeds, shares, following)
            shares = following
        else:
            pytest.fail(f"shares never settle: {speeds}")


def test_any_counts_have_each_sample_once_and_no_rank_without_one() -> None:
    draws = random.Random(6)
    for _ in range(2000):
        ranks, least = draws.randint(1, 9), draws.randint(1, 2)
        weights = [draws.choice([0.0, draws.random(), 5.0]) + 1e-9 for _ in range(ranks)]
        shares = tuple(weight / sum(weights) for weight in weights)
        samples, unit = draws.randint(1, 200), draws.choice([1, 2, 8])
        case = (samples, shares, least, unit)
        dealt_R = counts(*case)
        if samples < ranks * least:
            assert dealt_R is None, case
            continue
        assert dealt_R is not None and sum(dealt_R) == samples and min(dealt_R) >= least, case
        batch = GlobalBatch(epoch=0, start=7, stop=7 + samples)
        parts = [part_of(batch, dealt_R, rank) for rank in range(ranks)]
        assert parts[0].start == batch.start and parts[-1].stop == batch.stop, case
        assert all(before.stop == after.start for before, after in pairwise(parts)), case


def test_whole_micro_batches_move() -> None:
    assert counts(100, (0.2, 0.4, 0.4), 1, 8) == (16, 44, 40)
    assert counts(40, (0.2, 0.4, 0.4), 1, 8) == (8, 16, 16), "too few for whole ones"


def test_shares_hold_from_a_batch_on_of_which_nothing_is_read() -> None:
    """What a rank reads ahead, and what it computes, are the same samples."""
    schedules = [
        RankSchedule(plan=PLAN, rank=rank, world_size=3, micro_batch=8, shares=ShareTable())
        for rank in range(3)
    ]
    requests = [schedule.requests(DataPosition()) for schedule in schedules]
    used: dict[int, list[int]] = {}
    for step, (batch, _) in enumerate(schedules[0].steps(DataPosition()), 1):
        if step == 4:
            tables = [schedule.shares for schedule in schedules]
            first = 1 + max(table.furthest for table in tables if table is not None)
            assert first > step, "some samples are asked for ahead"
            for table in tables:
                assert table is not None
                table.put(first, (0.2, 0.4, 0.4))
        for rank, schedule in enumerate(schedules):
            for part in schedule.parts(batch, step):
                request = next(requests[rank])
                assert isinstance(request, list) and len(request) == len(part.positions)
                if part.weight:
                    used.setdefault(step, []).extend(request)
    for step, (batch, _) in enumerate(schedules[0].steps(DataPosition()), 1):
        assert sorted(used[step]) == sorted(PLAN.indices(batch)), step
    weights = [sum(part.weight for part in s.parts(batch, 12)) for s in schedules]
    assert weights == [8, 28, 24], "one micro-batch and three, and the rest"


def test_shares_before_a_change_hold_until_its_step() -> None:
    table = ShareTable()
    assert table.at(1) is None
    table.put(5, (0.5, 0.5))
    assert (table.at(4), table.at(5), table.newest) == (None, (0.5, 0.5), (0.5, 0.5))
    table.put(9, None)
    assert (table.at(8), table.at(9)) == ((0.5, 0.5), None)
