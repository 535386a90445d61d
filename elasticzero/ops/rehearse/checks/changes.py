"""Finds values that differ, orders them, and puts them into words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elasticzero.ops.rehearse.causes import UNNAMED_KIND, VALUE_KINDS
from elasticzero.ops.rehearse.checks.series import BY_RANK, Values
from elasticzero.rehearsal.records import LiveValue
from elasticzero.text import count_text

LONGEST_TEXT = 60
"""Characters of a value's text that are shown."""
UNDISTURBED_RUN = "the undisturbed run"
_ORDER = {kind: place for place, kind in enumerate(VALUE_KINDS)}


@dataclass(frozen=True, slots=True)
class Change:
    """Holds a value that is not what it should be."""

    kind: str
    name: str
    before: LiveValue | None
    """The value as it should be; None: it should not be there."""
    after: LiveValue | None
    """The value as it is; None: it is missing."""
    rank: int | None = None
    """The rank whose value it is; None: it is the whole job's."""

    @property
    def thing(self) -> str:
        """The value's noun with its name, and its rank if it has one."""
        noun = VALUE_KINDS.get(self.kind, UNNAMED_KIND).noun
        name = self.name if "'" in self.name else f"'{self.name}'"
        thing = noun if not self.name else f"{noun} {name}"
        return thing if self.rank is None else f"{thing} of rank {self.rank}"


def changed(before: Values, after: Values, rank: int | None = None) -> list[Change]:
    """Returns the values that differ between two records, those of which one is missing too.

    Args:
        before: The values as they should be.
        after: The values as they are.
        rank: The rank whose values they are; None: they are the whole job's.
    """
    changes = []
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key), after.get(key)
        if old is None or new is None or old.digest != new.digest:
            changes.append(Change(*key, old, new, rank))
    return changes


def in_order(changes: Iterable[Change]) -> list[Change]:
    """Returns the changes in an order in which causes stand before what follows from them."""
    return sorted(changes, key=lambda change: _ORDER.get(change.kind, len(_ORDER)))


def lost_text(changes: Sequence[Change]) -> str:
    """Returns how the first of the values came back, and how many others differ too."""
    change = changes[0]
    match change.before, change.after:
        case None, LiveValue() as after:
            text = f"{change.thing} is {_short(after)} and was not there"
        case LiveValue() as before, None:
            text = f"{change.thing} was {_short(before)} and is missing"
        case LiveValue() as before, LiveValue() as after if before.text != after.text:
            text = f"{change.thing} was {_short(before)} and is {_short(after)}"
        case _:
            text = f"{change.thing}{_same_text(change)}"
    return _with_others(text, len(changes) - 1)


def moved_text(changes: Sequence[Change], other: str = UNDISTURBED_RUN) -> str:
    """Returns how the first of the values differs from that of the other run, and how many others
    differ too."""
    change = changes[0]
    match change.before, change.after:
        case None, LiveValue() as after:
            text = f"{change.thing} is {_short(after)}, and is not there in {other}"
        case LiveValue() as before, None:
            text = f"{change.thing} is missing, and is {_short(before)} in {other}"
        case LiveValue() as before, LiveValue() as after if before.text != after.text:
            text = f"{change.thing} is {_short(after)}, and {_short(before)} in {other}"
        case _:
            text = f"{change.thing}{_same_text(change)} than in {other}"
    return _with_others(text, len(changes) - 1)


def _same_text(change: Change) -> str:
    """Returns the words for two values that differ and whose texts do not."""
    if change.kind == BY_RANK:
        return " is in another state"
    text = _short(change.after) if change.after else ""
    values = "other values" if "[" in text else "another value"
    return f" ({text}) has {values}" if text else f" has {values}"


def _short(value: LiveValue) -> str:
    text = " ".join(value.text.split())
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 3]}..."


def _with_others(text: str, others: int) -> str:
    if not others:
        return text
    return f"{text}; {count_text(others, 'other value')} differ{'s' if others == 1 else ''} too"
