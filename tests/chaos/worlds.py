"""The table of worlds in which the same training is done, with faults and without."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

SHAPES = {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (2, 2)}
"""By number of ranks: nodes, and workers a node."""
LINE_UPS = (
    ("ddp", "world"),
    *product(("zero1", "zero2", "zero3"), ("world", "node")),
)
"""Strategies, and among which ranks each divides state; ddp divides none."""
FIXED_ORDER = tuple(line_up for line_up in LINE_UPS if line_up[0] != "zero3")
"""Those that `--deterministic` takes."""
DRAWN = {
    "bits, zero1, 4 ranks, world",
    "float64, zero2, 4 ranks, node",
    "bf16, zero3, 2 ranks, node",
    "float64, zero3, 2 ranks, world, 3 faults",
    "bits, zero2, 3 ranks, world, 3 faults",
    "bits, zero1, 4 ranks, node, 3 faults",
}
"""Cells that `make slow` runs of the table; `make chaos` runs the rest."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One job: what it computes with, and where."""

    numbers: str
    """float64, bf16 or bits."""
    strategy: str
    ranks: int
    shard: str
    faults: bool
    """A worker is killed, a node is killed and another one joins, a node leaves and another one
    joins."""

    def __str__(self) -> str:
        faults = ", 3 faults" if self.faults else ""
        return f"{self.numbers}, {self.strategy}, {self.ranks} ranks, {self.shard}{faults}"


def cells_of(numbers: str) -> list[Cell]:
    """All worlds, each without faults and with them."""
    line_ups = FIXED_ORDER if numbers == "bits" else LINE_UPS
    return [
        Cell(numbers, strategy, ranks, shard, faults)
        for faults, (strategy, shard), ranks in product((False, True), line_ups, SHAPES)
    ]
