"""Runs schedules: one, to be looked at, or many, each of them short."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from tests.simulation.cluster import Cluster
from tests.simulation.drawing import draw
from tests.simulation.schedule import Plan

BATCH = 25
"""Schedules that a process is given at once."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A schedule that broke a rule."""

    seed: int
    nodes: int | None
    what: str
    events: tuple[str, ...]

    @property
    def brief(self) -> str:
        return f"seed {self.seed} breaks {self.what}"

    def __str__(self) -> str:
        nodes = f" --nodes {self.nodes}" if self.nodes else ""
        return "\n".join(
            [
                self.brief,
                *(f"    {event}" for event in self.events),
                f"again, with every event: python -m tests.simulation {self.seed}{nodes} --trace",
            ]
        )


def run_one(seed: int, nodes: int | None = None) -> Failure | None:
    """One schedule; what went wrong, if anything."""
    return run_plan(draw(seed, nodes), nodes)


def run_plan(plan: Plan, nodes: int | None = None) -> Failure | None:
    """One schedule; what went wrong, if anything."""
    cluster = Cluster(plan)
    try:
        cluster.run()
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to a seed
        what = f"{type(error).__name__}: {error}"
        return Failure(plan.seed, nodes, what, tuple(cluster.history)[-25:])
    return None


def run_many(
    seeds: Iterable[int],
    nodes: int | None = None,
    *,
    processes: int,
    tell: Callable[[Failure], None] = lambda failure: None,
) -> tuple[int, list[Failure]]:
    """Schedules in parallel: how many ran, and what failed. tell: called for each that did."""
    seed_list = list(seeds)
    size = BATCH if nodes is None else 1
    batches = [(seed_list[i : i + size], nodes) for i in range(0, len(seed_list), size)]
    ran, failures = 0, []
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for count, batch_failures in pool.map(_run_batch, batches):
            ran += count
            failures += batch_failures
            for failure in batch_failures:
                tell(failure)
    return ran, failures


def first_failure(seeds: Iterable[int]) -> tuple[int, Failure | None]:
    """Schedules one after another, until one breaks a rule: how many ran, and that one."""
    ran = 0
    for ran, seed in enumerate(seeds, 1):
        failure = run_one(seed)
        if failure is not None:
            return ran, failure
    return ran, None


def _run_batch(work: tuple[list[int], int | None]) -> tuple[int, list[Failure]]:
    seeds, nodes = work
    gc.disable()  # what a schedule leaves in cycles is freed between two batches
    results = [run_one(seed, nodes) for seed in seeds]
    gc.collect()
    return len(results), [failure for failure in results if failure is not None]


def trace(seed: int, nodes: int | None, *, aloud: bool) -> int:
    """One schedule for a reader; the exit status."""
    plan = draw(seed, nodes)
    print(plan)
    cluster = Cluster(plan, print if aloud else None)
    try:
        cluster.run()
    except AssertionError as error:
        if not aloud:
            print(*cluster.history, sep="\n")
        print(f"seed {seed} breaks {error}", file=sys.stderr)
        return 1
    assert cluster.done is not None
    print(
        f"seed {seed}: {cluster.done.reason}; {cluster.timeline.now_s:.1f} s of virtual time, "
        f"{cluster.timeline.events} events, {len(cluster.rules.worlds)} generations"
    )
    return 0
