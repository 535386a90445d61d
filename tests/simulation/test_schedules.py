"""Thousands of seeded schedules of faults on virtual time, each judged by every rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.cluster import Cluster
from tests.simulation.drawing import FAULTS, RESTS_S, draw
from tests.simulation.running import run_one
from tests.simulation.schedule import LOSSES
from tests.simulation.seeds import (
    QUICK,
    QUICK_LARGE,
    check,
    check_builds,
    check_large,
    parts,
)
from tests.support.cases import slow


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", parts(QUICK), ids=lambda seeds: f"from-{seeds.start}")
def test_small_clusters_keep_every_rule(seeds: range) -> None:
    check(seeds)


@pytest.mark.timeout(600)
def test_large_clusters_keep_every_rule() -> None:
    check_large(QUICK_LARGE)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", [0, *map(slow, (25, 50, 75))])
def test_agents_that_rest_until_a_timer_is_due_keep_every_rule(first: int) -> None:
    """They look only when something wakes them, or when their next timer is due."""
    for seed in range(first, first + 25):
        plan = replace(draw(seed), rests=True, poll_s=RESTS_S)
        Cluster(plan).run()


@pytest.mark.timeout(600)
def test_nodes_of_two_builds_keep_every_rule() -> None:
    """Fleets that are upgraded while they meet the faults of a seed (BD1 to BD5)."""
    check_builds(range(20))


def test_each_kind_of_fault_is_drawn_among_the_quick_schedules() -> None:
    directed = {
        *("freeze-agent", "freeze-writer", "freeze-committer", "drain-newcomer"),
        *("odd-run", "join-backed-up", "same-name", "loop-error"),
    }
    plans = [draw(seed) for seed in QUICK]
    drawn = {fault.kind for plan in plans for fault in plan.faults}
    assert not {*FAULTS, *LOSSES, *directed} - drawn
    assert any(plan.rests for plan in plans) and any(plan.phased for plan in plans)


def test_a_seed_runs_the_same_way_each_time() -> None:
    def told(seed: int) -> list[str]:
        lines: list[str] = []
        Cluster(draw(seed), lines.append).run()
        return lines

    assert told(7) == told(7)
    assert run_one(7) is None
