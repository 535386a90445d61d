"""What the leader takes from other agents' statuses."""

from __future__ import annotations

from typing import Any

from elasticzero.launcher.observability.compute_time import worker_times


def status(generation: int, times: Any) -> dict[str, Any]:
    return {"generation": generation, "compute_s": times}


def test_times_are_by_node_and_local_rank() -> None:
    statuses = {"a": status(3, {"0": 0.5, "1": 1}), "b": status(3, {"0": 0.25})}
    assert worker_times(3, statuses) == {("a", 0): 0.5, ("a", 1): 1.0, ("b", 0): 0.25}


def test_agents_in_another_generation_or_without_times_are_left_out() -> None:
    statuses = {"a": status(2, {"0": 0.5}), "b": {"generation": 3}, "c": status(3, None)}
    assert worker_times(3, statuses) == {}


def test_answers_of_another_form_are_left_out() -> None:
    assert worker_times(3, {"a": status(3, {"x": 1.0, "1": "fast", "2": 0.5})}) == {("a", 2): 0.5}
