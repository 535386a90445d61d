"""Measures what snapshots cost the training, and proposes the interval between them. Pure.

A snapshot costs the time that training waits while the state is copied, and what the steps take
longer while that copy gets its checksums and goes to another node, on the cores that training uses.
All ranks wait for the slowest, so one rank's steps are those of all.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

OVERHEAD = 0.005
"""Part of the training time that snapshots may take; an interval may be off by a factor of two."""
MOST_STEPS = 1000
"""The longest interval that is chosen here."""
FIRST_STEPS = 16
"""The longest one before `SURE_COSTS` snapshots were measured."""
SURE_COSTS = 3
"""Number of measured costs from which on one outlier does no harm."""
_RECENT_COSTS = 7
_RECENT_STEPS = 20


def interval(cost_s: float, step_s: float) -> int:
    """Steps between snapshots so that the time they cost stays under `OVERHEAD`."""
    return max(1, min(MOST_STEPS, math.ceil(cost_s / (OVERHEAD * max(step_s, 1e-6)))))


class IntervalTuner:
    """The costs of the last snapshots, and the steps beside them."""

    def __init__(self) -> None:
        self._costs_s: deque[float] = deque(maxlen=_RECENT_COSTS)
        self._steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        """Of those without a capture in flight, or no slower beside one."""
        self._stall_s: float | None = None
        """Of the snapshot in flight; None: none is."""
        self._beside_s: list[float] = []
        """The steps while it is."""
        self._proposed = 0
        """The interval last asked for, in steps."""

    @property
    def step_s(self) -> float:
        """A step's usual time; 0 before one is known."""
        return statistics.median(self._steps_s) if self._steps_s else 0.0

    @property
    def cost_s(self) -> float:
        """A snapshot's usual cost; 0 before one is known."""
        return statistics.median(self._costs_s) if self._costs_s else 0.0

    @property
    def measuring(self) -> bool:
        """A snapshot is in flight."""
        return self._stall_s is not None

    def captured(self, stall_s: float | None) -> None:
        """Training waited so long for a snapshot's copy, which is in flight from now on; None: for
        a checkpoint, to which a snapshot in flight gives way, and nothing is measured."""
        self._stall_s, self._beside_s = stall_s, []

    def stepped(self, seconds: float) -> None:
        """A step took so long."""
        (self._steps_s if self._stall_s is None else self._beside_s).append(seconds)

    def snapshot_done(self) -> None:
        """Record that no snapshot is in flight any more.

        Steps that were no slower beside it show what a step usually takes: where snapshots follow
        each other without a gap, no others would.
        """
        if self._stall_s is None:
            return
        slower_s = sum(self._beside_s) - len(self._beside_s) * self.step_s
        if slower_s <= 0.0 or not self._steps_s:
            self._steps_s.extend(self._beside_s)
            slower_s = 0.0
        self._costs_s.append(self._stall_s + slower_s)
        self._stall_s = None

    def proposed_interval(self) -> int:
        """A new interval, where what was measured asks for one more than twice as long, or less
        than half; else 0."""
        if not self._costs_s or not self._steps_s:
            return 0
        every, known = interval(self.cost_s, self.step_s), self._proposed
        if len(self._costs_s) < SURE_COSTS:
            every = min(every, FIRST_STEPS)
        if known and known / 2 <= every <= known * 2:
            return 0
        self._proposed = every
        return every
