"""Defines an option of a command: its flags, its variables, its default and its values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from elasticzero.errors import UserError
from elasticzero.options.values import Expand, Number, Parse
from elasticzero.text import nearest_text

SCRIPT_KEY, ARGUMENTS_KEY = "script", "args"
"""Keys of the training script and of its arguments in the file of `--config`."""
_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")

InLocal = Literal["passed on", "taken", "absent"]
"""Says what `elasticzero local` does with an option of `run`: it takes it and gives its agents the
same value, takes it and uses it itself, or does not take it."""


@dataclass(frozen=True, slots=True)
class Option:
    """Describes an option for the parser, the checks, `local` and the reference."""

    flags: tuple[str, ...]
    help: str
    default: Any = None
    type: Any = str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    is_switch: bool = False
    has_off: bool = False
    """True for a switch that `--no-…` turns off."""
    is_list: bool = False
    """True if the flag may be given several times."""
    is_table: bool = False
    """True if its value is settings `NAME=VALUE` with commas between them, for which the file of
    `--config` may have a section of the option's name."""
    pet: bool = False
    """True if torchrun has an option of this name, with a variable `PET_<OPTION>`."""
    has_variable: bool = True
    """True if the option is this project's and has a variable `ELASTICZERO_<OPTION>`."""

    also_from: str = ""
    """One more variable that gives its value."""
    parse: Parse | None = None
    """Checks and converts the value once all options have one; None: it is used as it is."""
    field: str = ""
    """The field of `AgentOptions` that the value fills, such as `grace_s`, `policy.spares`,
    `training.deterministic` or `keep.last`; empty: `agent_options` computes the fields."""
    in_local: InLocal = "passed on"
    group: str = ""
    """The heading under which the help lists it; empty: among the command's own options."""
    in_file: bool = True
    """True if the file of `--config` may give it."""
    stands_alone: bool = False
    """True for an option with which the command runs no script, and so needs none."""
    expand: Expand | None = None
    """Replaces `~` and variables in the value, which is a path or has paths in it; None: it has
    none."""
    is_listed: bool = False
    """True if `--help` of `run` and of `local` lists it; `--help-all` and the reference have every
    option. The help lists the 25 that people use most: one that is added takes the place of
    another."""
    is_compared: bool = False
    """True for a training option that must have the same value on all ranks; `session.prepare`
    compares them."""
    is_new: bool = False
    """True if the release before does not have it: its default is then left out of what ranks
    compare, for a rank of that release has no value."""

    @property
    def name(self) -> str:
        return self.flags[0].removeprefix("--").replace("-", "_")

    @property
    def numbers(self) -> str:
        """Returns which numbers it takes; empty: it takes none, or its help says which."""
        return self.parse.text if isinstance(self.parse, Number) else ""

    @property
    def variable(self) -> str:
        return f"ELASTICZERO_{self.name.upper()}"

    @property
    def variables(self) -> tuple[str, ...]:
        """Returns the environment variables that give the option, the strongest first."""
        ours = (self.variable,) if self.has_variable else ()
        pet = (f"PET_{self.name.upper()}",) if self.pet else ()
        return (*ours, *pet, *filter(None, [self.also_from]))

    def words(self, value: Any) -> list[str]:
        """Returns the words of a command line that give the option this value."""
        if value is None:
            return []
        if not self.is_switch:
            return [f"{self.flags[0]}={value}"]
        off = [f"--no-{self.flags[0].removeprefix('--')}"] if self.has_off else []
        return [self.flags[0]] if value else off

    def given_in(self, environment: Mapping[str, str]) -> tuple[str, Any] | None:
        """Returns the variable that gives the option, and its value; None: no variable does.

        An empty variable counts as unset. Raises `UserError` for an invalid value.
        """
        for variable in self.variables:
            if text := environment.get(variable):
                return variable, self.value(f"{variable}={text}", text)
        return None

    def expanded(self, value: Any, environment: Mapping[str, str], note: str = "") -> Any:
        """Returns a value with `~` and variables in its paths replaced.

        Args:
            value: The raw value.
            environment: Environment variables.
            note: End of an error, which says where the value comes from.

        Raises:
            UserError: A variable is not set.
        """
        if self.expand is None or not isinstance(value, str):
            return value
        try:
            return self.expand(self.flags[0], value, environment)
        except UserError as error:
            raise UserError(f"{error}{note}") from None

    def value(self, where: str, text: str) -> Any:
        """Returns the value of the given text; raises `UserError`, which begins with `where`."""
        taken = _YES + _NO if self.is_switch else self.choices
        value = text.lower() if self.is_switch else text
        if taken is not None and value not in taken:
            hint = nearest_text(value, self.choices or ())
            raise UserError(f"{where}: one of {', '.join(taken)} is expected{hint}")
        if self.is_switch:
            return value in _YES
        try:
            return self.type(text)
        except ValueError:
            expected = "a whole number" if self.type is int else "a number"
            raise UserError(f"{where}: {expected} is expected") from None


def grouped(heading: str, *options: Option) -> tuple[Option, ...]:
    """Returns options that the help lists under one heading."""
    return tuple(replace(option, group=heading) for option in options)


def spellings(flag: str) -> list[str]:
    """Returns a flag with dashes, and with underscores as torchrun takes it too."""
    return list(dict.fromkeys([flag, "--" + flag[2:].replace("-", "_")]))


def split_default(text: str) -> tuple[str, str]:
    """Returns a help text without the default that it names, and that default."""
    match = re.search(r"\s*\(default: ([^)]*)\)|(?:^|; )default: (.*)$", text)
    if match is None:
        return text, ""
    return text[: match.start()] + text[match.end() :], match[1] or match[2]
