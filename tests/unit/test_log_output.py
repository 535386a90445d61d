"""Where notes of this package go: its own processes, and those of somebody else."""

from __future__ import annotations

import io
import logging
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticzero import log_output
from elasticzero.log_output import (
    attach_to_stderr,
    attach_to_stderr_by_default,
    keep_write_errors,
    missing_output,
)

PACKAGE = logging.getLogger("elasticzero")
NOTES = logging.getLogger("elasticzero.training.preparation")


@pytest.fixture(autouse=True)
def package_unconfigured() -> Iterator[None]:
    before = PACKAGE.handlers[:], PACKAGE.propagate
    level = PACKAGE.level
    PACKAGE.handlers[:], PACKAGE.propagate = [], True
    PACKAGE.setLevel(logging.NOTSET)
    yield
    PACKAGE.handlers[:], PACKAGE.propagate = before
    PACKAGE.setLevel(level)


def test_a_process_of_ours_shows_bare_messages_once(capsys: pytest.CaptureFixture[str]) -> None:
    attach_to_stderr()
    attach_to_stderr()
    NOTES.info("chose %s", "zero2")
    NOTES.warning("warning: ranks differ")
    NOTES.debug("not for people")
    assert capsys.readouterr().err == "chose zero2\nwarning: ranks differ\n"


def test_a_level_that_the_user_has_set_stays(capsys: pytest.CaptureFixture[str]) -> None:
    PACKAGE.setLevel(logging.ERROR)
    attach_to_stderr()
    NOTES.warning("unwanted")
    NOTES.error("an error")
    assert capsys.readouterr().err == "an error\n"


def test_a_process_without_logging_shows_notes_by_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    attach_to_stderr_by_default()
    NOTES.info("a note")
    assert capsys.readouterr().err == "a note\n"


def test_a_process_with_logging_of_its_own_gets_the_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    records: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(f"{record.name}: {record.getMessage()}")

    logging.getLogger().addHandler(Kept())
    attach_to_stderr_by_default()
    NOTES.warning("a warning")
    assert records == ["elasticzero.training.preparation: a warning"]
    assert capsys.readouterr().err == ""


def test_a_closed_stderr_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    attach_to_stderr()
    monkeypatch.setattr("sys.stderr", None)
    NOTES.info("lost")
    full = open("/dev/full", "w")  # noqa: SIM115 - its close fails
    monkeypatch.setattr("sys.stderr", full)
    NOTES.info("lost too")
    monkeypatch.undo()
    with pytest.raises(OSError):
        full.close()


class Streams:
    """Standard streams of a script whose log is a file."""

    def __init__(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        for name in ("stdout", "stderr"):
            stream = open(self.fd, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
            monkeypatch.setattr(sys, name, stream)
            monkeypatch.setattr(sys, f"__{name}__", stream)
        keep_write_errors()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs" / "0.log"


@contextmanager
def streams_into(log: Path) -> Iterator[Streams]:
    """A fixture cannot do this: pytest itself changes the streams between fixtures and test."""
    with pytest.MonkeyPatch.context() as patch:
        streams = Streams(log, patch)
        yield streams
    os.close(streams.fd)


def test_streams_write_as_before(log: Path) -> None:
    with streams_into(log) as streams:
        print("one", end="")
        sys.stdout.flush()
        assert log.read_text() == "one" and missing_output() == (0, "")
        assert sys.stdout.fileno() == streams.fd and not sys.stdout.isatty()
        assert sys.stdout is sys.__stdout__
        before = sys.stdout
        keep_write_errors()
        assert sys.stdout is before
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.buffer.write(b"zwei\n")
        sys.stdout.reconfigure(line_buffering=True)
        print("three ö")
        assert log.read_text() == "onezwei\nthree ö\n"


def test_a_full_disk_is_no_error_of_the_script(log: Path) -> None:
    """`print` raised ENOSPC, which ended the job with 70."""
    full = os.open("/dev/full", os.O_WRONLY)
    with streams_into(log) as streams:
        print("before", flush=True)
        saved = os.dup(streams.fd)
        os.dup2(full, streams.fd)
        for _ in range(3):
            print("lost", flush=True)
        print("lost", file=sys.stderr, flush=True)
        assert missing_output() == (20, "No space left on device")
        os.dup2(saved, streams.fd)
        print("after", flush=True)
    assert log.read_text() == (
        "before\nelasticzero: 15 bytes of output are missing here: No space left on device\nafter\n"
    )
    os.close(full)
    os.close(saved)


def test_what_a_script_has_put_there_stays(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with streams_into(log):
        tee = io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", tee)
            keep_write_errors()
            assert sys.stdout is tee


@pytest.mark.parametrize("whole", [True, False])
def test_a_deleted_log_is_made_again(
    log: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr(log_output, "SEEK_FILE_S", 0.0)
    with streams_into(log):
        print("before", flush=True)
        if whole:
            shutil.rmtree(log.parent)
            print("lost", flush=True)
            assert not log.exists()
            log.parent.mkdir()  # as the agent does
        else:
            log.unlink()
        print("after", flush=True)
    assert log.read_text() == "after\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o640
