"""Compares steps, losses and nodes over the lives of a run. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from elasticzero.launcher.report.life import LOSS_ROW, STEP_ROW, rows_of
from elasticzero.launcher.report.model import NodeStepTimes
from elasticzero.launcher.report.runs import JobRun
from elasticzero.launcher.report.thinning import Point, thinned

MOST_POINTS = 1200
"""Maximum number of points of a curve."""
LEAST_STEPS = 10
"""Number of steps that two nodes must share to be compared."""
SLOW = 1.1
"""Ratio of a node's step time to the mean of all nodes from which it counts as slow."""
SLOW_WAIT = 0.1
"""Share of a step for which a node must wait longer for data than others to count as slow."""

Step = tuple[int, int]
"""A generation and a step of it."""


def committed_limits(resume_steps: Mapping[int, int]) -> dict[int, float]:
    """Returns the last step of each generation that counts, from the steps at which all begin."""
    limit = float("inf")
    found: dict[int, float] = {}
    for generation in sorted(resume_steps, reverse=True):
        found[generation] = limit
        limit = min(limit, resume_steps[generation])
    return found


def step_points(run: JobRun, began_s: float) -> tuple[Point, ...]:
    """Returns the time and number of each step, in order of time, in seconds since `began_s`."""
    ends: dict[Step, float] = {}
    for life in run.lives:
        shift_s = run.at(life, 0.0) - began_s
        for generation, step, at_s, _, _ in rows_of(life.steps, STEP_ROW):
            key = (int(generation), int(step))
            ends[key] = min(at_s + shift_s, ends.get(key, float("inf")))
    points = sorted((at_s, float(step)) for (_, step), at_s in ends.items())
    return tuple(thinned(points, MOST_POINTS))


def loss_points(
    run: JobRun, limits: Mapping[int, float], began_s: float
) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Returns time and loss of the steps that count, and of those that were done again.

    The loss of a step is the mean of the ranks that logged one. limits: the last step of each
    generation that counts.
    """
    found: dict[Step, list[float]] = {}
    for life in run.lives:
        shift_s = run.at(life, 0.0) - began_s
        for generation, step, at_s, loss in rows_of(life.losses, LOSS_ROW):
            entry = found.setdefault((int(generation), int(step)), [at_s + shift_s, 0.0, 0.0])
            entry[1] += loss
            entry[2] += 1
    kept: list[Point] = []
    wasted: list[Point] = []
    for (generation, step), (at_s, total, count) in found.items():
        counts = step <= limits.get(generation, float("inf"))
        (kept if counts else wasted).append((at_s, total / count))
    return (
        tuple(thinned(sorted(kept), MOST_POINTS)),
        tuple(thinned(sorted(wasted), MOST_POINTS // 4)),
    )


def step_times(run: JobRun) -> tuple[NodeStepTimes, ...]:
    """Returns the step times of each node at the steps that it shares with another one, the slowest
    node first."""
    by_step: dict[Step, dict[str, tuple[float, float]]] = defaultdict(dict)
    for life in run.lives:
        for generation, step, _, step_s, wait_s in rows_of(life.steps, STEP_ROW):
            by_step[int(generation), int(step)][life.node] = (step_s, wait_s)
    times: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for nodes in by_step.values():
        if len(nodes) < 2:
            continue
        mean_s = sum(step_s for step_s, _ in nodes.values()) / len(nodes)
        for node, (step_s, wait_s) in nodes.items():
            times[node].append((step_s, wait_s, step_s / mean_s if mean_s > 0 else 1.0))
    compared = {node: rows for node, rows in times.items() if len(rows) >= LEAST_STEPS}
    if len(compared) < 2:
        return ()
    waits_s = {node: _mean(wait_s for _, wait_s, _ in rows) for node, rows in compared.items()}
    found = []
    for node, rows in compared.items():
        sorted_s = sorted(step_s for step_s, _, _ in rows)
        others_s = median(wait_s for other, wait_s in waits_s.items() if other != node)
        ratio, median_s = median(ratio for _, _, ratio in rows), median(sorted_s)
        waits = waits_s[node] - others_s >= SLOW_WAIT * median_s > 0
        found.append(
            NodeStepTimes(
                node=node,
                steps=len(rows),
                median_s=median_s,
                slowest_s=sorted_s[min(len(sorted_s) - 1, int(0.95 * len(sorted_s)))],
                wait_s=waits_s[node],
                ratio=ratio,
                is_slow=ratio >= SLOW or waits,
            )
        )
    return tuple(sorted(found, key=lambda times: (times.is_slow, times.ratio), reverse=True))


def _mean(numbers: Iterable[float]) -> float:
    found: Sequence[float] = list(numbers)
    return sum(found) / len(found)
