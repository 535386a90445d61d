"""Measures the speed of one agent's workers.

Pure: every time comes in as an argument, in seconds of one clock.
"""

from __future__ import annotations

from collections import deque

RECENT_STEPS = 32


class StepRate:
    """Follows the steps of a node's first worker in the present generation."""

    def __init__(self) -> None:
        self._arrivals_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._generation_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Notes that workers of a new generation start."""
        self._generation_s = now_s
        self._arrivals_s.clear()

    def stepped(self, now_s: float) -> None:
        """Notes the end of a step."""
        self._arrivals_s.append(now_s)

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
        """Returns the seconds since the workers of this generation started."""
        return now_s - self._generation_s if self._generation_s is not None else None
