"""More of the schedules of `test_schedules.py`: those that take long."""

from __future__ import annotations

import pytest

from tests.simulation.seeds import (
    CHAOS,
    CHAOS_LARGE,
    SLOW,
    SLOW_LARGE,
    check,
    check_builds,
    check_large,
    parts,
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", parts(SLOW), ids=lambda seeds: f"from-{seeds.start}")
def test_small_clusters_keep_every_rule(seeds: range) -> None:
    check(seeds)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_large_clusters_keep_every_rule() -> None:
    check_large(SLOW_LARGE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_nodes_of_two_builds_keep_every_rule() -> None:
    check_builds(range(20, 220))


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_many_more_clusters_keep_every_rule() -> None:
    check(CHAOS, processes=2)
    check_large(CHAOS_LARGE, processes=2)
