"""The round numbers and times of an axis."""

from __future__ import annotations

import pytest

from elasticzero.ops.page.ticks import moment_ticks, time_ticks, value_ticks


@pytest.mark.parametrize("whole_s", [0.004, 0.7, 17.0, 95.0, 4000.0, 90_000.0, 604_800.0, 3e7])
def test_ticks_of_time_are_few_and_differ(whole_s: float) -> None:
    ticks = time_ticks(whole_s, 8)
    assert 2 <= len(ticks) <= 9
    assert len({text for _, text in ticks}) == len(ticks)
    assert all(0 <= at_s <= whole_s * (1 + 1e-9) for at_s, _ in ticks)


@pytest.mark.parametrize(("low", "high"), [(0.0, 3.0), (2.61, 5.2), (-0.001, 0.004), (1e6, 3e9)])
def test_ticks_of_values_lie_within_the_range(low: float, high: float) -> None:
    ticks = value_ticks(low, high, 5)
    assert 2 <= len(ticks) <= 6
    assert all(low - 1e-9 <= tick <= high * (1 + 1e-9) for tick in ticks)


@pytest.mark.parametrize("whole_s", [1.0, 59.0, 601.0, 7200.0, 90_000.0, 604_800.0, 3e7])
def test_ticks_of_moments_are_round_and_few(whole_s: float) -> None:
    """The first lies before the axis: a browser may move it into view."""
    first = 1_790_000_123.4
    step_s, ticks = moment_ticks(first, first + whole_s, 5)
    times = [at for at, _ in ticks]
    assert all(at % step_s == 0 for at in times)
    assert times[0] <= first < times[0] + step_s
    assert first + whole_s - step_s < times[-1] <= first + whole_s
    assert len(times) <= 7


def test_labels_of_moments_follow_the_length_of_the_axis() -> None:
    first = 1_790_000_000.0
    labels = [moment_ticks(first, first + whole_s, 5)[1][1][1] for whole_s in (60, 7200, 864_000)]
    assert labels == ["14:13:30", "14:30", "22 Sep"]
