"""Draws the global batches of an epoch from the readers of a stream. Pure.

A stream is divided over V readers. How many samples a reader has is unknown until it has read them,
and only the rank that has the reader learns of it. So the ranks exchange how far their readers have
read, and draw from what all of them know.

Rules:
 TU1  The order of an epoch is in rounds: in each one, every reader that has a sample left gives its
      next one, in the order of their numbers. So the order is a function of the data alone.
 TU2  A place in the order is decided once it is known of each reader before it whether it has a
      sample for it. Batches are runs of decided places.
 TU3  What is known only grows. A reader that has ended keeps its number of samples.

Shapes: V readers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from elasticzero.data.position import UNKNOWN

Counts = npt.NDArray[np.int64]
_NO_END = np.int64(1) << np.int64(62)


@dataclass(frozen=True)
class ReadProgress:
    """Says how far the readers of a stream have read in one epoch."""

    read_V: Counts
    """Number of samples that each reader has read."""
    total_V: Counts
    """Number of samples of each reader that has ended; `UNKNOWN`: it has not."""

    @classmethod
    def nothing(cls, readers: int) -> ReadProgress:
        return cls(np.zeros(readers, np.int64), np.full(readers, UNKNOWN, np.int64))

    @cached_property
    def whole(self) -> bool:
        """Returns whether all readers have ended."""
        return bool((self.total_V != UNKNOWN).all())

    @cached_property
    def _limits_V(self) -> Counts:
        """Returns the number of samples of each reader, which is without end if it is unknown."""
        return np.where(self.total_V == UNKNOWN, _NO_END, self.total_V)

    @cached_property
    def decided(self) -> int:
        """Returns the number of places of the epoch's order that are decided (TU2)."""
        running = np.flatnonzero(self.total_V == UNKNOWN)
        if not len(running):
            return int(self.total_V.sum())
        first = running[np.argmin(self.read_V[running])]  # the lowest of those that have read least
        rounds = self.read_V[first]
        before_V = rounds + (np.arange(len(self.read_V)) < first)
        return int(np.minimum(self._limits_V, before_V).sum())

    def drawn(self, places: int) -> Counts:
        """Returns how many samples the first places of the order take of each reader.

        Args:
            places: Number of places, at most `decided`.
        """
        limits_V = self._limits_V
        low, high = 0, places  # whole rounds in these places: as many as places at most
        while low < high:
            middle = (low + high + 1) // 2
            if int(np.minimum(limits_V, middle).sum()) <= places:
                low = middle
            else:
                high = middle - 1
        drawn_V = np.minimum(limits_V, low)
        rest = places - int(drawn_V.sum())
        drawn_V[np.flatnonzero(limits_V > low)[:rest]] += 1
        return drawn_V
