"""Keeps what a model's modules return from `get_extra_state`, module by module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from elasticzero.errors import UserError
from elasticzero.nested import flatten

KEY = "_extra_state"
"""What `state_dict` adds to a module's name for its extra state."""


class ExtraStates:
    """Gives access to the extra state of each module that has any."""

    def __init__(self, model: nn.Module) -> None:
        """Takes the model; raises `UserError` for extra state that a checkpoint cannot hold."""
        self._modules = {
            f"{path}.{KEY}" if path else KEY: module
            for path, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        for name, value in self.values().items():
            try:
                flatten(value, name, {})
            except UserError as error:
                kind = type(self._modules[name]).__name__
                raise UserError(f"get_extra_state of {kind} cannot be kept: {error}") from None

    @property
    def names(self) -> set[str]:
        """Returns the names of the extra states in `state_dict`."""
        return set(self._modules)

    def values(self) -> dict[str, Any]:
        """Returns the extra states of now, by their names in `state_dict`."""
        return {name: module.get_extra_state() for name, module in self._modules.items()}

    def odd(self, stored: Mapping[str, Any]) -> str:
        """Returns the name of one that is stored and that no module has, or the other way round;
        empty: they are the same."""
        return min(stored.keys() ^ self._modules.keys(), default="")

    def put(self, values: Mapping[str, Any]) -> None:
        """Gives the modules these extra states, by name."""
        for name, value in values.items():
            self._modules[name].set_extra_state(value)
