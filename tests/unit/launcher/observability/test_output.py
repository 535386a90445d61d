"""What an agent shows never holds up whoever shows it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

import pytest

from elasticzero.launcher.observability import output
from elasticzero.launcher.observability.output import Terminal, contained
from tests.watching import DEADLINE_S


class UnreadPipe:
    """A pipe that nothing reads until `read_all`."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        self.file: TextIO = os.fdopen(write, "w")

    def read_all(self, until: str) -> str:
        """Reads until the text has come."""
        data = b""
        while until.encode() not in data:
            data += os.read(self._read, 1 << 16)
        return data.decode()

    def close(self) -> None:
        os.close(self._read)
        self.file.close()


@contextmanager
def unread(*names: str) -> Iterator[list[UnreadPipe]]:
    """Puts such pipes in the place of standard streams. A fixture cannot: pytest itself changes
    them between the fixtures and the test."""
    pipes = [UnreadPipe() for _ in names]
    with pytest.MonkeyPatch.context() as patch:
        for name, pipe in zip(names, pipes, strict=True):
            patch.setattr(sys, name, pipe.file)
        yield pipes
    for pipe in pipes:
        pipe.close()


def until(so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not so():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_a_reader_that_stops_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop stood still in a write to a pipe that nobody read."""
    monkeypatch.setattr(output, "WAITING_BYTES", 100_000)
    terminal = Terminal()
    with unread("stderr") as [pipe], terminal.in_background():
        for number in range(3000):
            terminal.log_line(f"{number} {'x' * 100}\n")
        until(lambda: terminal.flush(0.1))
        reader = threading.Thread(target=lambda: texts.append(pipe.read_all("left out here")))
        texts: list[str] = []
        reader.start()
        reader.join(DEADLINE_S)
    lines = texts[0].splitlines()
    shown = [int(line.split()[0]) for line in lines if line[0].isdigit()]
    left_out = next(line for line in lines if "left out here" in line)
    assert shown == list(range(len(shown))) and len(shown) > 500
    assert (
        left_out == f"elasticzero: {3000 - len(shown)} lines are left out here: nothing read them"
    )


def test_a_stalled_output_holds_up_no_errors() -> None:
    """Standard error has another reader, which goes on to read."""
    terminal = Terminal()
    with unread("stdout", "stderr") as [_, pipe], terminal.in_background():
        for _ in range(3000):
            terminal.do(lambda: terminal.repeat("x" * 100 + "\n"))
        takes: list[bool] = []
        terminal.do(lambda: takes.append(terminal.takes_output()))
        terminal.log_line("a line for people\n")
        assert "a line for people\n" in pipe.read_all("people")
    assert takes == [False]


def test_the_end_waits_only_so_long_for_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "CLOSE_S", 0.05)
    terminal = Terminal()
    with unread("stderr"), terminal.in_background():
        for _ in range(2000):
            terminal.log_line("x" * 100 + "\n")
    assert terminal.flush(0.0)


def test_work_is_done_in_order_and_an_error_in_it_is_kept() -> None:
    terminal, done = Terminal(), list[int]()
    with unread("stderr"), terminal.in_background():
        terminal.do(lambda: done.append(1))
        terminal.do(lambda: 1 // 0)
        terminal.do(lambda: done.append(2))
    assert done == [1, 2]


def test_what_comes_too_fast_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "QUEUED", 3)
    terminal, release, taken = Terminal(), threading.Event(), threading.Event()
    with unread("stderr"), terminal.in_background():

        def wait() -> None:
            taken.set()
            release.wait(DEADLINE_S)

        terminal.do(wait)
        assert taken.wait(DEADLINE_S)
        kept = [terminal.do(lambda: None) for _ in range(5)]
        release.set()
    assert kept == [True, True, True, False, False]


def test_a_disk_that_is_full_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", os.fdopen(full, "w", closefd=False))
        terminal = Terminal()
        with terminal.in_background():
            terminal.log_line("lost\n")
            assert terminal.flush(DEADLINE_S)
        terminal.log_line("lost\n")
        with suppress(OSError):
            sys.stderr.close()
    os.close(full)


def test_without_a_thread_all_is_written_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    terminal.log_line("now\n")
    terminal.repeat("here\n")
    assert capsys.readouterr() == ("here\n", "now\n")


def test_an_error_of_one_kind_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        with contained("a test of what is contained"):
            raise RuntimeError("no")
    assert [r.message for r in caplog.records if "test of what" in r.message] == [
        "a test of what is contained failed; training goes on without it"
    ]
