"""Compares the series of two runs to the bit: losses, gradient norms, and all that lives. Pure.

Generators are left out. A script seeds those that it draws from, and what it draws shows in the
other values.

The first difference is that of the least step and, within it, of the kind that stands first in the
table of kinds: a cause stands before what follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from elasticzero.ops.rehearse.checks.changes import (
    UNDISTURBED_RUN,
    Change,
    changed,
    in_order,
    moved_text,
)
from elasticzero.ops.rehearse.checks.series import (
    Series,
    Values,
    whole_values,
)
from elasticzero.rehearsal.records import LiveValue, StepRecord

SERIES = {"loss": "loss", "gradient norm": "gradient_norm"}
"""Kinds of numbers that a record has beside what lives, with the fields that hold them."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Holds the first difference between two series."""

    generation: int
    step: int
    """0: before the first step."""
    kind: str
    what: str

    def __str__(self) -> str:
        return f"{place_text(self.generation, self.step)}: {self.what}"


def place_text(generation: int, step: int) -> str:
    """Returns the words for a boundary."""
    if step == 0:
        return "before step 1"
    return f"step {step}" if generation == 1 else f"generation {generation}, step {step}"


def first_difference(
    series: Series,
    expected: Series,
    steps: Iterable[int] | None = None,
    other: str = UNDISTURBED_RUN,
) -> Difference | None:
    """Returns the first difference between two series; None: there is none.

    Args:
        series: The series that is looked at.
        expected: The series that it should equal.
        steps: The boundaries that are compared; None: all that both have.
        other: The run that `expected` is of, for the sentence.
    """
    common = series.steps.keys() & expected.steps.keys()
    for step in sorted(common if steps is None else common & set(steps)):
        changes = in_order(changes_at(step, series, expected))
        if changes:
            generation = series.generation_of(step)
            return Difference(generation, step, changes[0].kind, moved_text(changes, other))
    return None


def changes_at(step: int, series: Series, expected: Series) -> list[Change]:
    """Returns all values that differ between two series at a boundary that both have."""
    records, expected_records = series.steps[step], expected.steps[step]
    changes: list[Change] = []
    seen: set[tuple[str, str]] = set()
    for rank in sorted(records.keys() & expected_records.keys()):
        actual, other = records[rank], expected_records[rank]
        changes += changed(_numbers(other), _numbers(actual), rank)
        whole, other_whole = whole_values(actual), whole_values(other)
        if whole and other_whole:
            of_rank = changed(other_whole, whole, rank or None)
            changes += [c for c in of_rank if (c.kind, c.name) not in seen]
            seen |= {(change.kind, change.name) for change in of_rank}
    return changes


def _numbers(record: StepRecord) -> Values:
    """Returns the loss and the gradient norm of a record, where it has them, as values."""
    values = {}
    for kind, field in SERIES.items():
        digest = getattr(record, field)
        if digest:
            values[kind, ""] = LiveValue(kind, "", digest, number_text(digest))
    return values


def number_text(digits: str) -> str:
    """Returns a number that `float.hex` has written, with all digits that tell it from others."""
    number = float.fromhex(digits)
    return f"{number!r}" if math.isfinite(number) else f"{number}"
