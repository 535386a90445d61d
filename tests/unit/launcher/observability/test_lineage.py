"""Which steps count."""

from __future__ import annotations

import pytest

from elasticzero.launcher.observability.lineage import Lineage, committed


def lineage(*worlds: tuple[int, int], steps: list[tuple[int, int]]) -> Lineage:
    told = Lineage()
    for generation, resume_step in worlds:
        told.take({"event": "world", "generation": generation, "resume_step": resume_step})
    for generation, step in steps:
        told.take({"event": "step", "generation": generation, "step": step})
    return told


def test_steps_after_a_later_generations_start_do_not_count() -> None:
    told = lineage((1, 0), (2, 50), (3, 40), steps=[(1, 60), (2, 55), (3, 70)])
    counts = [told.is_committed(g, s) for g, s in [(1, 40), (1, 41), (2, 51), (3, 41), (3, 70)]]
    assert counts == [True, False, False, True, True]


def test_recomputed_steps_are_counted_once_a_generation() -> None:
    told = lineage((1, 0), (2, 50), (3, 55), steps=[(1, 60), (2, 55), (3, 70)])
    assert [told.lost(g) for g in (1, 2, 3)] == [0, 10, 5]


def test_committed_samples_follow_the_lineage() -> None:
    told = lineage((1, 0), (2, 1), steps=[(1, 2), (2, 2)])
    traces = [(1, 1, [0, 1]), (1, 2, [2, 3]), (2, 2, [2, 3]), (2, 2, [2, 3])]
    assert committed(told, traces) == {1: [0, 1], 2: [2, 3]}


def test_two_versions_of_a_committed_step_are_an_error() -> None:
    told = lineage((1, 0), steps=[(1, 1)])
    with pytest.raises(ValueError, match="step 1"):
        committed(told, [(1, 1, [0]), (1, 1, [9])])
