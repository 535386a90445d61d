"""Tells when a script reads or sets a variable that its process has no value for yet.

A process that stands by runs the script before it has a rank. A script that looks for its rank then
would take an absent variable for an answer, so the first look is reported, before it is answered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, ItemsView, KeysView, ValuesView
from typing import Any

WORLD_VARIABLES = frozenset(
    (
        *("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    )
)
"""Variables that torchrun sets and that follow from a generation's world."""
ALL_VARIABLES = "all variables of the environment"
"""Stands for the variable where a script takes all of them. A loop over the names alone is no such
look, because packages do that as they are imported (fsspec does)."""
_Environ = type(os.environ)


class WatchedEnviron(_Environ):  # type: ignore[misc,valid-type]
    """Is the class of `os.environ` and `os.environb` while the world's variables are watched.

    A child process gets the environment from the C library, which nothing here can see.
    """

    report: Callable[[str], None]
    """Is called with the variable that is read or set."""

    def _look_at(self, key: str | bytes) -> None:
        name = os.fsdecode(key)
        if name in WORLD_VARIABLES:
            self.report(name)

    def __getitem__(self, key: Any) -> Any:
        self._look_at(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._look_at(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._look_at(key)
        super().__delitem__(key)

    def keys(self) -> KeysView[Any]:
        """Returns the names; a copy of the environment, which may be asked later, begins here."""
        self.report(ALL_VARIABLES)
        return KeysView(self)

    def items(self) -> ItemsView[Any, Any]:
        self.report(ALL_VARIABLES)
        return ItemsView(self)

    def values(self) -> ValuesView[Any]:
        self.report(ALL_VARIABLES)
        return ValuesView(self)


def watch_world_variables(report: Callable[[str], None]) -> None:
    """Has `report` called wherever one of the world's variables is read or set.

    Args:
        report: Gets the name of the variable.
    """
    environs: tuple[Any, Any] = (os.environ, os.environb)
    for environ in environs:
        environ.__class__ = WatchedEnviron
        environ.report = report


def leave_world_variables() -> None:
    """Ends the watch."""
    environs: tuple[Any, Any] = (os.environ, os.environb)
    for environ in environs:
        if "report" in vars(environ):
            environ.__class__ = _Environ
            del environ.report
