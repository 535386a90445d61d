"""What a page leaves out of a long run, and what it keeps."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticzero.ops.report.thinning import coarse, sampled, stride, thinned


def lines(*events: tuple[str, int]) -> list[bytes]:
    """Lines as `EventLog` writes them, of events and steps."""
    return [
        json.dumps({"time": 1.8e9 + i / 7, "event": event, "step": step}).encode() + b"\n"
        for i, (event, step) in enumerate(events)
    ]


def steps(first: int, last: int) -> list[tuple[str, int]]:
    return [("step", step) for step in range(first, last + 1)]


def test_short_logs_are_read_whole() -> None:
    assert stride(1000, 1000) == 1
    log = lines(*steps(1, 5), ("round", 5))
    assert list(sampled(log, 1)) == log


@pytest.mark.parametrize(("size", "most", "every"), [(1001, 1000, 2), (3500, 1000, 5), (8, 1, 11)])
def test_a_stride_is_prime(size: int, most: int, every: int) -> None:
    assert stride(size, most) == every


def test_each_generation_keeps_its_first_and_its_last_step() -> None:
    log = lines(*steps(1, 23), ("round", 23), ("world", 20), *steps(21, 33), ("exit", 0))
    kept = [json.loads(line) for line in sampled(log, 7)]
    named_steps = [(event["event"], event["step"]) for event in kept]
    assert named_steps == [
        *(("step", s) for s in (1, 7, 14, 21, 23)),
        *(("round", 23), ("world", 20)),
        *(("step", s) for s in (21, 28, 33)),
        ("exit", 0),
    ]


def test_a_log_that_ends_in_a_generation_keeps_its_last_step() -> None:
    kept = [json.loads(line)["step"] for line in sampled(lines(*steps(1, 12)), 7)]
    assert kept == [1, 7, 12]


def test_checkpoints_are_not_left_out() -> None:
    event = {"time": 1.0, "event": "captured", "step": 10, "checkpoint": True}
    snapshot = event | {"checkpoint": False}
    log = [json.dumps(one).encode() for one in (event, snapshot)]
    assert list(sampled(log, 7)) == log[:1]


numbers = st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(st.floats(0, 1e6), numbers), max_size=200), st.integers(4, 40))
def test_a_thinned_curve_keeps_its_ends_and_peaks(
    points: list[tuple[float, float]], most: int
) -> None:
    points.sort()
    kept_points = thinned(points, most)
    assert len(kept_points) <= max(most, 4)
    assert kept_points == sorted(kept_points)
    assert set(kept_points) <= set(points)
    if points:
        assert (kept_points[0][0], kept_points[-1][0]) == (points[0][0], points[-1][0])
        values, kept = [y for _, y in points], [y for _, y in kept_points]
        assert (min(values), max(values)) == (min(kept), max(kept))


def test_few_spans_stay_and_equal_neighbours_are_joined() -> None:
    spans = [(0.0, 1.0, "a"), (1.0, 2.0, "a"), (2.0, 3.0, "b"), (4.0, 5.0, "b")]
    assert coarse(spans, 5.0, 10) == [(0.0, 2.0, "a"), (2.0, 3.0, "b"), (4.0, 5.0, "b")]


def test_of_many_spans_each_column_shows_what_takes_most_of_it() -> None:
    short = [
        span
        for i in range(1000)
        for span in ((float(i), i + 0.7, "training"), (i + 0.7, i + 1.0, "recovering"))
    ]
    assert coarse(short, 1000.0, 100) == [(0.0, 1000.0, "training")]
    gone = [(s, e, what) for s, e, what in short if not 300 <= s < 500]
    columns = coarse(gone, 1000.0, 100)
    assert [(round(s), round(e)) for s, e, _ in columns] == [(0, 300), (500, 1000)]
