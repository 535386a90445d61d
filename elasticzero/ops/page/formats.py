"""Formats numbers, durations and names for the report. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from elasticzero.text import list_text

NAMES_SHOWN = 8

_UNITS = (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))
_TICKS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200),
    *(86400, 172800, 432000, 864000, 1728000),
)


def span_text(seconds: float) -> str:
    """Returns a duration in one unit or two: `4.2 ms`, `41.2 s`, `2 min 5 s`, `3 h 12 min`."""
    if abs(seconds) < 1e-7:
        return "0 s"
    if seconds < 0:
        return f"-{span_text(-seconds)}"
    if seconds < 0.0995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for unit, size, smaller, part in _UNITS:
        if whole >= size:
            count, rest = whole // size, whole % size // part
            return f"{count} {unit} {rest} {smaller}" if rest else f"{count} {unit}"
    return f"{whole} s"


def share_text(share: float) -> str:
    """Returns a share as a percentage: `71.4%`, `<0.1%`."""
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{100 * share:.1f}%"


def number_text(value: float) -> str:
    """Returns a number of four digits, whole numbers with commas between thousands."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def many_text(count: int, thing: str) -> str:
    """Returns a count with its noun, with commas between thousands: `1 step`, `2,000 steps`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def names_text(names: Sequence[str]) -> str:
    """Returns names with commas between them, the first of many."""
    return list_text(names, NAMES_SHOWN) if names else "–"


def time_ticks(whole_s: float, most: int) -> list[tuple[float, str]]:
    """Returns at most `most` + 1 round times from 0 to `whole_s`, each with its label."""
    if whole_s <= 0:
        return [(0.0, "0")]
    step_s = next((s for s in _TICKS_S if whole_s / s <= most), whole_s)
    return [(i * step_s, _tick_text(i * step_s, step_s)) for i in range(int(whole_s / step_s) + 1)]


def _tick_text(at_s: float, step_s: float) -> str:
    if at_s == 0:
        return "0"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if step_s >= size or (at_s >= 2 * size and at_s % size == 0 and step_s * 10 >= size):
            return f"{at_s / size:g} {unit}"
    return f"{at_s:.6g} s" if step_s >= 0.1 else f"{at_s * 1000:.6g} ms"


def value_ticks(low: float, high: float, most: int) -> list[float]:
    """Returns at most `most` + 1 round numbers within [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9)), 10 * power)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [round((first + i) * step, 12) for i in range(max(0, count))]
