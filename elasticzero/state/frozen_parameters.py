"""Keeps which parameters are frozen, where the script has changed that since training began.

A script that freezes a part at one step, and not in each step after it, does not do so again in a
generation that begins after that step. A script that has been edited and begins with other
parameters frozen goes on with its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from elasticzero.text import named_text


class FrozenParameters:
    """Follows `requires_grad` of a model's parameters.

    What it keeps is empty until the script changes one on the way.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Takes what is frozen now as what the script begins with.

        Args:
            parameters: The parameters by name, as the strategy has laid them over the ranks.
        """
        self._parameters = parameters
        self.begin()

    def begin(self) -> None:
        """Takes what is frozen now as what the script of this generation begins with."""
        self._first = self._now()

    def _now(self) -> list[str]:
        return [name for name, p in self._parameters.items() if not p.requires_grad]

    def state_dict(self) -> dict[str, Any]:
        """Returns the names of what was frozen at first and is now; empty: both are the same."""
        now = self._now()
        return {} if now == self._first else {"first": self._first, "now": now}

    def change(self) -> str:
        """Returns in words which parameters are frozen now and were not at first, or the other way
        round; empty: none."""
        first, now = set(self._first), set(self._now())
        changes = (("frozen", now - first), ("unfrozen", first - now))
        return " and ".join(
            f"{done} {named_text('parameter', sorted(map(repr, names)), 3)}"
            for done, names in changes
            if names
        )

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """Freezes what was frozen, unless the script has begun with other parameters frozen.

        Args:
            stored: What `state_dict` has returned.
        """
        if stored and set(stored["first"]) != set(self._first):
            return
        names = set(stored["now"] if stored else self._first)
        for name, parameter in self._parameters.items():
            if parameter.requires_grad is (name in names):
                parameter.requires_grad_(name not in names)
