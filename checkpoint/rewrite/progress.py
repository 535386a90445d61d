"""Shows the progress of a long copy: a live line on a terminal, or a line every 10 s in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TextIO

from elasticzero.text import size_text

_TERMINAL_EVERY_S, _LOG_EVERY_S = 0.2, 10.0
_BAR_CELLS = 24


class ProgressBar:
    """Counts bytes from any thread and shows the count; leaving its context clears the line."""

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Writes to `stream` (None: nowhere), with a `clock` in seconds."""
        self.done_bytes = 0
        self._total_bytes = 0
        self._stream = stream
        self._live = stream is not None and stream.isatty()
        self._every_s = _TERMINAL_EVERY_S if self._live else _LOG_EVERY_S
        self._lock = threading.Lock()
        self._clock = clock
        self._started = self._shown = clock()
        self._wide = 0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._wide and self._stream is not None:
            self._stream.write("\r" + " " * self._wide + "\r")
            self._stream.flush()

    def expect(self, total_bytes: int) -> None:
        """Adds to the total; from now on the remaining time is shown."""
        with self._lock:
            self._total_bytes += total_bytes

    def add(self, count: int) -> None:
        """Counts `count` more bytes as done."""
        with self._lock:
            self.done_bytes += count
            now = self._clock()
            if self._stream is None or now - self._shown < self._every_s:
                return
            self._shown = now
            line = _line(self.done_bytes, self._total_bytes, now - self._started)
            if self._live:
                self._stream.write("\r" + line.ljust(self._wide))
                self._wide = len(line)
            else:
                self._stream.write(line + "\n")
            self._stream.flush()


def _line(done: int, total: int, spent_s: float) -> str:
    part = min(1.0, done / total) if total else 1.0
    rate = done / spent_s if spent_s > 0 else 0.0
    left = _time_text((total - done) / rate) if rate > 0 else "?"
    cells = round(part * _BAR_CELLS)
    bar = "#" * cells + "." * (_BAR_CELLS - cells)
    return (
        f"[{bar}] {part:4.0%}  {size_text(done)} of {size_text(total)}, "
        f"{size_text(rate)}/s, {left} left"
    )


def _time_text(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
