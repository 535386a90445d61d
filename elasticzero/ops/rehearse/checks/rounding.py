"""Compares the series of two runs in other worlds or strategies, as far as rounding allows. Pure.

Rules:
 RR1  A value may lie 8 times as far from the undisturbed run's as a run lies whose gradients were
      changed in their last bit, plus a few units in the last place of its own norm.
 RR2  Distances are those of projections on 8 fixed vectors of random signs: their root mean square
      estimates the norm of the difference.
 RR3  A step is compared by the nudged run's step that lies as far behind its nudge, and by one step
      more, for a nudge needs a step to pass through all that is rounded. The largest distance until
      then counts: some values come and go.
 RR4  Whole numbers, and values without projections, must be equal. Where the nudged run has others
      too, they depend on rounding, and may differ as far, or altogether.
 RR5  Values that are not finite must not be so in one run alone.
 RR6  Between strategies only names that both have are compared.
 RR7  Generators, losses and the gradient's norm are left out: they belong to ranks, or follow. So
      are the operations that a Trainer of transformers counts, because each rank pads its samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from elasticzero.ops.rehearse.checks.changes import Change, in_order, moved_text
from elasticzero.ops.rehearse.checks.exact import Difference
from elasticzero.ops.rehearse.checks.series import Key, Series, Values, first_whole
from elasticzero.rehearsal.records import LiveValue

FACTOR = 8
"""Distances of the nudged run that a value may lie from the undisturbed run's."""
FLOORS = {
    "float64": 64 * 2.0**-52,
    "complex128": 64 * 2.0**-52,
    "float32": 16 * 2.0**-23,
    "complex64": 16 * 2.0**-23,
    "float16": 2 * 2.0**-10,
    "bfloat16": 2 * 2.0**-7,
}
"""Shares of its norm by which a value may differ in any case: some units in the last place of its
dtype. Whole numbers, and dtypes that are not here, may not differ."""
NUMBER_FLOOR = FLOORS["float32"]
"""The share for a plain number with a fraction, which may come from a 32-bit loss."""
COUNTED_WITH_PADDING = ("['operations']", "['total_flos']")
"""How names end whose values RR7 leaves out."""
_TENSOR = re.compile(r"(\w+)\[[\d, ]*\]")

Distances = Mapping[Key, float]


@dataclass(frozen=True, slots=True)
class Noise:
    """Holds how far rounding moves each value, as the nudged run has shown."""

    first_step: int | None
    """The first step in which the nudged run differs; None: it does not differ."""
    by_step: Mapping[int, Distances]
    """The largest distance so far of each value, at each step of the nudged run."""

    def at(self, step: int) -> Distances:
        """Returns the distances at a step; after the last one, those of the last one."""
        steps = [s for s in self.by_step if s <= step]
        return self.by_step[max(steps)] if steps else {}


