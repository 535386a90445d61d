"""Finds stragglers: workers whose own part of a step takes longer than the others'.

Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

RECENT = 32
"""Number of steps of which a worker's own time is the median."""
SLOWEST = 16
"""Number of workers of a world whose ratio is told: the slowest ones."""
STRAGGLER_RATIO = 1.3
"""Own time, as a multiple of the median, from which on a worker is shown as a straggler; the alert
has the same."""

WorkerTimes = Mapping[tuple[str, int], float]
"""Seconds of a worker's own time in a step, by node and local rank."""


class ComputeTimes:
    """Follows the own times of one node's workers in the present generation."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def begin(self) -> None:
        """Notes that workers of a new generation start."""
        self._seconds = {}

    def add(self, local_rank: int, seconds: float) -> None:
        """Notes a worker's own time in a step."""
        self._seconds.setdefault(local_rank, deque(maxlen=RECENT)).append(seconds)

    def medians(self) -> dict[int, float]:
        """Returns each worker's median over its last steps, in seconds, by local rank."""
        return {rank: median(tuple(recent)) for rank, recent in tuple(self._seconds.items())}

    def slowest(self) -> tuple[int | None, float | None]:
        """Returns the local rank and the median of the slowest worker; None: no time is known."""
        medians = self.medians()
        if not medians:
            return None, None
        rank = max(medians, key=lambda rank: medians[rank])
        return rank, medians[rank]


def worker_times(generation: int, statuses: Mapping[str, Mapping[str, Any]]) -> WorkerTimes:
    """Returns the own times of workers in seconds, from the statuses of agents that are in this
    generation."""
    times_s: dict[tuple[str, int], float] = {}
    for node, status in statuses.items():
        times = status.get("compute_s")
        if status.get("generation") != generation or not isinstance(times, dict):
            continue
        for rank, own_s in times.items():
            if str(rank).isdecimal() and isinstance(own_s, int | float):
                times_s[node, int(rank)] = float(own_s)
    return times_s


def compute_ratios(times: WorkerTimes) -> dict[tuple[str, int], float]:
    """Returns the own times of the slowest workers, as multiples of the median of all workers;
    none where there are fewer than two."""
    middle_s = median(times.values()) if len(times) > 1 else 0.0
    if middle_s <= 0:
        return {}
    slowest = sorted(times, key=lambda worker: times[worker], reverse=True)[:SLOWEST]
    return {worker: times[worker] / middle_s for worker in slowest}
