"""Chooses the round numbers and times that an axis shows, and labels them. Pure."""

from __future__ import annotations

import math

from elasticzero.ops.page.markup import utc_text

_TICKS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200),
    *(86400, 172800, 432000, 864000, 1728000),
)
_MOMENT_TICKS_S = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200),
    *(86400, 172800, 604800),
)
_DAYS_S = 172800
"""Seconds of an axis from which on its labels are days."""


def moment_ticks(first: float, last: float, most: int) -> tuple[int, list[tuple[float, str]]]:
    """Returns the seconds between round Unix times in [first, last], and the times with labels.

    They are round in UTC, and labelled so. The time before `first` is among them: a browser moves
    all to where they are round in its own time zone, which is later by less than one step.

    Args:
        first: Unix time at the beginning of the axis.
        last: Unix time at its end.
        most: maximum number of steps that fit into the axis.
    """
    whole_s = last - first
    least_s = 86400 if whole_s > _DAYS_S else 1
    steps = (s for s in _MOMENT_TICKS_S if s >= least_s and whole_s / s <= most)
    step_s = next(steps, math.ceil(whole_s / most / 86400) * 86400)
    pattern = "%d %b" if whole_s > _DAYS_S else "%H:%M" if whole_s >= 600 else "%H:%M:%S"
    start = math.floor(first / step_s)
    count = math.floor(last / step_s) - start + 1
    times = [float((start + i) * step_s) for i in range(count)]
    return step_s, [(at, utc_text(at, pattern)) for at in times]


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
    """Returns the round numbers within [low, high].

    Args:
        low: beginning of the axis.
        high: end of the axis; where it is not above `low`, that is the only tick.
        most: maximum number of intervals, so that there are at most `most` + 1 ticks.
    """
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9)), 10 * power)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [float(f"{(first + i) * step:.12g}") for i in range(max(0, count))]
