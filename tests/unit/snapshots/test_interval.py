"""The interval of snapshots follows from what they cost the training."""

from __future__ import annotations

import pytest

from elasticzero.snapshots.interval import (
    FIRST_STEPS,
    MOST_STEPS,
    OVERHEAD,
    SURE_COSTS,
    IntervalTuner,
    interval,
)


@pytest.mark.parametrize(
    ("cost_s", "step_s", "every"),
    [
        (0.001, 1.0, 1),
        (0.1, 1.0, 20),
        (0.005, 0.06, 17),
        (100.0, 0.001, MOST_STEPS),
        (0.1, 0.0, MOST_STEPS),
    ],
)
def test_snapshots_stay_under_their_share_of_the_time(
    cost_s: float, step_s: float, every: int
) -> None:
    assert interval(cost_s, step_s) == every
    if every < MOST_STEPS:
        assert cost_s <= OVERHEAD * every * step_s * (1 + 1e-9)


@pytest.mark.parametrize("lost_every_s", [1.0, 10.0, 60.0, 3600.0])
@pytest.mark.parametrize("cost_s", [0.002, 0.02, 0.2])
def test_where_work_is_lost_often_the_least_is_lost_in_all(
    cost_s: float, lost_every_s: float
) -> None:
    def lost(every: int) -> float:
        """The share of the time that snapshots take, and that half an interval is done again."""
        return cost_s / (every * 0.1) + every * 0.1 / 2 / lost_every_s

    every = interval(cost_s, 0.1, 0.0, lost_every_s)
    assert every == interval(cost_s, 0.1) or lost(every) <= 1.1 * min(map(lost, range(1, 1000)))
    assert every <= interval(cost_s, 0.1)
    assert interval(cost_s, 0.1, 7.9, lost_every_s) >= 79 / 0.8


def seen(
    cost: IntervalTuner,
    *,
    stall_s: float,
    beside_s: list[float],
    quiet: int = 20,
    in_flight_s: float | None = 0.0,
) -> None:
    """One snapshot, after steps of 0.1 s."""
    for _ in range(quiet):
        cost.stepped(0.1)
    cost.captured(stall_s)
    for seconds in beside_s:
        cost.stepped(seconds)
    cost.snapshot_done(in_flight_s)


def test_the_cost_is_the_wait_and_what_steps_take_longer() -> None:
    cost = IntervalTuner()
    seen(cost, stall_s=0.02, beside_s=[0.13, 0.11, 0.1])
    assert cost.cost_s == pytest.approx(0.06)
    assert cost.step_s == pytest.approx(0.1)


def test_faster_steps_make_a_snapshot_no_cheaper_than_its_wait() -> None:
    cost = IntervalTuner()
    seen(cost, stall_s=0.02, beside_s=[0.05, 0.05])
    assert cost.cost_s == pytest.approx(0.02)


@pytest.mark.parametrize(("in_flight_s", "every"), [(0.0, 2), (0.15, 2), (0.17, 3), (0.5, 7)])
def test_a_snapshot_that_costs_little_is_held_well_before_the_next(
    in_flight_s: float, every: int
) -> None:
    cost = IntervalTuner()
    for _ in range(SURE_COSTS):
        seen(cost, stall_s=0.001, beside_s=[0.1], in_flight_s=in_flight_s)
    assert cost.proposed_interval() == every


def test_a_snapshot_that_could_not_be_held_says_nothing_of_how_long_that_takes() -> None:
    cost = IntervalTuner()
    seen(cost, stall_s=0.001, beside_s=[0.1], in_flight_s=0.5)
    for _ in range(SURE_COSTS):
        seen(cost, stall_s=0.001, beside_s=[0.1], in_flight_s=None)
    assert cost.proposed_interval() == 7


def test_one_snapshot_that_cost_much_does_not_count() -> None:
    cost = IntervalTuner()
    for beside_s in ([0.11], [0.11], [7.0], [0.11], [0.11]):
        seen(cost, stall_s=0.01, beside_s=beside_s)
    assert cost.cost_s == pytest.approx(0.02)


def test_first_intervals_are_short_at_any_first_cost() -> None:
    cost = IntervalTuner()
    assert cost.proposed_interval() == 0
    asked = []
    for _ in range(SURE_COSTS):
        seen(cost, stall_s=0.05, beside_s=[0.15])
        asked.append(cost.proposed_interval())
    assert asked == [FIRST_STEPS, *[0] * (SURE_COSTS - 2), interval(0.1, 0.1)]


def test_an_interval_changes_only_by_more_than_a_factor_of_two() -> None:
    cost = IntervalTuner()
    for _ in range(7):
        seen(cost, stall_s=0.02, beside_s=[])
    first = cost.proposed_interval()
    assert first == interval(0.02, 0.1)
    for stall_s, asked in ((0.038, 0), (0.011, 0), (0.042, interval(0.042, 0.1)), (0.03, 0)):
        for _ in range(7):
            seen(cost, stall_s=stall_s, beside_s=[])
        assert cost.proposed_interval() == asked


def test_steps_beside_adjacent_snapshots_count_where_no_slower() -> None:
    """The first steps, here of 1 s, are slow: caches are cold and kernels are chosen."""
    cost = IntervalTuner()
    for _ in range(4):
        cost.stepped(1.0)
    for _ in range(12):
        seen(cost, stall_s=0.002, beside_s=[0.12], quiet=0)
    assert cost.step_s == pytest.approx(0.12)


def test_a_snapshot_replaced_by_a_checkpoint_is_not_measured() -> None:
    cost = IntervalTuner()
    cost.stepped(0.1)
    cost.captured(0.5)
    assert cost.measuring
    cost.captured(None)
    assert not cost.measuring
    cost.snapshot_done()
    assert cost.cost_s == 0.0


def test_a_snapshot_that_was_not_in_flight_counts_for_nothing() -> None:
    cost = IntervalTuner()
    cost.stepped(0.1)
    cost.snapshot_done()
    assert (cost.cost_s, cost.proposed_interval()) == (0.0, 0)
