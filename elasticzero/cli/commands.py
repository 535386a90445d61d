"""Puts the commands of the launcher and of the wing together."""

from __future__ import annotations

from collections.abc import Callable

from elasticzero.launcher.cli.commands import CORE_COMMANDS
from elasticzero.launcher.options.parser import Parser
from elasticzero.ops.cli.commands import WING_COMMANDS

ADD: dict[str, Callable[[Parser], None]] = {**CORE_COMMANDS, **WING_COMMANDS}
"""Functions that give a command's parser its options and its `run_command`, which takes the parsed
arguments and returns the exit code."""
