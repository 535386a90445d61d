"""The newest part of an agent's event log, as it is sent to `elasticzero report`."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticzero.launcher.observability import event_log
from elasticzero.launcher.observability.event_log import EventLog, EventReader
from elasticzero.launcher.observability.events import EVENTS


def newest(log: EventLog, most_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """The events of the newest part, and the bytes that it leaves out."""
    part = log.newest(most_bytes)
    with part.file as file:
        file.seek(part.start)
        data = part.head + file.read(part.stop - part.start)
    return [json.loads(line) for line in data.splitlines()], part.left_out_bytes


def test_a_short_log_is_sent_whole(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write("world", generation=1)
    log.write("step", step=1)
    events, left_out = newest(log, 10_000)
    assert [event["event"] for event in events] == ["world", "step"]
    assert left_out == 0
    log.close()


def test_of_a_long_log_the_events_of_the_whole_job_stay(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write("world", generation=1)
    for step in range(100):
        log.write("step", step=step)
    log.write("round", generation=1)
    events, left_out = newest(log, 500)
    entries = [(event["event"], event.get("step")) for event in events]
    steps = [step for name, step in entries if name == "step"]
    assert entries[0] == ("world", None) and entries[-1] == ("round", None)
    assert 3 < len(steps) < 10 and steps == list(range(100))[-len(steps) :]
    size = log.path.stat().st_size
    assert left_out == size - sum(len(json.dumps(event)) + 1 for event in events)
    log.close()


@pytest.mark.parametrize("most_bytes", range(1, 200, 7))
def test_no_line_is_cut_and_none_sent_twice(tmp_path: Path, most_bytes: int) -> None:
    log = EventLog(tmp_path)
    for generation in range(5):
        log.write("world", generation=generation)
        log.write("step", step=generation)
    events, _ = newest(log, most_bytes)
    assert [e["generation"] for e in events if e["event"] == "world"] == list(range(5))
    log.close()


def test_what_is_kept_in_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "KEPT_BYTES", 1000)
    log = EventLog(tmp_path)
    for generation in range(200):
        log.write("world", generation=generation)
    log.write("step", step=1)
    events, _ = newest(log, 100)
    generations = [event["generation"] for event in events if event["event"] == "world"]
    assert 5 < len(generations) < 20 and generations[-1] == 199
    log.close()


def test_an_agent_that_came_back_appends_to_its_log(tmp_path: Path) -> None:
    for incarnation in ("a", "b"):
        log = EventLog(tmp_path)
        log.write("registered", incarnation=incarnation)
        log.write("step", step=1)
        log.close()
    log = EventLog(tmp_path)
    log.write("registered", incarnation="c")
    log.write("step", step=2)
    events, _ = newest(log, 60)
    assert [e["incarnation"] for e in events if e["event"] == "registered"] == ["c"]
    log.close()
    log.path.unlink()
    with pytest.raises(FileNotFoundError):
        log.newest(10)


@pytest.mark.parametrize("written_bytes", [0, 20])
def test_a_full_disk_costs_events_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    written_bytes: int,
) -> None:
    """Events are counted, said, and no half of a line stays."""
    caplog.set_level(logging.INFO)
    write = os.write

    def run_full(fd: int, data: bytes) -> int:
        if not written_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:written_bytes])

    log = EventLog(tmp_path)
    log.write("world", generation=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", run_full)
        log.write("step", step=1)
        log.write("step", step=2)
    log.write("world", generation=2)
    events, _ = newest(log, 10_000)
    assert [event["event"] for event in events] == ["world", "events_lost", "world"]
    assert set(events[1]) == {"time", "event", *EVENTS["events_lost"].fields}
    assert events[1]["count"] == 2
    assert "space left" in events[1]["error"] or "no room" in events[1]["error"]
    assert ["cannot be written" in r.message for r in caplog.records] == [True, False]
    assert "2 events are left out" in caplog.records[1].message
    log.close()


@pytest.mark.parametrize("delete", [lambda path: shutil.rmtree(path.parent.parent), Path.unlink])
def test_a_deleted_directory_comes_back(tmp_path: Path, delete: Callable[[Path], None]) -> None:
    """Its modes are as before, and those who read the newest part still learn the generation."""
    directory = tmp_path / "job" / "node"
    directory.mkdir(parents=True)
    directory.chmod(0o2750)
    directory.parent.chmod(0o711)
    log = EventLog(directory)
    log.write("world", generation=1)
    delete(log.path)
    log.write("step", step=1)
    events, _ = newest(log, 10_000)
    assert [event["event"] for event in events] == ["world", "step"]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o2750
    assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o711
    log.close()


def test_a_listener_that_fails_ends_nothing(tmp_path: Path) -> None:
    def fail(event: object) -> None:
        raise RuntimeError("a tracker is odd")

    log = EventLog(tmp_path, [fail])
    log.write("step", step=1)
    assert len(newest(log, 10_000)[0]) == 1
    log.close()


def test_fields_may_have_any_name(tmp_path: Path) -> None:
    """The script chooses the names of its scalars."""
    log = EventLog(tmp_path)
    log.write("log", event=1.0, self=3.0, fields=4.0)
    (event,) = newest(log, 10_000)[0]
    assert event["event"] == "log"
    assert (event["self"], event["fields"]) == (3.0, 4.0)
    log.close()


def read_back(reader: EventReader) -> list[int]:
    return [event["step"] for event in reader.read()]


def test_a_long_log_becomes_the_older_part(tmp_path: Path) -> None:
    """Whoever follows it misses no event, and learns of the generation from its newest part."""
    log = EventLog(tmp_path, max_bytes=2000)
    reader, late = EventReader(tmp_path), EventReader(tmp_path)
    log.write("world", generation=1, step=0)
    followed = read_back(reader)
    for step in range(1, 60):
        log.write("step", step=step)
        if step % 7 == 0:
            followed += read_back(reader)
    followed += read_back(reader)
    assert followed == list(range(60))
    sizes = [path.stat().st_size for path in (log.path, event_log.older_part(log.path))]
    assert max(sizes) < 2200 and len(list(tmp_path.iterdir())) == 2
    assert next(event["event"] for event in newest(log, 100_000)[0]) == "world"
    assert read_back(late)[-1] == 59
    log.close()
    again = EventLog(tmp_path, max_bytes=2000)
    again.write("step", step=60)
    assert read_back(reader) == [60]
    again.close()


def test_a_reader_goes_on_where_the_log_was_made_again(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "node")
    reader = EventReader(tmp_path / "node")
    for step in range(5):
        log.write("step", step=step)
    assert read_back(reader) == list(range(5))
    shutil.rmtree(tmp_path / "node")
    assert read_back(reader) == []
    log.write("step", step=5)
    assert read_back(reader) == [5]
    log.close()
