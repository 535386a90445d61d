"""Compares steps, losses and nodes over the lives of a run. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from elasticzero.launcher.observability.compute_time import STRAGGLER_RATIO
from elasticzero.ops.page.charts import Point
from elasticzero.ops.report.life import LOSS_ROW, STEP_ROW, rows_of
from elasticzero.ops.report.model import NodeStepTimes
from elasticzero.ops.report.runs import JobRun
from elasticzero.ops.report.thinning import thinned

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
    limits: dict[int, float] = {}
    for generation in sorted(resume_steps, reverse=True):
        limits[generation] = limit
        limit = min(limit, resume_steps[generation])
    return limits


def step_points(run: JobRun, began_s: float) -> tuple[Point, ...]:
    """Returns the time and number of each step, in order of time, in seconds since `began_s`."""
    ends: dict[Step, float] = {}
    for life in run.lives:
        shift_s = run.at(life, 0.0) - began_s
        for generation, step, at_s, *_ in rows_of(life.steps, STEP_ROW):
            key = (int(generation), int(step))
            ends[key] = min(at_s + shift_s, ends.get(key, float("inf")))
    points = sorted((at_s, float(step)) for (_, step), at_s in ends.items())
    return tuple(thinned(points, MOST_POINTS))


def loss_points(
    run: JobRun, limits: Mapping[int, float], began_s: float
) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Returns time and loss of the steps that count, and of those that were done again.

    The loss of a step is the mean of the ranks that logged one.

    Args:
        run: the lives of the agents, with the losses that they logged.
        limits: the last step of each generation that counts.
        began_s: Unix time from which the points' times count.
    """
    sums: dict[Step, list[float]] = {}
    for life in run.lives:
        shift_s = run.at(life, 0.0) - began_s
        for generation, step, at_s, loss in rows_of(life.losses, LOSS_ROW):
            entry = sums.setdefault((int(generation), int(step)), [at_s + shift_s, 0.0, 0.0])
            entry[1] += loss
            entry[2] += 1
    kept: list[Point] = []
    wasted: list[Point] = []
    for (generation, step), (at_s, total, count) in sums.items():
        counts = step <= limits.get(generation, float("inf"))
        (kept if counts else wasted).append((at_s, total / count))
    return (
        tuple(thinned(sorted(kept), MOST_POINTS)),
        tuple(thinned(sorted(wasted), MOST_POINTS // 4)),
    )


@dataclass(frozen=True, slots=True)
class _NodeStep:
    """Has the times of one node in one step, in seconds, and how they compare with the others'."""

    step_s: float
    wait_s: float
    compute_s: float
    """Own time of the node's slowest worker; not a number: it is not known."""
    ratio: float = 1.0
    compute_ratio: float = math.nan


def step_times(run: JobRun) -> tuple[NodeStepTimes, ...]:
    """Returns the step times of each node at the steps that it shares with another one, the slowest
    node first."""
    by_step: dict[Step, dict[str, _NodeStep]] = defaultdict(dict)
    for life in run.lives:
        for generation, step, _, *seconds in rows_of(life.steps, STEP_ROW):
            by_step[int(generation), int(step)][life.node] = _NodeStep(*seconds)
    shared: dict[str, list[_NodeStep]] = defaultdict(list)
    for nodes in by_step.values():
        if len(nodes) > 1:
            for node, row in _compared(nodes).items():
                shared[node].append(row)
    compared = {node: rows for node, rows in shared.items() if len(rows) >= LEAST_STEPS}
    if len(compared) < 2:
        return ()
    waits_s = {node: _mean(row.wait_s for row in rows) for node, rows in compared.items()}
    node_times = []
    for node, rows in compared.items():
        others_s = median(wait_s for other, wait_s in waits_s.items() if other != node)
        node_times.append(_node_times(node, rows, waits_s[node], others_s))
    return tuple(sorted(node_times, key=_slowness, reverse=True))


def _compared(nodes: Mapping[str, _NodeStep]) -> Mapping[str, _NodeStep]:
    """Returns the times of all nodes in one step with their ratios."""
    mean_s = _mean(row.step_s for row in nodes.values())
    compute_times = [row.compute_s for row in nodes.values() if not math.isnan(row.compute_s)]
    middle_s = median(compute_times) if len(compute_times) > 1 else math.nan
    return {
        node: replace(
            row,
            ratio=row.step_s / mean_s if mean_s > 0 else 1.0,
            compute_ratio=row.compute_s / middle_s if middle_s > 0 else math.nan,
        )
        for node, row in nodes.items()
    }


def _node_times(
    node: str, rows: Sequence[_NodeStep], wait_s: float, others_wait_s: float
) -> NodeStepTimes:
    """Returns the times of a node over its steps, and whether it is slow.

    Args:
        node: name of the node.
        rows: its times in the steps that it shares with another node.
        wait_s: mean seconds for which it waited for data in a step.
        others_wait_s: median of the other nodes' mean seconds.
    """
    sorted_s = sorted(row.step_s for row in rows)
    ratio, median_s = median(row.ratio for row in rows), median(sorted_s)
    compute_ratio = _known_median(row.compute_ratio for row in rows)
    waits = wait_s - others_wait_s >= SLOW_WAIT * median_s > 0
    return NodeStepTimes(
        node=node,
        steps=len(rows),
        median_s=median_s,
        slowest_s=sorted_s[min(len(sorted_s) - 1, int(0.95 * len(sorted_s)))],
        wait_s=wait_s,
        ratio=ratio,
        compute_s=_known_median(row.compute_s for row in rows),
        compute_ratio=compute_ratio,
        is_slow=ratio >= SLOW or (compute_ratio or 0.0) > STRAGGLER_RATIO or waits,
    )


def _slowness(times: NodeStepTimes) -> tuple[bool, float, float]:
    return times.is_slow, times.compute_ratio or 0.0, times.ratio


def _known_median(numbers: Iterable[float]) -> float | None:
    """Returns the median of the numbers that are not NaN; None: there are none."""
    present = [number for number in numbers if not math.isnan(number)]
    return median(present) if present else None


def _mean(numbers: Iterable[float]) -> float:
    values: Sequence[float] = list(numbers)
    return sum(values) / len(values)
