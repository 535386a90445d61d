"""The other half of the schedules of `test_schedules.py`."""

from __future__ import annotations

import pytest

from tests.simulation.seeds import check, check_large, large, parts


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", parts(1), ids=lambda seeds: f"from-{seeds.start}")
def test_small_clusters_keep_every_rule(seeds: range) -> None:
    check(seeds)


@pytest.mark.timeout(600)
def test_large_clusters_keep_every_rule() -> None:
    check_large(large(1))