def noise_of(undisturbed: Series, nudged: Series) -> Noise:
    """Measures what rounding does to each value."""
    so_far: dict[Key, float] = {}
    by_step: dict[int, Distances] = {}
    first_step = None
    for step in sorted(undisturbed.steps.keys() & nudged.steps.keys()):
        before, after = first_whole(undisturbed.steps[step]), first_whole(nudged.steps[step])
        for key in before.keys() & after.keys():
            so_far[key] = max(so_far.get(key, 0.0), distance(before[key], after[key]))
        if first_step is None and any(so_far.values()):
            first_step = step
        by_step[step] = dict(so_far)
    return Noise(first_step, by_step)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Holds what is compared, and by what measure."""

    series: Series
    undisturbed: Series
    noise: Noise
    from_step: int
    """The first step that was made in another world or by another strategy."""
    same_strategy: bool

    @property
    def is_equal(self) -> bool:
        """Tells whether no value differs at all."""
        return not any(
            _differing(*values, same_strategy=self.same_strategy) for _, *values in self._pairs()
        )

    def first_difference(self) -> Difference | None:
        """Returns the first difference that rounding does not explain; None: there is none."""
        shift = max(0, (self.noise.first_step or 0) - self.from_step)
        for step, before, after in self._pairs():
            allowed = self.noise.at(step + shift + 1)
            differing = _differing(before, after, same_strategy=self.same_strategy)
            beyond = [change for change in differing if _is_beyond(change, allowed)]
            if beyond:
                changes = in_order(beyond)
                generation = self.series.generation_of(step)
                return Difference(generation, step, changes[0].kind, _text(changes, allowed))
        return None

    def _pairs(self) -> list[tuple[int, Values, Values]]:
        """Returns the values of both runs at each step that is compared."""
        steps, others = self.series.steps, self.undisturbed.steps
        return [
            (step, first_whole(others[step]), first_whole(steps[step]))
            for step in sorted(steps.keys() & others.keys())
            if step >= self.from_step
        ]


def _differing(before: Values, after: Values, *, same_strategy: bool) -> list[Change]:
    """Returns the values that differ at all. Where only one run has whole values, there are none.

    Args:
        before: The undisturbed run's values.
        after: The other run's values.
        same_strategy: False: a name that only one of them has is left out (RR6).
    """
    if not before or not after:
        return []
    changes = []
    for key in dict.fromkeys((*before, *after)):
        if key[1].endswith(COUNTED_WITH_PADDING):
            continue
        old, new = before.get(key), after.get(key)
        if old is None or new is None:
            if same_strategy:
                changes.append(Change(*key, old, new))
        elif old.digest != new.digest:
            changes.append(Change(*key, old, new))
    return changes


def _is_beyond(change: Change, allowed: Distances) -> bool:
    """Tells whether rounding does not explain a change."""
    if change.before is None or change.after is None:
        return True
    bound = FACTOR * allowed.get((change.kind, change.name), 0.0) + floor(change.before)
    return distance(change.before, change.after) > bound


def distance(before: LiveValue, after: LiveValue) -> float:
    """Returns how far a value lies from another one: an estimate of the norm of their difference,
    or infinity where there is no such number."""
    if before.digest == after.digest:
        return 0.0
    pairs = list(zip(before.projections, after.projections, strict=False))
    if not pairs or len(before.projections) != len(after.projections):
        return math.inf
    kinds = [_TENSOR.fullmatch(value.text) for value in (before, after)]
    if any(kinds) and before.text != after.text:
        return math.inf
    finite = [math.isfinite(sum(value.projections)) for value in (before, after)]
    if not all(finite):
        return math.inf if any(finite) else 0.0
    return math.sqrt(sum((a - b) ** 2 for a, b in pairs) / len(pairs))


def norm(value: LiveValue) -> float:
    """Returns an estimate of a value's norm."""
    if not value.projections:
        return 0.0
    square = sum(p * p for p in value.projections) / len(value.projections)
    return math.sqrt(square) if math.isfinite(square) else 0.0


def floor(value: LiveValue) -> float:
    """Returns how far a value may differ in any case."""
    tensor = _TENSOR.fullmatch(value.text)
    if tensor is not None:
        return FLOORS.get(tensor[1], 0.0) * norm(value)
    return 0.0 if _is_whole(value.text) else NUMBER_FLOOR * norm(value)


def _is_whole(text: str) -> bool:
    """Tells whether the text is that of no number with a fraction."""
    try:
        int(text)
    except ValueError:
        try:
            float(text)
        except ValueError:
            return True
        return False
    return True


def _text(changes: list[Change], allowed: Distances) -> str:
    """Returns how far the first of the values lies from the undisturbed run's."""
    change = changes[0]
    length = norm(change.before) if change.before is not None else 0.0
    if not length or change.before is None or change.after is None or not floor(change.before):
        return moved_text(changes)
    shares = (distance(change.before, change.after), allowed.get((change.kind, change.name), 0.0))
    away, by_rounding = (f"{share / length:.1g}" for share in shares)
    return (
        f"{change.thing} lies {away} of its norm from the undisturbed run, and a change of a "
        f"gradient's last bit moves it by {by_rounding}"
    )
