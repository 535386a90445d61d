"""Measures the speed of one agent's workers.

Pure, and therefore apart from the agent that has a clock: every time comes in as an argument, in
seconds of one clock.
"""

from __future__ import annotations

from collections import deque

RECENT_STEPS = 32


class StepRate:
    """Follows the steps of a node's first worker in the present generation."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS)
        """The end of each of the last steps, and the samples of its global batch."""
        self._generation_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Notes that workers of a new generation start."""
        self._generation_s = now_s
        self._steps.clear()

    def stepped(self, now_s: float, samples: int = 0) -> None:
        """Notes the end of a step of a global batch of so many samples."""
        self._steps.append((now_s, samples))

    @property
    def steps(self) -> int:
        """Returns the number of steps that are followed: 0 before the first of this generation."""
        return len(self._steps)

    def steps_per_s(self) -> float | None:
        """Returns the speed over the last steps of this generation; None before the second."""
        steps = list(self._steps)
        return (len(steps) - 1) / _took_s(steps) if _took_s(steps) > 0 else None

    def samples_per_s(self) -> float | None:
        """Returns the samples a second over the same steps; None before the second."""
        steps = list(self._steps)
        samples = sum(samples for _, samples in steps[1:])
        return samples / _took_s(steps) if _took_s(steps) > 0 else None

    def step_age_s(self, now_s: float) -> float | None:
        """Returns the seconds since the last step of this generation."""
        steps = list(self._steps)
        return now_s - steps[-1][0] if steps else None

    def generation_age_s(self, now_s: float) -> float | None:
        """Returns the seconds since the workers of this generation started."""
        return now_s - self._generation_s if self._generation_s is not None else None


def _took_s(steps: list[tuple[float, int]]) -> float:
    """Returns the seconds from the first of these steps to the last."""
    return steps[-1][0] - steps[0][0] if steps else 0.0
