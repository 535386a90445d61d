"""Measures the speed of one agent's workers, and the share of time that goes into steps that count.

Pure: every time comes in as an argument, in seconds of one clock.
"""

from __future__ import annotations

from collections import deque

RECENT_STEPS = 32


class GoodputMeter:
    """Counts the steps of a node's first worker, over all the generations it takes part in."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._furthest = 0
        self._productive_s = 0.0
        self._arrivals_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._generation_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Notes that workers of a new generation start."""
        self._generation_s = now_s
        if self._began_s is None:
            self._began_s = now_s
        self._arrivals_s.clear()

    def stepped(self, step: int, useful_s: float, now_s: float) -> None:
        """Counts a step; useful_s: its time without the wait for data.

        A step that was done before is computed again and adds nothing.
        """
        self._arrivals_s.append(now_s)
        if step > self._furthest:
            self._furthest = step
            self._productive_s += useful_s

    def steps_per_s(self) -> float | None:
        """Returns the speed over the last steps of this generation; None before the second."""
        steps = list(self._arrivals_s)
        if len(steps) < 2 or steps[-1] <= steps[0]:
            return None
        return (len(steps) - 1) / (steps[-1] - steps[0])

    def step_age_s(self, now_s: float) -> float | None:
        """Returns the seconds since the last step of this generation."""
        steps = list(self._arrivals_s)
        return now_s - steps[-1] if steps else None

    def generation_age_s(self, now_s: float) -> float | None:
        return now_s - self._generation_s if self._generation_s is not None else None

    def goodput(self, now_s: float) -> float | None:
        """Returns the share of the time since the first workers started that was spent in steps
        that count."""
        if self._began_s is None or now_s <= self._began_s or not self._furthest:
            return None
        return min(1.0, self._productive_s / (now_s - self._began_s))
