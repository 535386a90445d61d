"""Says how parameters are filled into buckets whose gradients are sent together. Pure.

Rules:
 U1  The size is that of `--bucket-bytes`. For auto, rank 0 chooses it in the first world of several
     ranks, by what an exchange costs there.
 U2  Parameters are filled in the reverse order of their registration, until it is known in which
     order a backward has their gradients: rank 0 records it in a generation's first global batch.
     The layout of a generation never changes, so that the order is used from the next one on.
 U3  What was chosen is part of the training state, and is chosen once in a job. All ranks read it
     from the state that a generation starts from, or get it from rank 0.
 U4  An order of a model whose parameters have another number counts for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elasticzero.text import size_text

MIN_BYTES, MAX_BYTES = 1 << 20, 256 << 20
"""Limits of the size that is chosen by measuring, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """Holds what is known of a job's buckets."""

    size_bytes: int | None = None
    """A bucket takes no further parameter beyond this size; None: the strategy's own limit."""
    order: tuple[int, ...] | None = None
    """The parameters, by their number in the order of registration, as a backward has their
    gradients; empty: in the reverse of that order; None: not recorded yet."""

    def filling_order(self, names: Sequence[str]) -> list[str]:
        """Returns the names in the order in which parameters are filled into buckets.

        Args:
            names: The names of all the model's parameters, in the order of registration.
        """
        if not self.order or sorted(self.order) != list(range(len(names))):
            return list(reversed(names))
        return [names[number] for number in self.order]


DEFAULT_PLAN = BucketPlan()
"""The plan of a job of which nothing is known."""


def order_of(ready: Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    """Returns an order for `BucketPlan`, with parameters that have had no gradient at its end.

    Args:
        ready: Names in the order in which gradients came.
        names: The names of all the model's parameters.
    """
    seen = set(ready)
    whole = [*ready, *(name for name in reversed(names) if name not in seen)]
    if whole == list(reversed(names)):
        return ()
    number_of = {name: number for number, name in enumerate(names)}
    return tuple(number_of[name] for name in whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCost:
    """Holds what the exchange of one bucket costs."""

    latency_s: float
    s_per_byte: float

    @classmethod
    def fit(cls, small: tuple[int, float], large: tuple[int, float]) -> ExchangeCost:
        """Returns the line through two measured exchanges, each with its bytes and its seconds."""
        (few, fast_s), (many, slow_s) = small, large
        slope = max(0.0, slow_s - fast_s) / (many - few)
        return cls(latency_s=max(0.0, fast_s - slope * few), s_per_byte=slope)

    def sentence(self, chosen_bytes: int) -> str:
        """Says which size was chosen, and why."""
        return (
            f"--bucket-bytes auto takes {size_text(chosen_bytes)}: the exchange of a bucket takes "
            f"{self.latency_s * 1e3:.2f} ms, and {self.s_per_byte * 1e9:.2f} ms more a megabyte"
        )

    def best_bytes(self, total_bytes: int) -> int:
        """Returns the size of buckets by which gradients of `total_bytes` take the least time.

        The exchanges of n buckets cost n latencies, and the last bucket's is not overlapped with
        the backward: total / size * latency + size * s_per_byte is least at the square root of
        total * latency / s_per_byte. The result is a whole number of MiB within the limits.
        """
        if self.s_per_byte <= 0:
            best = float(MAX_BYTES)
        else:
            best = math.sqrt(total_bytes * self.latency_s / self.s_per_byte)
        return round(min(max(best, MIN_BYTES), MAX_BYTES) / MIN_BYTES) * MIN_BYTES
