"""Thousands of seeded schedules of faults on virtual time, each judged by every rule: one half of
them, and those that run for longer."""

from __future__ import annotations

import pytest

from tests.simulation.cluster import Cluster
from tests.simulation.running import run_one
from tests.simulation.schedule import draw
from tests.simulation.seeds import (
    CHAOS_LARGE,
    CHAOS_SCHEDULES,
    FIRST,
    LARGE,
    SCHEDULES,
    check,
    check_large,
    large,
    parts,
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", parts(0), ids=lambda seeds: f"from-{seeds.start}")
def test_small_clusters_keep_every_rule(seeds: range) -> None:
    check(seeds)


@pytest.mark.timeout(600)
def test_large_clusters_keep_every_rule() -> None:
    check_large(large(0))


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_many_more_clusters_keep_every_rule() -> None:
    first = FIRST + SCHEDULES
    check(range(first, first + CHAOS_SCHEDULES), processes=2)
    check_large(range(LARGE, LARGE + CHAOS_LARGE), processes=2)


def test_a_seed_runs_the_same_way_each_time() -> None:
    def told(seed: int) -> list[str]:
        lines: list[str] = []
        Cluster(draw(seed), lines.append).run()
        return lines

    assert told(7) == told(7)
    assert run_one(7) is None
