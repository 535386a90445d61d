"""The seeds that tests run."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.drawing import draw
from tests.simulation.running import Failure, run_many, run_plan

QUICK, SLOW, CHAOS = range(140), range(140, 10_000), range(10_000, 110_000)
"""Seeds of schedules of 3 to 7 nodes, for `make test`, `make slow` and `make chaos`."""
QUICK_LARGE, SLOW_LARGE, CHAOS_LARGE = range(2), range(2, 50), range(50, 550)
"""Seeds of schedules of LARGE_NODES, for the same three."""
LARGE_NODES = (100, 100, 100, 100, 150)
PART = 250
"""Seeds that one test runs."""


def parts(seeds: range) -> list[range]:
    """Returns the seeds of each test."""
    return [seeds[first : first + PART] for first in range(0, len(seeds), PART)]


def check(seeds: range, *, processes: int = 1) -> None:
    """Runs schedules of 3 to 7 nodes in processes of their own; none may break a rule."""
    ran, failures = run_many(seeds, processes=processes)
    assert not failures, tell(failures)
    assert ran == len(seeds)


def check_large(seeds: range, *, processes: int = 1) -> None:
    """Runs schedules of LARGE_NODES nodes; none may break a rule."""
    failures: list[Failure] = []
    for index, nodes in enumerate(LARGE_NODES):
        group_seeds = [seed for seed in seeds if seed % len(LARGE_NODES) == index]
        _, group_failures = run_many(group_seeds, nodes, processes=processes)
        failures += group_failures
    assert not failures, tell(failures)


def check_builds(seeds: range) -> None:
    """Runs schedules of 3 to 7 nodes that state one of two builds; none may break a rule."""
    failures = []
    for seed in seeds:
        plan = replace(draw(seed), builds=True, releases=0.0)
        if plan.runs == 1 and (failure := run_plan(plan)) is not None:
            failures.append(failure)
    assert not failures, tell(failures)


def tell(failures: list[Failure]) -> str:
    return "\n\n".join(map(str, failures[:3])) + f"\n{len(failures)} schedules broke a rule"
