"""Keeps the flags of a model that the script has changed since training began: which parameters are
frozen, and which modules compute as in an evaluation.

A script that freezes a part at one step, and not in each step after it, does not do so again in a
generation that begins after that step. A script that has been edited and begins with other flags
goes on with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from elasticzero.text import named_text


@dataclass(slots=True)
class _Flag:
    """One flag, which some of the model's parameters or modules have."""

    noun: str
    verbs: tuple[str, str]
    """They say what the script has done where a name has got the flag, and where it has lost it."""
    now: Callable[[], list[str]]
    """Returns the names that have the flag."""
    put: Callable[[str, bool], object]
    """Gives a name the flag, or takes it away."""
    first: list[str] = field(default_factory=list)
    """The names that had it as the script of this generation began."""

    def change(self) -> list[str]:
        """Returns in words which names have the flag since the beginning, and have it no more."""
        first, now = set(self.first), set(self.now())
        changes = zip(self.verbs, (now - first, first - now), strict=True)
        return [f"{verb} {self._text(names)}" for verb, names in changes if names]

    def _text(self, names: set[str]) -> str:
        if "" in names:
            return "the model"
        return named_text(self.noun, [repr(name) for name in sorted(names)], 3)


class ScriptFlags:
    """Follows `requires_grad` of a model's parameters and `training` of its modules.

    What it keeps is empty until the script changes one on the way.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], modules: Mapping[str, nn.Module]
    ) -> None:
        """Takes the flags as they are now as those that the script begins with.

        Args:
            parameters: The parameters by name, as the strategy has laid them over the ranks.
            modules: The modules by name.
        """
        self._flags = {
            "frozen": _Flag(
                "parameter",
                ("frozen", "unfrozen"),
                lambda: [name for name, p in parameters.items() if not p.requires_grad],
                lambda name, value: parameters[name].requires_grad_(not value),
            ),
            "evaluating": _Flag(
                "module",
                ("called eval() of", "called train() of"),
                lambda: [name for name, module in modules.items() if not module.training],
                lambda name, value: setattr(modules[name], "training", not value),
            ),
        }
        self.begin()

    def begin(self) -> None:
        """Takes the flags as they are now as those that this generation's script begins with."""
        for flag in self._flags.values():
            flag.first = flag.now()

    def state_dict(self) -> dict[str, Any]:
        """Returns by flag the names that had it at first and have it now; empty: all are the same
        as at first."""
        names = {kind: (flag.first, flag.now()) for kind, flag in self._flags.items()}
        return {
            kind: {"first": first, "now": now}
            for kind, (first, now) in names.items()
            if first != now
        }

    def change(self) -> str:
        """Returns in words what the script has changed; empty: nothing."""
        return " and ".join(text for flag in self._flags.values() for text in flag.change())

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """Sets the flags, but for a kind with which the script has begun otherwise.

        Args:
            stored: What `state_dict` has returned.
        """
        for kind, flag in self._flags.items():
            names = stored.get(kind) or {"first": flag.first, "now": flag.first}
            if set(names["first"]) == set(flag.first):
                present = set(flag.now())
                for name in present.symmetric_difference(names["now"]):
                    flag.put(name, name not in present)
