"""Puts the commands of the launcher and of the wing together, and hands agents their extensions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from elasticzero.launcher.cli.commands import CORE_COMMANDS, add_run
from elasticzero.launcher.options.parser import Parser
from elasticzero.ops.cli.commands import WING_COMMANDS

if TYPE_CHECKING:
    from elasticzero.launcher.agent.extensions.base import ExtensionFactory


def agent_extensions() -> tuple[ExtensionFactory, ...]:
    """Returns what makes the extensions of each agent."""
    from elasticzero.ops.dashboard.service import DashboardExtension
    from elasticzero.ops.trackers.feed import TrackerFeed

    return DashboardExtension, TrackerFeed


def print_completion(shell: str) -> int:
    """Prints what `completion` prints for this shell; raises `UserError` if there is nothing."""
    from elasticzero.ops.cli.completion import print_script

    return print_script(shell)


ADD: dict[str, Callable[[Parser], None]] = {
    "run": partial(add_run, extensions=agent_extensions, completion=print_completion),
    **CORE_COMMANDS,
    **WING_COMMANDS,
}
"""Functions that give a command's parser its options and its `run_command`, which takes the parsed
arguments and returns the exit code."""
