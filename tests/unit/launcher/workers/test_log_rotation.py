"""Logs of workers below a size: whatever goes wrong, no byte is lost in silence."""

from __future__ import annotations

import logging
import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from elasticzero.launcher.workers.log_rotation import LogLimit, part, rotate

LIMIT = LogLimit(max_bytes=1000, keep=2)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "0.log"


def append(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def whole(log: Path) -> str:
    """All that is kept of a log, the oldest first."""
    parts = [part(log, number) for number in (3, 2, 1)]
    return "".join(path.read_text() for path in (*parts, log) if path.exists())


def test_a_short_log_stays_as_it_is(log: Path) -> None:
    append(log, "x" * 999)
    rotate([log, log.with_name("missing.log")], LIMIT)
    assert log.stat().st_size == 999 and len(list(log.parent.iterdir())) == 1


def test_a_log_is_cut_off_in_place(log: Path) -> None:
    """The worker that holds it open goes on to write at its beginning."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in range(5):
        os.write(fd, str(number).encode() * 1000)
        rotate([log], LIMIT)
        assert log.stat().st_size == 0
    os.write(fd, b"on")
    assert whole(log) == "3" * 1000 + "4" * 1000 + "on"
    assert os.fstat(fd).st_size == 2
    os.close(fd)


def test_no_part_is_kept_where_none_is_to_stay(log: Path) -> None:
    append(log, "x" * 1000)
    rotate([log], LogLimit(max_bytes=1000, keep=0))
    assert [path.stat().st_size for path in log.parent.iterdir()] == [0]


def test_without_a_limit_a_log_grows(log: Path) -> None:
    append(log, "x" * 1000)
    rotate([log], LogLimit(max_bytes=0))
    assert log.stat().st_size == 1000


def refuse(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_the_oldest_part_makes_room(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        append(log, str(number) * 1000)
        rotate([log], LIMIT)
    append(log, "2" * 1000)
    copy = shutil.copyfileobj
    failures = iter([refuse])
    monkeypatch.setattr(shutil, "copyfileobj", lambda *args: next(failures, copy)(*args))
    rotate([log], LIMIT)
    assert whole(log) == "1" * 1000 + "2" * 1000


def test_a_log_is_cut_off_where_nothing_makes_room(
    log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append(log, "x" * 1000)
    monkeypatch.setattr(shutil, "copyfileobj", refuse)
    rotate([log], LIMIT)
    assert [path.name for path in log.parent.iterdir()] == ["0.log"]
    assert log.stat().st_size == 0
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "1000 B of output are gone" in record.message


class Died(BaseException):
    """Ends the rotation at once, as SIGKILL ends the agent."""


@pytest.mark.parametrize("at", range(12))
def test_an_agent_that_dies_meanwhile_loses_nothing(
    log: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """At each call of the file system; the next agent goes on, and lines may be there twice."""
    for number in range(2):
        append(log, str(number) * 1000)
        rotate([log], LIMIT)
    append(log, "2" * 1000)
    calls = count()

    def dying(function: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            if next(calls) == at:
                raise Died
            return function(*args, **keywords)

        return call

    with monkeypatch.context() as patch:
        for name in ("open", "replace", "unlink"):
            patch.setattr(Path, name, dying(getattr(Path, name)))
        patch.setattr(shutil, "copyfileobj", dying(shutil.copyfileobj))
        try:
            rotate([log], LIMIT)
        except Died:
            assert at < 8
    assert "2" * 1000 in whole(log)
    append(log, "3" * 1000)
    rotate([log], LIMIT)
    assert whole(log).endswith("2" * 1000 + "3" * 1000)
    assert {path.name for path in log.parent.iterdir()} == {"0.log", "0.log.1", "0.log.2"}
