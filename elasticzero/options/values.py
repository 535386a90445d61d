"""Checks and conversions of single option values; each raises `UserError` that names the option."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticzero.errors import UserError

MAX_PORT = 65535
_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)\}|(\{))")
"""Matches `$NAME`, `${NAME}`, and the beginning of any other `${`."""
Expand = Callable[[str, str, Mapping[str, str]], str]
"""Function that takes the flag, for the error, the value and the environment; returns the value
with its paths expanded."""
Parse = Callable[[str, Any], Any]
"""Function that takes the flag, for the error, and the value; returns the converted value."""


def whole(value: str | int) -> int:
    """Returns a number of decimal digits alone; raises `ValueError` for other values."""
    if not str(value).isdecimal():
        raise ValueError(f"{value!r} is no whole number")
    return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """Checks and converts the value of an option that takes a number, and says which it takes."""

    unit: str
    """Unit in the plural, such as steps."""
    expected: str
    """End of the error, as in "0 or more seconds are expected"."""
    least: int = 0
    includes_least: bool = True
    is_finite: bool = True
    convert: Callable[[Any], float] = whole
    """Converts a value to its number; raises `ValueError` for one that is none."""
    alternatives: Mapping[str, Any] = field(default_factory=dict)
    """Words that the option takes in place of a number, each with the value that it gives."""
    checks_least: bool = True
    """False: the record that the number fills refuses one that is too low, in its own sentence."""

    @property
    def text(self) -> str:
        """Returns the numbers for people, such as "steps: 0 or more, or auto"."""
        numbers = f"{self.least} or more" if self.includes_least else f"more than {self.least}"
        return f"{self.unit}: {', or '.join((numbers, *self.alternatives))}"

    def __call__(self, flag: str, value: Any) -> Any:
        """Returns the number, or the value that an alternative gives; an absent value stays None.

        Args:
            flag: The option, for the error.
            value: A text, or the number that the option's type has made of it.

        Raises:
            UserError: It is no such number.
        """
        if value is None:
            return None
        if value in self.alternatives:
            return self.alternatives[value]
        try:
            number = self.convert(value)
            is_taken = self._takes(number)
        except ValueError:
            is_taken = False
        if not is_taken:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UserError(f"{flag} {shown}: {self.expected}")
        return number

    def _takes(self, number: float) -> bool:
        if self.is_finite and not number < math.inf:
            return False
        is_least = self.includes_least and number == self.least
        return number > self.least or is_least or not self.checks_least


def port_number(flag: str, port: int | None) -> int | None:
    """Checks a TCP port; 0 and None are valid."""
    if port is not None and not 0 <= port <= MAX_PORT:
        raise UserError(f"{flag} {port}: a port from 0 to {MAX_PORT} is expected")
    return port


def expanded_path(where: str, text: str, environment: Mapping[str, str]) -> str:
    """Returns a path or URL with its `~`, `$NAME` and `${NAME}` replaced, as a shell does.

    A shell leaves them alone after `--option=`, in a file, and in most places that set variables.

    Args:
        where: What names the option, with which an error begins.
        text: The path or URL.
        environment: Environment variables.

    Raises:
        UserError: A variable is not set, or the text asks for more than that.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name is None:
            raise UserError(f"{where} {text}: of variables only $NAME and ${{NAME}} are replaced")
        if name not in environment:
            raise UserError(f"{where} {text}: the variable {name} is not set")
        return environment[name]

    head, slash, rest = text.partition("/")
    home = ""
    if head.startswith("~"):
        if head != "~":
            raise UserError(
                f"{where} {text}: only ~ alone is replaced, by the home of this user; a directory "
                f"of this name is ./{text}"
            )
        if not environment.get("HOME"):
            raise UserError(f"{where} {text}: the variable HOME is not set, which ~ stands for")
        home, head = environment["HOME"], ""
    return home + _REFERENCE.sub(value_of, head + slash + rest)


def expanded_items(
    where: str, text: str, environment: Mapping[str, str], separator: str = ":"
) -> str:
    """Returns a list such as `tensorboard:DIR,mlflow` with the path in each item expanded.

    Args:
        where: What names the option, with which an error begins.
        text: The list, with commas between its items.
        environment: Environment variables.
        separator: What stands before the path of an item.

    Raises:
        UserError: As of `expanded_path`.
    """
    parts = (part.partition(separator) for part in text.split(","))
    return ",".join(
        kind + between + (expanded_path(where, place, environment) if place else "")
        for kind, between, place in parts
    )


def path_argument(flag: str, environment: Mapping[str, str]) -> Callable[[str], str]:
    """Returns the `type` of an argument of a command that is a path and has no row in a table.

    Args:
        flag: The argument's flag, for errors.
        environment: Environment variables.
    """

    def path(text: str) -> str:
        return expanded_path(flag, text, environment)

    return path


def module_names(flag: str, text: str) -> tuple[str, ...]:
    """Parses a list of modules such as transformers,torchvision.io; raises `UserError` for what is
    no name of a module.

    Args:
        flag: The option.
        text: Its value.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UserError(
                f"{flag} {text}: {name!r} is no module; a list of modules as in `import` is "
                "expected, such as transformers,torchvision.io"
            )
    return tuple(dict.fromkeys(names))
