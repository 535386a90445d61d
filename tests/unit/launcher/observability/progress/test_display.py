"""What shows progress: a log gets a line now and then, a terminal one that moves."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from elasticzero.launcher.observability.output import NO_TICKER, Terminal, Ticker
from elasticzero.launcher.observability.progress.display import (
    ProgressDisplay,
    is_one_place,
    is_pipe,
    is_terminal,
)
from elasticzero.launcher.observability.progress.states import Trains
from tests.watching import DEADLINE_S


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_log_has_what_is_waited_for_and_then_the_steps() -> None:
    clock, lines = Clock(), list[str]()
    display = ProgressDisplay("log", lines.append, clock)
    for _ in range(4):  # a look every half second
        display.show("loading torch")
        assert display.ticker.line() == ""
        clock.now_s += 0.5
    display.show("waiting for the first step")  # which comes at once
    assert display.ticker.line() == ""
    for step in range(1, 200):
        display.show(Trains(step=step, stepped_s=clock.now_s, total=200))
        assert display.ticker.line() == ""
        clock.now_s += 0.5
    display.show(None)
    assert display.ticker.line() == ""
    assert lines == [
        "loading torch",
        "step 1/200",
        "step 61/200",
        "step 121/200",
        "step 181/200",
    ]


def test_on_a_terminal_the_line_is_always_the_newest() -> None:
    clock, lines = Clock(), list[str]()
    display = ProgressDisplay("line", lines.append, clock)
    assert display.ticker.line() == ""
    display.show("loading torch")
    clock.now_s += 3.0
    display.show("loading torch")
    assert display.ticker.line() == "loading torch (3 s)"
    display.show(Trains(step=5, stepped_s=clock.now_s))
    assert display.ticker.line() == "step 5"
    display.show(None)
    assert (display.ticker.line(), lines) == ("", [])


def test_what_is_off_costs_a_comparison() -> None:
    display = ProgressDisplay("off", pytest.fail)
    assert display.ticker is NO_TICKER
    assert not display.is_due()


def test_a_wait_that_ended_at_once_is_not_shown() -> None:
    """An agent that came to a running job read its world 0.02 s after its first look, and rested:
    what it had waited for before was shown in the meantime."""
    clock, lines = Clock(), list[str]()
    display = ProgressDisplay("log", lines.append, clock)
    for reason in ("waiting for etcd", "waiting for a place"):
        if display.is_due():
            display.show(reason)
        clock.now_s += 0.02
    for _ in range(4):
        clock.now_s += 0.5
        assert display.ticker.line() == ""
    assert lines == ["waiting for a place"]


def test_steps_are_counted_no_more_often_than_they_are_shown() -> None:
    clock = Clock()
    display = ProgressDisplay("line", pytest.fail, clock)
    display.show(Trains(step=5, stepped_s=clock.now_s))
    due = []
    for _ in range(10):
        due.append(display.is_due())
        clock.now_s += 0.1
    assert due[0] and 4 <= sum(due) <= 6


class Screen:
    """A terminal of this process's standard streams, and what a person sees of it."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        self.file: TextIO = os.fdopen(slave, "w")
        self._data = b""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # the other end is closed
                return
            with self._changed:
                self._data += data
                self._changed.notify_all()

    def lines(self) -> list[str]:
        """The lines that are seen: what a carriage return goes back over is written over."""
        rows = []
        for row in self._data.decode().split("\n"):
            seen = ""
            for part in row.split("\r"):
                erased = part.split("\x1b[K")
                seen = "".join(erased) + ("" if len(erased) > 1 else seen[len(part) :])
            rows.append(seen)
        return rows

    def until(self, *lines: str) -> None:
        """Waits until these lines are seen, and no others."""
        deadline_s = time.monotonic() + DEADLINE_S
        with self._changed:
            while self.lines() != list(lines):
                assert time.monotonic() < deadline_s, self.lines()
                self._changed.wait(0.1)

    def close(self) -> None:
        self.file.close()
        self._reader.join(DEADLINE_S)
        os.close(self._master)


@contextmanager
def screen() -> Iterator[Screen]:
    shown = Screen()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", shown.file)
            patch.setattr(sys, "stderr", shown.file)
            yield shown
    finally:
        shown.close()


def test_lines_are_whole_beside_a_line_that_moves() -> None:
    """A script's own prints came behind the line, in the same row."""
    terminal, now = Terminal(), ["step 1/9"]
    with screen() as shown:
        assert is_terminal(sys.stderr) and not is_pipe(sys.stdout) and is_one_place()
        with terminal.in_background():
            terminal.follow(Ticker(0.01, lambda: now[0]))
            shown.until("step 1/9")
            terminal.do(lambda: terminal.repeat("[0] hello\n"))
            shown.until("[0] hello", "step 1/9")
            terminal.log_line("a longer line\n")
            shown.until("[0] hello", "a longer line", "step 1/9")
            now[0] = "now"
            shown.until("[0] hello", "a longer line", "now")
            now[0] = ""
            shown.until("[0] hello", "a longer line", "")
            now[0] = "step 9/9"
            shown.until("[0] hello", "a longer line", "step 9/9")
        shown.until("[0] hello", "a longer line", "")


def test_a_line_that_moves_is_no_wider_than_the_terminal() -> None:
    terminal = Terminal()
    with screen() as shown, terminal.in_background():
        terminal.follow(Ticker(0.01, lambda: "x" * 500))
        shown.until("x" * 79)  # a terminal that does not say its width


def test_a_terminal_that_takes_nothing_is_left_alone() -> None:
    """The lines that moved would have been what its reader got, minutes later."""
    read, write = os.pipe()
    count = [0]

    def line() -> str:
        count[0] += 1
        return f"step {count[0]}"

    terminal = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", os.fdopen(write, "w"))
        with terminal.in_background():
            terminal.log_line("x" * 100_000 + "\n")  # more than a pipe holds
            terminal.flush(DEADLINE_S)
            terminal.follow(Ticker(0.0, line))
            deadline_s = time.monotonic() + DEADLINE_S
            while count[0] <= 50:
                assert time.monotonic() < deadline_s
                time.sleep(0.001)
            data = b""
            while b"x\n" not in data:
                data += os.read(read, 1 << 16)
            assert data.partition(b"x\n")[0] == b"x" * 99_999
            assert all(int(number) > 50 for number in re.findall(rb"step (\d+)", data))
        sys.stderr.close()
    os.close(read)
