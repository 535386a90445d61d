"""Divides global batches over ranks of unequal speed. Pure.

Rules:
 SB1  Ranks have equal shares until one of them takes longer for its own part of a step than
     `factor` times the median.
 SB2  From then on a rank's share is in proportion to its speed, in samples a second. Shares change
     only where the step becomes shorter by GAIN at least, so that noise changes nothing.
 SB3  Shares that are all nearly equal become equal, and SB1 holds again: a machine that was slow
     for a while gets its share back.
 SB4  Whatever its share, a rank has at least one sample of each global batch that has so many, or
     two where a BatchNorm needs them. Where ranks compute several micro-batches, whole ones move.
 SB5  Shares hold from a global batch on of which no rank has read a sample. Another world begins
     with equal shares.

What counts in a gradient is the mean over the global batch, so shares change no result but for the
order in which numbers are added. Shapes: R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from elasticzero.data.position import GlobalBatch
from elasticzero.spans import Span

GAIN = 0.05
"""Part of a step that other shares must save, at least."""
NEARLY = 0.05
"""Relative difference from an equal share below which it counts as equal."""

Shares = tuple[float, ...]
"""Part of a global batch of each rank; they sum to 1."""


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """Holds what a rank has measured of its last steps."""

    samples_a_s: float
    """Samples that it computes in a second of its own time; 0: it has measured nothing."""
    own_s: float
    """Its own time in a step, in seconds."""


def balanced(speeds_R: Sequence[RankSpeed], present: Shares | None, factor: float) -> Shares | None:
    """Returns the shares of the next global batches; None: equal ones (SB1 to SB3).

    Args:
        speeds_R: What each rank has measured, by rank.
        present: The present shares; None: equal ones.
        factor: Multiple of the median of the ranks' own times from which on a rank is slow.
    """
    if any(speed.samples_a_s <= 0 or speed.own_s <= 0 for speed in speeds_R):
        return present
    times_s = [speed.own_s for speed in speeds_R]
    longest_s = max(times_s)
    if present is None and longest_s < factor * median(times_s):
        return None
    whole = sum(speed.samples_a_s for speed in speeds_R)
    samples = sum(speed.samples_a_s * speed.own_s for speed in speeds_R)
    if samples / whole > (1.0 - GAIN) * longest_s:
        return present
    shares = tuple(speed.samples_a_s / whole for speed in speeds_R)
    equal = all(abs(share * len(shares) - 1.0) < NEARLY for share in shares)
    return None if equal else shares


def counts(samples: int, shares: Shares, least: int, unit: int) -> tuple[int, ...] | None:
    """Returns how many samples of a global batch each rank has (SB4); None: there are too few.

    Args:
        samples: Number of samples of the global batch.
        shares: The ranks' shares.
        least: Fewest samples of a rank.
        unit: Number of samples of a micro-batch, if a rank has several.
    """
    ranks = len(shares)
    if samples < ranks * least:
        return None
    unit = unit if least <= unit and samples >= 2 * ranks * unit else 1
    units, rest = divmod(samples, unit)
    exact = [share * units for share in shares]
    whole = [int(part) for part in exact]
    by_rest = sorted(range(ranks), key=lambda rank: (whole[rank] - exact[rank], rank))
    for rank in by_rest[: units - sum(whole)]:
        whole[rank] += 1
    result = [count * unit for count in whole]
    result[max(range(ranks), key=lambda rank: shares[rank])] += rest
    for rank in range(ranks):
        while result[rank] < least:
            most = max(range(ranks), key=lambda other: result[other])
            moved = min(least - result[rank], result[most] - least)
            result[rank] += moved
            result[most] -= moved
    return tuple(result)


def part_of(batch: GlobalBatch, counts_R: Sequence[int], rank: int) -> Span:
    """Returns the positions of `batch` that belong to `rank`, where ranks have so many samples."""
    ends = [batch.start, *(batch.start + end for end in accumulate(counts_R))]
    return Span(ends[rank], ends[rank + 1])


class ShareTable:
    """Holds the shares of the ranks in one loop, by the steps from which on they hold."""

    def __init__(self) -> None:
        self._from = 0
        self._shares: Shares | None = None
        self._before: Shares | None = None
        self.furthest = 0
        """Highest step of the loop whose shares this rank has taken."""

    def at(self, step: int) -> Shares | None:
        """Returns the shares at a step of the loop; None: equal ones."""
        self.furthest = max(self.furthest, step)
        return self._shares if step >= self._from else self._before

    @property
    def newest(self) -> Shares | None:
        """Returns the shares that hold in the end; None: equal ones."""
        return self._shares

    @property
    def holds_from(self) -> int:
        """Returns the step from which on the newest shares hold."""
        return self._from

    def put(self, step: int, shares: Shares | None) -> None:
        """Has other shares hold from a step on, which no rank has taken; the newest ones hold
        already."""
        self._before, self._shares, self._from = self._shares, shares, step
