"""The seeds that tests run: two files of them, so that two processes of pytest share the work."""

from __future__ import annotations

from tests.simulation.running import Failure, run_many

FIRST = 0
SCHEDULES = 10_000
"""Of 3 to 7 nodes, in `make test`, from the first seed on."""
PART = 500
"""Of these run in one test."""
LARGE = 50
"""Of hundreds of nodes, in `make test`."""
LARGE_NODES = (100, 100, 100, 100, 150)
CHAOS_SCHEDULES = 100_000
CHAOS_LARGE = 500
FILES = 2


def parts(file: int) -> list[range]:
    """The seeds that the tests of one file run."""
    starts = range(FIRST + file * PART, FIRST + SCHEDULES, FILES * PART)
    return [range(start, start + PART) for start in starts]


def large(file: int) -> range:
    """The same of schedules of hundreds of nodes."""
    return range(file, LARGE, FILES)


def check(seeds: range, *, processes: int = 1) -> None:
    """Run schedules of 3 to 7 nodes in processes of their own; none may break a rule."""
    ran, failures = run_many(seeds, processes=processes)
    assert not failures, tell(failures)
    assert ran == len(seeds)


def check_large(seeds: range, *, processes: int = 1) -> None:
    """The same of schedules of hundreds of nodes."""
    failures: list[Failure] = []
    for index, nodes in enumerate(LARGE_NODES):
        mine = [seed for seed in seeds if seed % len(LARGE_NODES) == index]
        _, found = run_many(mine, nodes, processes=processes)
        failures += found
    assert not failures, tell(failures)


def tell(failures: list[Failure]) -> str:
    return "\n\n".join(map(str, failures[:3])) + f"\n{len(failures)} schedules broke a rule"
