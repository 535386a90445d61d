"""Shows the progress of a job on this process's terminal, or in its log.

The process notes what it does. The thread of `output.terminal` shows it, so that a terminal that
takes no output holds up nothing.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable
from typing import TextIO

from elasticzero.launcher.observability.output import NO_TICKER, Ticker
from elasticzero.launcher.observability.progress.states import (
    LastLine,
    Mode,
    Progress,
    Trains,
    Waits,
    is_due,
    line_text,
    topic_of,
)

EVERY_S = {"line": 0.2, "log": 0.25}
"""Seconds between two looks at the progress, by how it is shown."""


class ProgressDisplay:
    """Holds what a job does now, and shows it."""

    def __init__(
        self, mode: Mode, log_line: Callable[[str], None], clock: Callable[[], float] | None = None
    ) -> None:
        """Shows nothing yet.

        Args:
            mode: How progress is shown.
            log_line: Writes a line of the log.
            clock: Returns the present time in seconds; None: the monotonic clock does.
        """
        self._mode = mode
        self._log_line = log_line
        self._clock = clock or time.monotonic
        self._progress: Progress | None = None
        self._last = LastLine()
        self._due_s = 0.0

    @property
    def ticker(self) -> Ticker:
        """Returns what shows the progress in the thread of a terminal."""
        if self._mode == "off":
            return NO_TICKER
        return Ticker(EVERY_S[self._mode], self._line)

    def is_due(self) -> bool:
        """Returns whether new progress would be shown: it is on, and is no count of steps that was
        changed just now.

        What is waited for is always taken in: the agent may rest after its last change, and the
        wait before it would be shown meanwhile.
        """
        now_s = self._clock()
        if self._mode == "off" or (isinstance(self._progress, Trains) and now_s < self._due_s):
            return False
        self._due_s = now_s + EVERY_S[self._mode]
        return True

    def show(self, progress: Progress | str | None) -> None:
        """Has what the job does now shown.

        Args:
            progress: How far training has come, or what is waited for; the time of a wait counts
                from its first note. None: nothing is to be shown.
        """
        if not isinstance(progress, str):
            self._progress = progress
        elif not (isinstance(self._progress, Waits) and self._progress.what == progress):
            self._progress = Waits(what=progress, since_s=self._clock())

    def _line(self) -> str:
        """Returns the line that moves; in a log, writes one that is due."""
        progress, now_s = self._progress, self._clock()
        if self._mode == "line":
            return "" if progress is None else line_text(progress, now_s, with_bar=True)
        if progress is not None and is_due(progress, self._last, now_s):
            self._last = LastLine(topic_of(progress), now_s)
            self._log_line(line_text(progress, now_s))
        return ""


def is_terminal(file: TextIO | None) -> bool:
    """Returns whether a standard stream of this process is a terminal."""
    try:
        return file is not None and file.isatty()
    except ValueError:  # it is closed
        return False


def is_pipe(file: TextIO | None) -> bool:
    """Returns whether a standard stream of this process is a pipe or a socket."""
    try:
        mode = 0 if file is None else os.fstat(file.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def is_one_place() -> bool:
    """Returns whether standard output and standard error lead to the same file or terminal."""
    try:
        out, error = (os.fstat(file.fileno()) for file in (sys.stdout, sys.stderr))
    except (OSError, ValueError, AttributeError):
        return False
    return (out.st_dev, out.st_ino, out.st_rdev) == (error.st_dev, error.st_ino, error.st_rdev)
