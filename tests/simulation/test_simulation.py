"""Thousands of seeded schedules of faults on virtual time, each judged by every rule."""

from __future__ import annotations

import pytest

from tests.simulation.cluster import Cluster
from tests.simulation.running import Failure, run_many, run_one
from tests.simulation.schedule import draw

SCHEDULES = 3_000
CHAOS_SCHEDULES = 100_000
LARGE = 50
CHAOS_LARGE = 500
LARGE_NODES = (100, 100, 100, 100, 150)
PROCESSES = 2


def tell(failures: list[Failure]) -> str:
    return "\n\n".join(map(str, failures[:3])) + f"\n{len(failures)} schedules broke a rule"


def run_large(seeds: range) -> list[Failure]:
    """Schedules of hundreds of nodes."""
    count = len(LARGE_NODES)
    failures = []
    for index, nodes in enumerate(LARGE_NODES):
        _, found = run_many(seeds[index::count], nodes, processes=PROCESSES)
        failures += found
    return failures


@pytest.mark.timeout(900)
def test_small_clusters_keep_every_rule() -> None:
    ran, failures = run_many(range(SCHEDULES), processes=PROCESSES)
    assert not failures, tell(failures)
    assert ran == SCHEDULES


@pytest.mark.timeout(600)
def test_large_clusters_keep_every_rule() -> None:
    failures = run_large(range(LARGE))
    assert not failures, tell(failures)


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_many_more_clusters_keep_every_rule() -> None:
    seeds = range(SCHEDULES, SCHEDULES + CHAOS_SCHEDULES)
    _, failures = run_many(seeds, processes=PROCESSES)
    failures += run_large(range(LARGE, LARGE + CHAOS_LARGE))
    assert not failures, tell(failures)


def test_a_seed_runs_the_same_way_each_time() -> None:
    def told(seed: int) -> list[str]:
        lines: list[str] = []
        Cluster(draw(seed), lines.append).run()
        return lines

    assert told(7) == told(7)
    assert run_one(7) is None
