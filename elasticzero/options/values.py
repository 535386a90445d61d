"""Checks and conversions of single option values; each raises `UserError` that names the option."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticzero.errors import UserError

MAX_PORT = 65535
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
