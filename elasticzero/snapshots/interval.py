"""Measures the cost of snapshots to training, and proposes the interval between them. Pure.

The cost of a snapshot has two parts: the time that training waits while the state is copied, and
the extra time of steps while that copy is made and gets its checksums and goes to another node, on
the cores that training uses. All ranks wait for the slowest, so one rank's steps are those of all.
An interval is long enough that all of it is over well before the next snapshot.

Where work is lost often, what snapshots cost and what is done again for the lack of them are least
together if they follow each other after the square root of twice their cost times the mean time
between two losses (Young, "A first order approximation to the optimum checkpoint interval", 1974).
"""

from __future__ import annotations

import math
import statistics
from collections import deque

OVERHEAD = 0.005
"""Share of the training time that snapshots may take unless work is lost often; an interval may be
off by a factor of two."""
IN_FLIGHT = 0.8
"""Share of an interval in which a snapshot is in flight at most, so that the next one need not wait
for it, and steps without one are left to be compared with."""
MOST_STEPS = 1000
"""Longest proposed interval, in steps."""
FIRST_STEPS = 16
"""Longest proposed interval, in steps, before `SURE_COSTS` snapshots were measured."""
SURE_COSTS = 3
"""Number of measured costs from which on one outlier does no harm."""
_RECENT_COSTS = 7
_RECENT_STEPS = 20


def interval(
    cost_s: float, step_s: float, in_flight_s: float = 0.0, lost_every_s: float = math.inf
) -> int:
    """Returns the fewest steps between snapshots whose cost stays under `OVERHEAD` of the time, or
    fewer where less is lost so, and that are held before `IN_FLIGHT` of the next interval has gone
    by.

    Args:
        cost_s: The cost of a snapshot in seconds.
        step_s: A step's time in seconds.
        in_flight_s: Time in seconds after which a snapshot is held.
        lost_every_s: Mean time in seconds between two losses of work.
    """
    apart_s = min(cost_s / OVERHEAD, math.sqrt(2 * cost_s * lost_every_s))
    apart_s = max(apart_s, in_flight_s / IN_FLIGHT)
    return max(1, min(MOST_STEPS, math.ceil(apart_s / max(step_s, 1e-6))))


class IntervalTuner:
    """Measures the last snapshots and the steps beside them, and proposes an interval."""

    def __init__(self) -> None:
        self._costs_s: deque[float] = deque(maxlen=_RECENT_COSTS)
        self._in_flight_s: deque[float] = deque(maxlen=_RECENT_COSTS)
        """Times after which those of these snapshots were held that could be."""
        self._steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        """Times of steps without a capture in flight, or no slower beside one."""
        self._stall_s: float | None = None
        """Wait of training for the snapshot in flight; None: none is in flight."""
        self._beside_s: list[float] = []
        """Times of the steps since that snapshot was captured."""
        self._proposed = 0
        """The interval proposed last, in steps."""

    @property
    def step_s(self) -> float:
        """Returns a step's usual time in seconds; 0 before one is known."""
        return statistics.median(self._steps_s) if self._steps_s else 0.0

    @property
    def cost_s(self) -> float:
        """Returns a snapshot's usual cost in seconds; 0 before one is known."""
        return statistics.median(self._costs_s) if self._costs_s else 0.0

    @property
    def measuring(self) -> bool:
        """Returns whether a snapshot is in flight."""
        return self._stall_s is not None

    def captured(self, stall_s: float | None) -> None:
        """Records that training waited this long for a snapshot's copy, which is in flight from now
        on.

        None stands for a checkpoint, which replaces a snapshot in flight; then nothing is measured.
        """
        self._stall_s, self._beside_s = stall_s, []

    def stepped(self, seconds: float) -> None:
        """Records the time of a step."""
        (self._steps_s if self._stall_s is None else self._beside_s).append(seconds)

    def snapshot_done(self, in_flight_s: float | None = None) -> None:
        """Records that no snapshot is in flight any more.

        Args:
            in_flight_s: Time in seconds after which it was held; None: it could not be held.

        Steps that were no slower beside it show the usual time of a step: if snapshots follow each
        other without a gap, there are no others.
        """
        if self._stall_s is None:
            return
        slower_s = sum(self._beside_s) - len(self._beside_s) * self.step_s
        if slower_s <= 0.0 or not self._steps_s:
            self._steps_s.extend(self._beside_s)
            slower_s = 0.0
        self._costs_s.append(self._stall_s + slower_s)
        if in_flight_s is not None:
            self._in_flight_s.append(in_flight_s)
        self._stall_s = None

    def proposed_interval(self, lost_every_s: float = math.inf) -> int:
        """Returns a new interval if the measured one is over twice as long, or less than half; else
        0.

        Args:
            lost_every_s: Mean time in seconds between two losses of work.
        """
        if not self._costs_s or not self._steps_s:
            return 0
        in_flight_s = statistics.median(self._in_flight_s or [0.0])
        every = interval(self.cost_s, self.step_s, in_flight_s, lost_every_s)
        before = self._proposed
        if len(self._costs_s) < SURE_COSTS:
            every = min(every, FIRST_STEPS)
        if before and before / 2 <= every <= before * 2:
            return 0
        self._proposed = every
        return every
