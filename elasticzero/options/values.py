"""Checks and conversions of single option values; each raises `UserError` that names the option."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from elasticzero.errors import UserError
from elasticzero.options.settings import BucketBytes
from elasticzero.text import bytes_of

MAX_PORT = 65535
Parse = Callable[[str, Any], Any]
"""Function that takes the flag, for the error, and the value; returns the converted value."""


def at_least_zero(expected: str, *, finite: bool = False) -> Parse:
    """Returns a check that a number is at least 0.

    expected: ends the error, as in "0 or more seconds are expected".
    """

    def parse(flag: str, value: float) -> float:
        if not value >= 0 or (finite and math.isinf(value)):
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            raise UserError(f"{flag} {shown}: {expected}")
        return value

    return parse


def port_number(flag: str, port: int | None) -> int | None:
    """Checks a TCP port; 0 and None are valid."""
    if port is not None and not 0 <= port <= MAX_PORT:
        raise UserError(f"{flag} {port}: a port from 0 to {MAX_PORT} is expected")
    return port


def whole_number(expected: str) -> Parse:
    """Returns a function that parses a number, which may be absent. expected: ends the error."""

    def parse(flag: str, text: str | None) -> int | None:
        if text is not None and not str(text).isdecimal():
            raise UserError(f"{flag} {text}: {expected}")
        return None if text is None else int(text)

    return parse


def positive_number(expected: str) -> Parse:
    """Returns a function that parses a number above 0, which may be absent.

    expected: ends the error, as in "a number of operations is expected".
    """

    def parse(flag: str, text: str | None) -> float | None:
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < math.inf:
            raise UserError(f"{flag} {text}: {expected}")
        return value

    return parse


def steps_or_auto(flag: str, text: str) -> int | None:
    """Parses a number of steps; returns None for auto."""
    if text == "auto":
        return None
    if not text.isdecimal():
        raise UserError(f"{flag} {text}: a number of steps, 0 or auto is expected")
    return int(text)


def bytes_or_auto(flag: str, text: str | None) -> BucketBytes:
    """Parses a size of at least one byte, which may be absent, or auto."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    try:
        size = bytes_of(text)
    except ValueError:
        size = 0
    if size < 1:
        raise UserError(f"{flag} {text}: a size such as 16MiB, or auto, is expected")
    return size


def seconds_or_auto(flag: str, text: str) -> float | None:
    """Parses a number of seconds; returns None for auto."""
    if text == "auto":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise UserError(f"{flag} {text}: seconds, 0 or auto is expected")
    return seconds


def lease_seconds(flag: str, seconds: int) -> float:
    """Checks the duration of the lease of a node's registration, in seconds."""
    if seconds < 2:
        raise UserError(f"{flag} {seconds}: etcd grants no lease below 2 s")
    return float(seconds)
