"""Finds how smooth a planned change was, from the times at which steps were finished.

Pure. Two figures stand for a change from one generation to the next: the largest gap between two
steps near it, and the time by which all steps near it were slower than usual. Near is the pause
itself, the second before it and the second after it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

NEAR_S = 1.0
"""Seconds before the pause, and after it, that count as near."""
FEWEST = 10
"""Steps of a generation that are not near the change, from which on they alone show its usual
step."""

StepTimes = Mapping[int, Mapping[int, float]]
"""Time at which each step was finished, by generation and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoothness:
    """Holds the two figures of one planned change, in seconds."""

    largest_gap_s: float
    """Largest time between two steps near the change."""
    usual_s: float
    """Median step of the generation in which that gap ended."""
    slowed_parts_s: tuple[float, float, float]
    """Sums of what the steps of the second before the pause, the pause, and the steps of the second
    after it took beyond the usual step of their generation."""

    anyway_s: float
    """Says what as many steps of these generations take beyond the usual ones where no change is
    near, which is by how much their mean is above their median."""

    @property
    def slowed_s(self) -> float:
        """Returns by how much all of them were slower together."""
        return sum(self.slowed_parts_s)

    @property
    def above_s(self) -> float:
        """Returns by how much the largest gap is longer than a usual step."""
        return self.largest_gap_s - self.usual_s


@dataclass(frozen=True, slots=True)
class _Interval:
    generation: int
    """Generation of the step that ends it."""
    end_s: float
    seconds: float


def smoothness(times: StepTimes, before: int) -> Smoothness:
    """Returns the figures of the change that ended a generation.

    Args:
        times: Times of the steps, by any one clock.
        before: Number of the generation that has ended; a later one has made a step.
    """
    after = min(generation for generation, steps in times.items() if generation > before and steps)
    begin_s, end_s = max(times[before].values()), min(times[after].values())
    intervals = _intervals(times, before, after)
    near = [i for i in intervals if begin_s - NEAR_S < i.end_s <= end_s + NEAR_S]
    apart = {g: _apart_s(g, intervals, near) for g in (before, after)}
    usual_s = {g: statistics.median(seconds) for g, seconds in apart.items()}
    skew_s = {g: statistics.mean(seconds) - usual_s[g] for g, seconds in apart.items()}
    longest = max(near, key=lambda interval: interval.seconds)

    def slowed_s(first_s: float, last_s: float) -> float:
        part = [i for i in near if first_s < i.end_s <= last_s]
        return sum(i.seconds - usual_s[i.generation] for i in part)

    return Smoothness(
        largest_gap_s=longest.seconds,
        usual_s=usual_s[longest.generation],
        slowed_parts_s=(
            slowed_s(-math.inf, begin_s),
            slowed_s(begin_s, end_s),
            slowed_s(end_s, math.inf),
        ),
        anyway_s=sum(skew_s[i.generation] for i in near),
    )


def _intervals(times: StepTimes, *generations: int) -> list[_Interval]:
    """Returns the times between neighbouring steps of these generations."""
    ends = sorted((at_s, g) for g in generations for at_s in times[g].values())
    return [_Interval(g, at_s, at_s - former_s) for (former_s, _), (at_s, g) in pairwise(ends)]


def _apart_s(generation: int, intervals: list[_Interval], near: list[_Interval]) -> list[float]:
    """Returns what the steps of a generation took that show its usual one.

    Args:
        generation: Number of the generation.
        intervals: All intervals.
        near: Those near the change, which count only where there are too few others.
    """
    all_s = [i.seconds for i in intervals if i.generation == generation]
    apart_s = [i.seconds for i in intervals if i.generation == generation and i not in near]
    return apart_s if len(apart_s) >= FEWEST else all_s
