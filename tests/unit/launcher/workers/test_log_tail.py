"""What of the workers' logs is repeated on a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from elasticzero.launcher.workers import log_tail
from elasticzero.launcher.workers.console_output import ALL, ConsoleOutput
from elasticzero.launcher.workers.log_tail import LogTail
from elasticzero.launcher.workers.process import Worker
from elasticzero.log_output import REPORTED, reported


class Terminal:
    """Takes lines as long as `open` is true."""

    def __init__(self, log: Path) -> None:
        self.lines: list[str] = []
        self.open = True
        self.tail = LogTail(self.lines.append, lambda: self.open)
        self.worker = Worker(3, 0, 1, cast(Any, None), log, 0)

    def follow(self, *, last: bool = False) -> list[str]:
        self.lines.clear()
        self.tail.follow(self.worker, ALL, last=last)
        return list(self.lines)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "0.log"


def test_lines_are_repeated_once_and_whole(log: Path) -> None:
    shown = Terminal(log)
    assert shown.follow() == []
    with log.open("a") as file:
        print("one\ntw", end="", file=file, flush=True)
        assert shown.follow() == ["[3] one\n"]
        print("o\nthree", end="", file=file, flush=True)
        assert shown.follow() == ["[3] two\n"]
        assert shown.follow(last=True) == ["[3] three\n"]


def test_an_error_that_the_agent_prints_is_not_repeated(log: Path) -> None:
    """Each rank's traceback was repeated, beside the agent's own lines about it."""
    shown = Terminal(log)
    with log.open("a") as file:
        text = reported("Traceback (most recent call last):\nValueError: no\n")
        print("before", file=file)
        print(text[:80], end="", file=file, flush=True)
        assert shown.follow() == ["[3] before\n"]
        print(text[80:], end="", file=file)
        print("after", file=file, flush=True)
        assert shown.follow() == ["[3] after\n"]
    assert "ValueError: no\n" in log.read_text()


def test_an_error_whose_end_is_missing_hides_nothing_of_the_next_worker(log: Path) -> None:
    shown = Terminal(log)
    log.write_text(f"{REPORTED}\nTraceback (most recent call last):\n")
    assert shown.follow(last=True) == []
    with log.open("a") as file:
        print("the next worker", file=file)
    assert shown.follow() == ["[3] the next worker\n"]


def test_lines_wait_in_the_file_for_a_terminal_that_stalls(log: Path) -> None:
    shown = Terminal(log)
    log.write_text("one\n")
    shown.open = False
    assert shown.follow() == shown.follow(last=True) == []
    shown.open = True
    assert shown.follow() == ["[3] one\n"]


def test_a_file_that_was_cut_off_or_replaced_is_read_anew(log: Path) -> None:
    shown = Terminal(log)
    log.write_text("one\ntwo\n")
    assert len(shown.follow()) == 2
    with log.open("r+") as file:
        file.truncate(0)
        file.write("three\n")
    assert shown.follow() == ["[3] three\n"]
    new = log.with_suffix(".new")
    new.write_text("four and more\n")
    new.replace(log)
    assert shown.follow() == ["[3] four and more\n"]


def test_a_file_that_cannot_be_opened_is_read_later(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EMFILE here ended the node."""

    def refuse(*_: object, **__: object) -> Any:
        raise OSError(24, "Too many open files")

    shown = Terminal(log)
    log.write_text("one\n")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        assert shown.follow() == []
    assert shown.follow() == ["[3] one\n"]


def test_the_last_lines_are_repeated_however_many_they_are(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "TAIL_BYTES", 10)
    shown = Terminal(log)
    log.write_text("".join(f"{number:08}\n" for number in range(20)))
    assert shown.follow(last=True) == [f"[3] {number:08}\n" for number in range(20)]
    assert shown.follow(last=True) == []


def test_what_was_cut_off_is_repeated_too(log: Path) -> None:
    shown, older = Terminal(log), log.with_suffix(".older")
    log.write_text("one\ntwo\n")
    assert shown.follow() == ["[3] one\n", "[3] two\n"]
    older.write_text("one\ntwo\nthree\n")
    log.write_text("four\n")
    shown.lines.clear()
    shown.tail.cut_off(log, older)
    assert shown.lines == ["[3] three\n"]
    assert shown.follow() == ["[3] four\n"]
    shown.tail.cut_off(log.with_suffix(".other"), older)


def test_each_line_begins_with_the_prefix_of_the_node(log: Path) -> None:
    shown, older = Terminal(log), log.with_suffix(".older")
    shown.tail.console = ConsoleOutput(prefix="${role_name}${local_rank}/${rank}: ", role="r")
    log.write_text("one\ntwo\n")
    assert shown.follow() == ["r0/3: one\n", "r0/3: two\n"]
    older.write_text("one\ntwo\nthree\n")
    shown.tail.cut_off(log, older)
    assert shown.lines[2:] == ["r0/3: three\n"]
