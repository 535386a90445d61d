"""The figures of a planned change, from the times of steps: `benchmarks/recovery_gaps.py`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def benchmarks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    monkeypatch.delitem(sys.modules, "recovery_gaps", raising=False)


def steps(first: int, began_s: float, *seconds: float) -> dict[int, float]:
    """Times of steps, each some seconds after the one before."""
    times: dict[int, float] = {}
    for step, took_s in enumerate(seconds, first):
        began_s = times[step] = began_s + took_s
    return times


def test_a_pause_is_the_largest_gap_and_the_slow_down() -> None:
    from recovery_gaps import smoothness

    before = steps(1, 100.0, *[0.03] * 100)
    after = steps(101, max(before.values()), 0.2, *[0.02] * 100)
    result = smoothness({1: {}, 2: before, 3: after}, 2)
    assert result.largest_gap_s == pytest.approx(0.2)
    assert result.usual_s == pytest.approx(0.02)
    assert result.above_s == pytest.approx(0.18)
    assert result.slowed_parts_s == pytest.approx((0.0, 0.18, 0.0))


def test_slow_steps_count_within_a_second_of_the_pause_alone() -> None:
    from recovery_gaps import smoothness

    usual = [0.02] * 100
    before = steps(1, 0.0, *usual, 0.07, *[0.02] * 60, 0.05, *[0.02] * 10)
    after = steps(172, max(before.values()), 0.02, *[0.02] * 45, 0.04, *[0.02] * 20, 0.5, *usual)
    result = smoothness({4: before, 5: after}, 4)
    assert result.largest_gap_s == pytest.approx(0.05)
    assert result.slowed_s == pytest.approx(0.03 + 0.02)
    assert result.slowed_parts_s == pytest.approx((0.03, 0.0, 0.02))


def test_times_of_any_origin_and_order_give_the_same_figures() -> None:
    """Steps of several nodes come mixed, and clocks have any origin."""
    from recovery_gaps import smoothness

    rng = random.Random(7)
    for _ in range(50):
        jitter = [rng.uniform(0.02, 0.03) for _ in range(300)]
        before = steps(1, 5.0, *jitter[:150])
        after = steps(151, max(before.values()), rng.uniform(0.02, 0.3), *jitter[150:])
        result = smoothness({1: before, 2: after}, 1)
        shifted = {s: at_s + 50.0 for s, at_s in rng.sample(sorted(after.items()), len(after))}
        other = smoothness({2: shifted, 1: {s: at_s + 50.0 for s, at_s in before.items()}}, 1)
        assert other.largest_gap_s == pytest.approx(result.largest_gap_s)
        assert other.slowed_s == pytest.approx(result.slowed_s)
        gap_s = min(after.values()) - max(before.values())
        assert result.largest_gap_s == pytest.approx(max(gap_s, max(jitter[110:190])), abs=0.003)


def test_a_short_generation_takes_its_usual_step_from_all_of_its_steps() -> None:
    from recovery_gaps import smoothness

    before = steps(1, 0.0, *[0.02] * 12)
    after = steps(13, max(before.values()), 0.3, *[0.025] * 8)
    result = smoothness({1: before, 2: after}, 1)
    assert result.usual_s == pytest.approx(0.025)
    assert result.slowed_s == pytest.approx(0.275)


def test_steps_that_are_slow_at_times_slow_any_second_down() -> None:
    from recovery_gaps import smoothness

    uneven = [0.02, 0.02, 0.02, 0.06] * 75
    before = steps(1, 0.0, *uneven)
    result = smoothness({1: before, 2: steps(301, max(before.values()), *uneven)}, 1)
    assert result.slowed_s == pytest.approx(result.anyway_s, abs=0.05)
    assert result.anyway_s == pytest.approx(2.0 / 0.03 * 0.01, rel=0.1)
