"""What an agent keeps of a job's past: enough for a screen, and never much."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import pytest

from elasticzero.launcher.observability.events import EVENTS
from elasticzero.ops.dashboard.history import (
    GENERATIONS,
    LINES,
    MAX_TEXT,
    POINTS,
    Curve,
    JobHistory,
    downsampled,
)


def event(name: str, time: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"event": name, "time": time, **fields}


def world(generation: int, time: float, resume_step: int = 0, reason: str = "r") -> dict[str, Any]:
    return event(
        "world",
        time,
        generation=generation,
        members=["a", "b"],
        world_size=4,
        resume_step=resume_step,
        tier="ram",
        reason=reason,
    )


def step(generation: int, number: int, time: float) -> dict[str, Any]:
    return event("step", time, generation=generation, step=number)


def loss(number: int, value: float, rank: int = 0, time: float = 0.0) -> dict[str, Any]:
    return event("log", time, rank=rank, step=number, loss=value)


def size_of(value: object) -> int:
    """Bytes of all objects that this one alone leads to."""
    seen: dict[int, object] = {}
    left = [value]
    while left:
        one = left.pop()
        if id(one) not in seen and not isinstance(one, type):
            seen[id(one)] = one
            left += gc.get_referents(one)
    return sum(map(sys.getsizeof, seen.values()))


def test_a_short_curve_is_kept_as_it_is() -> None:
    curve = Curve()
    for at in range(5):
        curve.add(at, at / 2)
    assert curve.rows() == [[float(at), at / 2, at / 2, at / 2] for at in range(5)]


@pytest.mark.parametrize("count", [513, 2_000, 100_000])
def test_a_long_curve_keeps_its_shape_in_few_points(count: int) -> None:
    """Compared with the means of the same intervals, made in one go."""
    curve = Curve()
    values = [(at * 7919 % 1000) / 10 for at in range(count)]
    for at, value in enumerate(values):
        curve.add(at, value)
    rows, width = curve.rows(), int(curve.width)
    assert POINTS <= len(rows) <= 2 * POINTS
    assert len(rows) == -(-count // width)
    for index, (last, mean, least, most) in enumerate(rows):
        part = values[index * width : (index + 1) * width]
        assert last == index * width + len(part) - 1
        assert mean == pytest.approx(sum(part) / len(part), rel=1e-5)
        assert (least, most) == pytest.approx((min(part), max(part)))


def test_a_curve_with_gaps_stays_within_its_limit() -> None:
    curve = Curve(points=8)
    at = 0.0
    for gap in [1, 50, 1, 3000, 2, 70] * 40:
        at += gap
        curve.add(at, at)
    rows = curve.rows()
    assert len(rows) <= 16
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert rows[-1][3] == pytest.approx(at)


def test_values_that_are_no_numbers_or_come_late_are_left_out() -> None:
    curve = Curve()
    for at, value in ((1, 1.0), (2, float("nan")), (3, float("inf")), (0, 5.0), (4, 2.0)):
        curve.add(at, value)
    assert [row[:2] for row in curve.rows()] == [[1, 1.0], [4, 2.0]]
    json.loads(json.dumps(curve.rows(), allow_nan=False))


def test_steps_that_a_generation_does_again_replace_the_lost_ones() -> None:
    history = JobHistory("a")
    history.take(world(1, 0.0))
    for number in range(1, 9):
        history.take(loss(number, 10.0 - number))
    history.take(world(2, 1.0, resume_step=5))
    history.take(loss(6, 99.0))
    assert [row[:2] for row in history.values()["loss"]] == [
        [1, 9.0], [2, 8.0], [3, 7.0], [4, 6.0], [5, 5.0], [6, 99.0]
    ]  # fmt: skip


def test_the_loss_is_that_of_the_first_worker_of_the_node() -> None:
    history = JobHistory("a")
    history.take(event("start", ranks=[2, 3]))
    history.take(loss(1, 1.0, rank=3))
    history.take(loss(1, 2.0, rank=2))
    assert [row[1] for row in history.values()["loss"]] == [2.0]


def test_generations_have_their_times_and_reasons() -> None:
    history = JobHistory("a")
    history.take(world(1, 10.0, reason="2 nodes came together"))
    history.take(step(1, 1, 12.0))
    history.take(step(1, 2, 13.0))
    history.take(event("round", 20.0, kind="lapse", reason="b is lost"))
    history.take(world(2, 21.0, resume_step=2, reason="b is lost"))
    first, second = history.values()["generations"]
    assert (first["at"], first["trained_at"], first["ended_at"]) == (10.0, 12.0, 20.0)
    assert (first["kind"], first["nodes"], first["ranks"]) == ("lapse", 2, 4)
    assert (second["trained_at"], second["ended_at"]) == (None, None)
    assert (second["reason"], second["resume_step"]) == ("b is lost", 2)


def test_events_are_sentences_with_a_weight() -> None:
    history = JobHistory("a")
    for one in (
        world(1, 1.0, reason="2 nodes came together"),
        event("failed", 2.0, rank=1, blame="user", message="ValueError: no"),
        event("failed", 2.0, rank=0, blame="peer", message="a peer is gone"),
        event("recovery", 3.0, seconds=0.481, steps_lost=1),
        event("saved", 4.0, step=7, seconds=1.5, error=None),
        event("saved", 5.0, step=9, seconds=1.5, error="disk full"),
        event("control", 6.0, nnodes=[1, 3], stop=False),
        event("notice", 7.0, reason="SIGTERM (25 s of grace)"),
        event("data_changed", 7.5, step=9, allowed=["batch"], message="epoch 0 goes on"),
        event("shares_changed", 7.8, step=9, message="rank 0 has 20 %"),
        event("exit", 8.0, outcome="finished", reason="all steps are done"),
    ):
        history.take(one)
    assert history.values()["events"] == [
        [1.0, "info", "generation 1: 4 ranks on 2 nodes, from step 0: 2 nodes came together"],
        [2.0, "error", "a: rank 1 failed: ValueError: no"],
        [3.0, "info", "training goes on after 0.48 s, 1 step done again"],
        [4.0, "info", "checkpoint of step 7 saved in 1.50 s"],
        [5.0, "warning", "the checkpoint of step 9 was not saved: disk full"],
        [6.0, "info", "an operator asks for 1:3 nodes"],
        [7.0, "warning", "a leaves: SIGTERM (25 s of grace)"],
        [7.5, "info", "epoch 0 goes on"],
        [7.8, "info", "rank 0 has 20 %"],
        [8.0, "info", "finished: all steps are done"],
    ]


def test_an_event_that_comes_again_and_again_is_one_line() -> None:
    history = JobHistory("a")
    for at in range(3):
        history.take(event("store_trouble", float(at), message="etcd does not answer"))
    history.take(event("store_recovery", 9.0, message="etcd lost its data"))
    assert history.values()["events"] == [
        [2.0, "warning", "a: etcd does not answer (again, 3 times)"],
        [9.0, "warning", "a: etcd lost its data"],
    ]


def test_the_newest_checkpoint_and_snapshot_have_their_times() -> None:
    history = JobHistory("a")
    history.take(event("saved", 4.0, step=7, seconds=1.5, error=None))
    history.take(event("saved", 5.0, step=9, seconds=1.5, error="disk full"))
    history.take(event("kept", 6.0, step=8, error=None))
    values = history.values()
    assert values["checkpoint"] == {"step": 7, "at": 4.0}
    assert values["snapshot"] == {"step": 8, "at": 6.0}


@pytest.mark.parametrize("name", EVENTS)
def test_every_documented_event_can_be_taken_in(name: str) -> None:
    """An event that is not understood would end the agent that writes it."""
    plain = {"members": ["a"], "ranks": [0], "nnodes": [1, 2], "seconds": 1.0, "error": None}
    fields: dict[str, Any] = dict.fromkeys(EVENTS[name].fields, 1)  # type: ignore[index]
    fields |= {key: value for key, value in plain.items() if key in fields}
    history = JobHistory("a")
    history.take(event(name, 1.0, **fields))
    nothing = {key: value for key, value in fields.items() if key not in ("error", "nnodes")}
    history.take(event(name, 2.0, **nothing, error="e", nnodes=None))
    json.loads(json.dumps(history.values(), allow_nan=False))


def test_a_week_takes_less_than_a_megabyte() -> None:
    """With a step in 0.6 s, of which every 33rd is taken in here, a failure in a minute, and long
    texts."""
    history = JobHistory("node-with-a-long-name")
    week_s, step_number, generation = 7 * 86400, 0, 0
    for second in range(0, week_s, 20):
        at = 1.79e9 + second
        if second % 60 == 0:
            generation += 1
            history.take(event("round", at, kind="failure", reason="é" * 500))
            history.take(world(generation, at, step_number, reason="é" * 500))
        step_number += 33
        history.take(step(generation, step_number, at))
        history.take(loss(step_number, 1.0 + 1.0 / (1 + step_number), time=at))
        history.goodput(at, 0.97 - second / week_s / 50)
        error = f"{second}: {'é' * 500}"
        history.take(event("save_failed", at, step=step_number, error=error))
    assert size_of(history) < 1_000_000
    values = history.values()
    assert len(json.dumps(values)) < 400_000
    assert len(values["generations"]) == GENERATIONS
    assert values["generations"][-1]["generation"] == generation
    assert len(values["events"]) == LINES
    assert all(len(text) <= MAX_TEXT for _, _, text in values["events"])
    for curve in (values["loss"], values["goodput"]):
        assert POINTS <= len(curve) <= 2 * POINTS


def test_thinned_values_are_means_of_neighbours() -> None:
    assert downsampled([1.0, 2.0], 8) == [1.0, 2.0]
    assert downsampled([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert len(downsampled([float(i) for i in range(100)], 7)) == 7


def history_of(steps: range, generation: int, began: float) -> JobHistory:
    history = JobHistory(f"node-of-{generation}")
    history.take(world(generation, began, steps.start - 1))
    for number in steps:
        history.take(step(generation, number, began + number))
        history.take(loss(number, 100.0 - number))
        history.goodput(began + number, 0.5)
    return history


def test_a_history_goes_on_where_that_of_another_agent_ends() -> None:
    old, new = history_of(range(1, 50), 1, 1000.0), history_of(range(40, 60), 2, 1045.0)
    old.take(event("saved", 1030.0, step=30, seconds=1.0, error=None))
    new.continues(old.values())
    values = new.values()
    assert [row[0] for row in values["loss"]] == list(range(1, 60))
    assert [row[0] for row in values["goodput"]] == sorted(row[0] for row in values["goodput"])
    assert [g["generation"] for g in values["generations"]] == [1, 2]
    assert values["since"] == 1000.0
    assert values["checkpoint"] == {"step": 30, "at": 1030.0}
    assert [line[0] for line in values["events"]] == [1000.0, 1030.0, 1045.0]


def test_long_histories_stay_within_the_limits_together() -> None:
    old = history_of(range(1, 2 * POINTS), 1, 0.0)
    new = history_of(range(2 * POINTS, 4 * POINTS), 2, 9000.0)
    new.continues(old.values())
    rows = new.values()["loss"]
    assert POINTS <= len(rows) <= 2 * POINTS
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert (rows[0][3], rows[-1][2]) == (99.0, 100.0 - 4 * POINTS + 1)
