"""Which steps count."""

from __future__ import annotations

import random
from typing import Any

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


def test_a_checkpoint_that_an_older_generation_completes_late_is_gone_on_from() -> None:
    """The agent of a node was suspended alone: the others went on from step 2 without it, and its
    part of a checkpoint of step 10 came once it ran again."""
    told = lineage((1, 0), (2, 2), (3, 2), steps=[(1, 2), (2, 14), (3, 8), (4, 12)])
    told.take({"event": "checkpoint", "generation": 2, "step": 10})
    told.take({"event": "world", "generation": 4, "resume_step": 10, "tier": "storage"})
    places = [(1, 2), (1, 3), (2, 3), (2, 10), (2, 11), (3, 3), (3, 8), (4, 11)]
    counts = [told.is_committed(*place) for place in places]
    assert counts == [True, False, True, True, False, False, False, True]


def test_recomputed_steps_are_counted_once() -> None:
    """Generation 2 does five of the ten lost steps again, and generation 3 the others."""
    told = lineage((1, 0), (2, 50), (3, 55), steps=[(1, 60), (2, 55), (3, 70)])
    assert [told.lost(g) for g in (1, 2, 3)] == [0, 10, 0]
    assert told.recomputed == 10


def test_a_step_that_was_lost_is_not_lost_again() -> None:
    """Generation 3 falls back below the start of generation 2: what generation 1 did beyond that
    was counted when generation 2 began. Generation 4 follows one that made no step."""
    worlds = (1, 0), (2, 90), (3, 80), (4, 70)
    told = lineage(*worlds, steps=[(1, 100), (2, 95)])
    assert [told.lost(g) for g, _ in worlds] == [0, 10, 15, 10]
    assert told.recomputed == 35


@pytest.mark.parametrize("seed", range(200))
def test_lost_steps_are_those_that_were_done_and_taken_back(seed: int) -> None:
    """Each generation takes back what was done after its start, and does more."""
    dice = random.Random(seed)
    told, taken_back = Lineage(), 0
    done = first = dice.choice([0, 0, 20])
    events: list[dict[str, Any]] = []
    costs = []
    for generation in range(1, dice.randint(2, 9)):
        start = dice.randint(0, done) if events else first
        costs.append(done - max(start, min(first, done)))
        taken_back += costs[-1]
        first = min(first, start)
        events.append({"event": "world", "generation": generation, "resume_step": start})
        done = start + dice.choice([0, 0, 1, dice.randint(0, 40)])
        if done > start:
            events.append({"event": "step", "generation": generation, "step": done})
    for event in dice.sample(events, len(events)):  # as the logs of several agents are read
        told.take(event)
    assert [told.lost(generation) for generation in sorted(told.resume_steps)] == costs
    assert told.recomputed == taken_back


def test_committed_samples_follow_the_lineage() -> None:
    told = lineage((1, 0), (2, 1), steps=[(1, 2), (2, 2)])
    traces = [(1, 1, [0, 1]), (1, 2, [2, 3]), (2, 2, [2, 3]), (2, 2, [2, 3])]
    assert committed(told, traces) == {1: [0, 1], 2: [2, 3]}


def test_two_versions_of_a_committed_step_are_an_error() -> None:
    told = lineage((1, 0), steps=[(1, 1)])
    with pytest.raises(ValueError, match="step 1"):
        committed(told, [(1, 1, [0]), (1, 1, [9])])
