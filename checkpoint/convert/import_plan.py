"""Describes an import: what the user selects, and what comes in and what is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticzero.checkpoint.format.manifest import TREE
from elasticzero.checkpoint.rewrite.reshard import ForeignCheckpoint
from elasticzero.nested import count_values
from elasticzero.text import count_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Selects what is imported, and under which names."""

    model_only: bool = False
    """True: only the model's tensors are imported."""
    names: tuple[str, ...] | None = None
    """The parameters in the order in which the optimizer has them; None: they are not known."""
    groups: tuple[tuple[str, ...], ...] | None = None
    """The parameters of each group of a job's optimizers, for optimizers that number theirs; None:
    they are not known."""
    refuse_unknown: bool = True
    """True: objects of unknown classes are refused; False: outside of the model and of optimizers
    they are left out."""
    without: tuple[str, ...] = ()
    """Paths of values that are left out, with keys joined by "/"."""
    model: str | None = None
    """Path of the model's tensors, and what their names begin with, which is taken off; None: as
    the program saves it."""
    tracked: Mapping[str, str] | None = None
    """Maps the name of an object that a script tracks to the path of its state."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Says what is not imported, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """Describes a checkpoint of another program, ready to be read, and what of it is left out."""

    foreign: ForeignCheckpoint
    left_out: tuple[LeftOut, ...] = ()
    step: int | None = None

    @property
    def values(self) -> int:
        """Returns the number of values that are no tensors."""
        state = self.foreign.state
        return count_values(state[TREE]) if TREE in state else _count_without_aliases(state)

    def summary(self) -> str:
        """Returns one line that counts what is imported."""
        return (
            f"{count_text(len(self.foreign.specs), 'tensor')}, "
            f"{count_text(self.values, 'value')} of state, {len(self.left_out)} left out"
        )


def _count_without_aliases(state: Mapping[str, Any]) -> int:
    return count_values({key: value for key, value in state.items() if key != "aliases"})
