"""Describes metrics; `docs/reference/metrics.md` and the tests of queries are made from this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricDescription:
    """Says what a metric is called, what it measures, and by which labels its series differ."""

    name: str
    """Name with prefix; that of a counter ends in `_total`."""
    kind: MetricKind
    labels: tuple[str, ...]
    meaning: str
    """One sentence."""

    @property
    def series(self) -> dict[str, tuple[str, ...]]:
        """Returns the names under which Prometheus stores it, with their labels."""
        if self.kind != "histogram":
            return {self.name: self.labels}
        parts = {f"{self.name}_{part}": self.labels for part in ("sum", "count")}
        return {f"{self.name}_bucket": (*self.labels, "le"), **parts}
