"""Says in one line what a job does now, and when a log needs such a line again.

Pure: every time comes in as an argument, in seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from elasticzero.text import duration_text, span_text

Mode = Literal["line", "log", "off"]
"""Progress is shown by a line that moves, by lines in the log, or not at all."""
_CHOSEN: Mapping[str, Mode] = {"line": "line", "log": "log", "off": "off"}
CHOICES = ("auto", *_CHOSEN)
"""Values of --progress."""
BAR_CELLS = 30
FIRST_AFTER_S = 0.5
"""Seconds after which a log has a line about a wait that goes on."""
AGAIN_S = 30.0
"""Seconds between two lines of a log about the same."""
LATE_S, LATE_STEPS = 5.0, 10.0
"""A step is late after so many seconds, and after the time of so many steps."""
PLAIN = (
    "the script runs; it has not called elasticzero.run, so no steps are seen, and options of "
    "training and checkpoints have no effect"
)
"""Says that a script is taken for a plain one."""
_OFF = ("", "0", "false", "no")
"""Values of the variable CI that do not say that this is a build server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Names what is waited for."""

    what: str
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trains:
    """Says how far training has come."""

    step: int
    stepped_s: float
    """Time of the step."""
    total: int | None = None
    """Number of steps of the whole run; None: not known."""
    loss: float | None = None
    steps_per_s: float | None = None
    leads: bool = True
    """True on the node of rank 0. The log of another has a line about steps only where the line
    before was about a wait, which has ended."""


Progress = Waits | Trains


@dataclass(frozen=True, slots=True)
class LastLine:
    """Names what the last line of a log was about; empty: there was none."""

    topic: str = ""
    at_s: float = 0.0


def mode_of(
    choice: str,
    environment: Mapping[str, str],
    *,
    error_is_terminal: bool,
    output_is_pipe: bool,
    as_json: bool = False,
) -> Mode:
    """Returns how progress is shown.

    A line that moves needs a terminal that obeys, and that nothing else writes to: what a pipe
    leads to, such as `tee`, may be the same terminal.

    Args:
        choice: One of CHOICES.
        environment: Variables, of which CI and TERM count.
        error_is_terminal: Whether standard error is a terminal.
        output_is_pipe: Whether standard output is a pipe.
        as_json: Whether lines of the log are JSON.
    """
    if choice in _CHOSEN:
        return _CHOSEN[choice]
    built = environment.get("CI", "").lower() not in _OFF
    dumb = environment.get("TERM", "") in ("dumb", "")
    moves = error_is_terminal and not (output_is_pipe or built or dumb or as_json)
    return "line" if moves else "log"


def topic_of(progress: Progress) -> str:
    """Returns what a line about this progress is about; lines about the same need not follow each
    other."""
    return progress.what if isinstance(progress, Waits) else "steps"


def is_due(progress: Progress | None, last: LastLine, now_s: float) -> bool:
    """Returns whether a log needs a line about this progress now.

    Args:
        progress: The progress; None: there is none to show.
        last: What the last line was about.
        now_s: Present time.
    """
    if progress is None:
        return False
    if isinstance(progress, Trains) and not progress.leads:
        return last.topic not in ("", "steps")  # one line takes back that it waits
    if topic_of(progress) == last.topic:
        return now_s - last.at_s >= AGAIN_S
    return isinstance(progress, Trains) or now_s - progress.since_s >= FIRST_AFTER_S


def line_text(progress: Progress, now_s: float, *, with_bar: bool = False) -> str:
    """Returns the line about this progress.

    Args:
        progress: The progress.
        now_s: Present time.
        with_bar: Whether a bar shows which part of the steps is done.
    """
    if isinstance(progress, Waits):
        waited_s = int(now_s - progress.since_s)
        return f"{progress.what} ({span_text(waited_s)})" if waited_s >= 1 else progress.what
    parts = [steps_text(progress.step, progress.total, progress.loss)]
    if (rate := progress.steps_per_s) is not None:
        parts.append(_rate_text(rate))
        if progress.total is not None and progress.total > progress.step:
            parts.append(f"{duration_text((progress.total - progress.step) / rate)} left")
    age_s = now_s - progress.stepped_s
    if age_s >= max(LATE_S, LATE_STEPS / rate if rate else 0.0):
        parts.append(f"that was {span_text(int(age_s))} ago")
    return (bar_text(progress.step, progress.total) if with_bar else "") + "  ".join(parts)


def steps_text(step: int, total: int | None, loss: float | None) -> str:
    """Returns the newest step, of how many, and the loss, as far as they are known.

    Args:
        step: The step.
        total: Number of steps of the whole run.
        loss: The loss.
    """
    of = f"/{total}" if total else ""
    return f"step {step}{of}" + (f"  loss {loss:.4f}" if loss is not None else "")


def bar_text(step: int, total: int | None) -> str:
    """Returns a bar that shows which part of the steps is done; empty: their number is not
    known."""
    if not total:
        return ""
    filled = min(BAR_CELLS, int(BAR_CELLS * step / total))
    return f"[{'#' * filled}{'.' * (BAR_CELLS - filled)}] "


def _rate_text(steps_per_s: float) -> str:
    if steps_per_s >= 100:
        return f"{steps_per_s:.0f} steps/s"
    if steps_per_s >= 1:
        return f"{steps_per_s:.3g} steps/s"
    return f"{1 / steps_per_s:.3g} s a step"
