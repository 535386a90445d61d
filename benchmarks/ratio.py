"""Compares two contenders that were measured by turns."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The median of paired ratios with its 95 % range, from order statistics."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, own_s: list[float], reference_s: list[float]) -> Ratio:
        ratios = sorted(ours / other for ours, other in zip(own_s, reference_s, strict=True))
        count = len(ratios)
        reach = 0.98 * math.sqrt(count)
        low = max(0, math.floor(count / 2 - reach))
        high = min(count - 1, math.ceil(count / 2 + reach) - 1)
        return cls(median=statistics.median(ratios), low=ratios[low], high=ratios[high])
