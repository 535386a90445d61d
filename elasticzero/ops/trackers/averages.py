"""Joins what nodes have logged for each step, and decides which steps are complete. Pure.

- A value is the mean of all that ranks have logged under its name for the step; `tokens` are added
  up.
- A step is complete once every node of the world will log nothing more for it. Then it is given
  out, in the order of steps, once; what comes for it later is dropped.
- What a generation has logged for steps after the one that a later generation starts from is
  dropped, since these are done again. For that step itself the values of both count, under the
  same name those of the later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticzero.ipc.messages import TOKENS


@dataclass(frozen=True, slots=True)
class Row:
    """Holds the values of one step over all ranks."""

    step: int
    at: float
    """Unix time of the last value."""
    scalars: Mapping[str, float]


@dataclass(slots=True)
class _Value:
    generation: int
    total: float
    count: float


class StepAverages:
    """Holds the values of steps that are not complete yet."""

    def __init__(self) -> None:
        self._values: dict[int, dict[str, _Value]] = {}
        self._times: dict[int, float] = {}
        self._starts: dict[int, int] = {}
        """Step that each generation starts from."""
        self._given_through = -1
        """Last step that was given out."""

    def begin(self, generation: int, step: int) -> None:
        """Notes that a generation starts from a step."""
        self._starts[generation] = step
        for number, values in self._values.items():
            for name in [n for n, v in values.items() if self._is_void(v.generation, number)]:
                del values[name]

    def _is_void(self, generation: int, step: int) -> bool:
        return any(g > generation and step > start for g, start in self._starts.items())

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        """Adds what one node has logged: generation, step, time, and sums with counts by name."""
        for generation, step, at, values in rows:
            if step <= self._given_through or self._is_void(generation, step):
                continue
            held = self._values.setdefault(step, {})
            self._times[step] = max(at, self._times.get(step, at))
            for name, (total, count) in values.items():
                before = held.get(name)
                if before is None or before.generation < generation:
                    held[name] = _Value(generation, total, count)
                elif before.generation == generation:
                    before.total += total
                    before.count += count

    def complete(self, through: int | None) -> list[Row]:
        """Returns the values of the steps up to `through`, and forgets them; None: of all steps."""
        steps = sorted(step for step in self._values if through is None or step <= through)
        rows = []
        for step in steps:
            values = self._values.pop(step)
            scalars = {
                name: value.total if name == TOKENS else value.total / value.count
                for name, value in values.items()
            }
            at = self._times.pop(step)
            if scalars:
                rows.append(Row(step, at, scalars))
        if rows:
            self._given_through = rows[-1].step
        return rows


def least(through: Iterable[int | None]) -> int | None:
    """Returns the least of several steps, where None is beyond all."""
    return min((step for step in through if step is not None), default=None)
