"""Where notes of this package go: its own processes, and those of somebody else."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from elasticzero.log_output import attach_to_stderr, attach_to_stderr_by_default

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
