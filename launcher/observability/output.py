"""Writes what an agent shows and records, in a thread of its own.

A pipe whose reader has stopped, a full disk and a file system that hangs must neither hold up the
agent's loop nor raise into it. So the loop only hands work over. The thread does the work in order,
and writes to standard output and standard error no more than they take at once. What finds no room
is left out, and counted: a line says so once there is room again.

Outside of `Terminal.in_background`, as in other commands and in tests, all is written at once.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TextIO

from elasticzero.text import printable

QUEUED = 20_000
"""Maximum number of pieces of work that wait for the thread; later ones are left out."""
WAITING_BYTES = 1 << 20
"""Maximum number of bytes that wait for the reader of one stream; later lines are left out."""
CHUNK_BYTES = 4096
"""Bytes that are written at a time: a pipe that can be written takes as many without a wait."""
AGAIN_S = 0.1
"""Seconds between two tries to write to a stream whose reader does not read."""
CLOSE_S = 2.0
"""Maximum seconds for which the end of an agent waits for what is not written yet."""
REPORT_EVERY_S = 60.0
"""Seconds in which an error of one kind, in work that concerns no job, is logged once."""
COLUMNS = 80
"""Width of a terminal that does not say its own, in characters."""
ERASE_LINE = "\r\x1b[K"
"""Brings a terminal back to the beginning of an empty line."""
LEFT_OUT = "%d lines and events are left out: they came faster than they could be written"

log = logging.getLogger(__name__)


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Keeps an error of something that is only shown or recorded from the code around it.

    A function that it decorates returns None where an error is kept.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - what is only shown must end nothing
        _report(what, error)


_reported_s: dict[tuple[str, str], float] = {}


def _report(what: str, error: Exception) -> None:
    """Logs an error, but not the same one again and again."""
    case, now_s = (what, type(error).__name__), time.monotonic()
    last_s = _reported_s.get(case)
    if last_s is None or now_s - last_s >= REPORT_EVERY_S:
        _reported_s[case] = now_s
        log.warning("%s failed; training goes on without it", what, exc_info=error)


class Stream:
    """Writes to a standard stream what that takes at once, and keeps the rest for later.

    Only the thread of `Terminal` uses it.
    """

    def __init__(self, fd: int, encoding: str = "utf-8") -> None:
        self._fd = fd
        self._encoding = encoding
        self._waiting = bytearray()
        self._left_out = 0
        self._poller = select.poll()
        self._poller.register(fd, select.POLLOUT)

    @property
    def is_written(self) -> bool:
        """Returns whether nothing waits; callable from any thread."""
        return not self._waiting

    def write(self, text: str) -> None:
        """Writes a line, or leaves it out where too much waits already."""
        data = text.encode(self._encoding, "backslashreplace")
        if self.push():
            self._waiting += data
            self.push()
        elif len(self._waiting) + len(data) <= WAITING_BYTES:
            self._waiting += data
        else:
            self._left_out += 1

    def can_show(self) -> bool:
        """Returns whether nothing waits, and the terminal is not left to another process group, as
        it is by a job that a shell has put into the background."""
        if not self.push():
            return False
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # it is not the terminal that controls this process
            return True

    def columns(self) -> int:
        """Returns the width of the terminal, in characters."""
        try:
            return os.get_terminal_size(self._fd).columns or COLUMNS
        except OSError:
            return COLUMNS

    def push(self) -> bool:
        """Writes what waits, as far as the stream takes it; returns whether nothing waits."""
        while True:
            self._write_waiting()
            if self._waiting or not self._left_out:
                return not self._waiting
            lines, self._left_out = self._left_out, 0
            text = "a line is" if lines == 1 else f"{lines} lines are"
            self._waiting += f"elasticzero: {text} left out here: nothing read them\n".encode()

    def _write_waiting(self) -> None:
        while self._waiting and self._poller.poll(0):
            try:
                count = os.write(self._fd, self._waiting[:CHUNK_BYTES])
            except BlockingIOError:
                return
            except OSError:  # nobody can read it any more, or the disk is full
                self._waiting.clear()
                return
            del self._waiting[:count]


@dataclass(frozen=True, slots=True)
class Ticker:
    """Is called in the thread of a terminal now and then, as long as nothing else is to be
    done."""

    every_s: float
    line: Callable[[], str]
    """Returns the line that is to stand below all others; empty: none."""


def _never() -> str:
    return ""


NO_TICKER = Ticker(inf, _never)


class Terminal:
    """Writes to the standard streams of this process, at once or in a thread.

    In the thread it can also keep a line below all others that changes in place: see `follow`.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queue: deque[Callable[[], object]] = deque()
        self._left_out = 0
        self._busy = self._ending = False
        self._thread: threading.Thread | None = None
        self._out: Stream | None = None
        self._error: Stream | None = None
        self._ticker = NO_TICKER
        self._ticked_s = 0.0
        """Time at which the ticker was called last."""
        self._drawn = ""
        """The line that stands below all others now."""

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Has all work done in a thread, within the block; its end waits CLOSE_S at most for what
        is left."""
        self._out, self._error = _stream(sys.stdout), _stream(sys.stderr)
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="elasticzero-output", daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            with self._condition:
                self._condition.wait_for(self._is_written, CLOSE_S)
                self._ending = True
                self._condition.notify_all()
            self._thread.join(AGAIN_S)
            self._thread = self._out = self._error = None

    def follow(self, ticker: Ticker) -> None:
        """Has a ticker called from now on, and the line that it returns kept below all others, on
        standard error."""
        with self._condition:
            self._ticker = ticker
            self._condition.notify()

    def do(self, work: Callable[[], object]) -> bool:
        """Has work done after all that was handed over before; returns False if it is left out.

        An error in it ends nothing.
        """
        if self._thread is None or threading.current_thread() is self._thread:
            with contained("the agent's output"):
                work()
            return True
        return self._hand_over(work)

    def _hand_over(self, work: Callable[[], object]) -> bool:
        with self._condition:
            if len(self._queue) >= QUEUED:
                self._left_out += 1
                return False
            self._queue.append(work)
            self._condition.notify()
        return True

    def flush(self, limit_s: float) -> bool:
        """Waits until all that was handed over is done, within a limit; returns whether it is."""
        if self._thread is None or threading.current_thread() is self._thread:
            return True
        with self._condition:
            return self._condition.wait_for(self._is_idle, limit_s)

    def log_line(self, text: str) -> None:
        """Writes lines on standard error.

        A log handler calls it under its lock, so it writes nothing itself where there is a thread.
        """
        if self._thread is None:
            self._write(None, sys.stderr, text)
        else:
            self._hand_over(lambda: self._write(self._error, sys.stderr, text))

    def repeat(self, text: str) -> None:
        """Writes lines of a worker's output on standard output; called in the thread only."""
        self._write(self._out, sys.stdout, text)

    def takes_output(self) -> bool:
        """Returns whether nothing waits for the reader of standard output; called in the thread
        only."""
        return self._out is None or self._out.push()

    def _write(self, stream: Stream | None, file: TextIO | None, text: str) -> None:
        self._draw("")
        if stream is not None:
            stream.write(text)
        elif file is not None:
            with suppress(Exception):  # what cannot be shown must not end what it tells of
                file.write(text)
                file.flush()

    def _tick(self) -> None:
        self._ticked_s = time.monotonic()
        self._draw(self._ticker.line())

    def _draw(self, line: str) -> None:
        """Puts a line below all others, in place of the one that stands there; empty: none.

        Nothing is drawn as long as something waits for the terminal, or where it is another
        process's turn to use it. What is printed erases the line, and the next turn of the thread
        draws it again.
        """
        stream = self._error
        if line == self._drawn or stream is None or (line and not stream.can_show()):
            return
        if not line:
            self._ticked_s = 0.0
            stream.write(ERASE_LINE)
        else:
            stream.write(f"\r{printable(line)[: stream.columns() - 1]}\x1b[K")
        self._drawn = line

    def _streams(self) -> list[Stream]:
        return [stream for stream in (self._out, self._error) if stream is not None]

    def _is_idle(self) -> bool:
        return not self._queue and not self._busy

    def _is_written(self) -> bool:
        return self._is_idle() and all(stream.is_written for stream in self._streams())

    def _run(self) -> None:
        while (work := self._next()) is not None:
            with contained("the agent's output"):
                work()
        self._draw("")
        self._ticker = NO_TICKER

    def _next(self) -> Callable[[], object] | None:
        """Returns the next piece of work, once there is one; None: the thread is to end."""
        while True:
            for stream in self._streams():  # without the lock: a write may take long
                stream.push()
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                if self._ending:
                    return None
                if self._left_out:
                    self._queue.append(partial(log.warning, LEFT_OUT, self._left_out))
                    self._left_out = 0
                if not self._queue:
                    due_s = self._ticked_s + self._ticker.every_s
                    if (left_s := due_s - time.monotonic()) <= 0:
                        return self._tick
                    written = all(stream.is_written for stream in self._streams())
                    limit_s = None if left_s == inf else left_s
                    self._condition.wait(limit_s if written else min(AGAIN_S, left_s))
                if self._queue:
                    self._busy = True
                    return self._queue.popleft()


def _stream(file: TextIO | None) -> Stream | None:
    """Returns the stream below a file object; None: it has no descriptor."""
    try:
        if file is None:
            return None
        file.flush()
        return Stream(file.fileno(), file.encoding or "utf-8")
    except (OSError, ValueError):
        return None


terminal = Terminal()
"""The standard streams of this process; an agent writes to them in the background."""
