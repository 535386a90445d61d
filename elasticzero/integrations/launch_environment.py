"""Hides from a framework that a launcher has started this process, until its group is set up.

A framework that finds RANK in the environment opens a process group of its own at once, and keeps
it. The world changes, so that the only group is that of a generation, inside `elasticzero.run`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)
"""The variables by which frameworks notice a launcher."""


@dataclass(frozen=True, slots=True)
class LaunchEnvironment:
    """Holds what the launcher has told this process."""

    variables: dict[str, str]

    @property
    def rank(self) -> int:
        """Returns the number of this process among all, from 0."""
        return int(self.variables.get("RANK", "0"))

    @property
    def local_rank(self) -> int:
        """Returns the index of this process's GPU among those that it sees."""
        return int(self.variables.get("LOCAL_RANK", "0"))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Gives a section of the script the variables, and hides them again after it."""
        os.environ.update(self.variables)
        try:
            yield
        finally:
            _take()


_hidden = LaunchEnvironment({})


def hide() -> LaunchEnvironment:
    """Takes the variables out of the environment; returns them, also when called again."""
    if taken := _take():
        _hidden.variables.update(taken)
    return _hidden


def _take() -> dict[str, str]:
    return {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
