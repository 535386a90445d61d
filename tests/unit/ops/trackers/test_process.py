"""A tracker's process is fed, fails, is replaced, and ends; no step is lost or written twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from elasticzero.launcher.options.trackers import TrackerTarget
from elasticzero.ops.trackers import process
from elasticzero.ops.trackers.averages import Row
from elasticzero.ops.trackers.process import TrackerProcess
from tests.unit.ops.trackers.test_tensorboard_run import points

pytest.importorskip("tensorboard")
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "RESTART_S", 0.1)


def started(tmp_path: Path, lines: list[str]) -> TrackerProcess:
    return TrackerProcess(
        TrackerTarget("tensorboard", str(tmp_path)),
        "job",
        begins=True,
        log=tmp_path / "log",
        tell=lambda text, _: lines.append(text),
    )


def rows(begin: int, end: int) -> list[Row]:
    return [Row(step, float(step), {"loss": float(step)}) for step in range(begin, end)]


def steps(tmp_path: Path) -> list[int]:
    return [step for _, step, _ in points(tmp_path / "job" / "run-1", "loss")]


def wait(what: str, done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def children() -> list[psutil.Process]:
    """Returns the trackers' processes that run."""
    processes = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has just ended
            if "elasticzero.ops.trackers.writer" in child.cmdline():
                processes.append(child)
    return processes


def test_what_waits_is_written_before_the_end(tmp_path: Path) -> None:
    lines: list[str] = []
    tracker = started(tmp_path, lines)
    tracker.write(rows(1, 2000))
    tracker.close("finished", DEADLINE_S)
    assert steps(tmp_path) == list(range(1, 2000))
    assert lines == [f"--log-to tensorboard writes to {tmp_path / 'job' / 'run-1'}"]
    assert children() == []


def test_a_process_that_is_killed_is_replaced_and_goes_on(tmp_path: Path) -> None:
    lines: list[str] = []
    tracker = started(tmp_path, lines)
    killed: set[int] = set()
    for begin in range(0, 500, 100):
        tracker.write(rows(begin + 1, begin + 101))
        wait("another process", lambda: any(c.pid not in killed for c in children()))
        for child in children() if begin < 400 else ():
            killed.add(child.pid)
            child.kill()
    tracker.close("finished", DEADLINE_S)
    assert len(killed) >= 4
    assert steps(tmp_path) == list(range(1, 501))
    assert any("its process ended with -9" in line for line in lines), lines
    assert not (tmp_path / "job" / "run-2").exists(), "the same run goes on"


def test_a_tracker_that_cannot_be_written_is_tried_again(tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "job").write_text("a file where the directory of runs should be")
    tracker = started(tmp_path, lines)
    tracker.write(rows(1, 4))
    wait("an error", lambda: bool(lines))
    time.sleep(0.5)
    assert len([line for line in lines if "Error" in line]) == 1, "the same error is said once"
    (tmp_path / "job").unlink()
    wait("it writes", lambda: any("writes to" in line for line in lines))
    tracker.close(None, DEADLINE_S)
    assert steps(tmp_path) == [1, 2, 3]


def test_a_process_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    lines: list[str] = []
    tracker = started(tmp_path, lines)
    wait("it writes", lambda: bool(lines))
    children()[0].suspend()
    tracker.write(rows(1, 4))
    began_s = time.monotonic()
    tracker.close("finished", 0.5)
    assert time.monotonic() - began_s < DEADLINE_S / 2
    assert "has ended, and 3 steps are not written" in lines[-1]
    wait("it is gone", lambda: not children())


def test_rows_that_another_node_writes_are_discarded(tmp_path: Path) -> None:
    lines: list[str] = []
    tracker = started(tmp_path, lines)
    wait("it writes", lambda: bool(lines))
    child = children()[0]
    child.suspend()
    tracker.write(rows(1, 4))
    time.sleep(0.3)  # the process has been asked to write these
    tracker.write(rows(4, 7))
    closing = threading.Thread(
        target=tracker.close, args=(None, DEADLINE_S), kwargs={"discard": True}, daemon=True
    )
    closing.start()
    time.sleep(0.2)
    child.resume()
    closing.join(DEADLINE_S)
    assert steps(tmp_path) == [1, 2, 3]
    assert len(lines) == 1, lines
