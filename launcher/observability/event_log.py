"""Writes and reads the agent's event log: one JSON object a line, for people, tests, benchmarks and
`elasticzero local`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from elasticzero.launcher.observability.events import EventName

EVENTS_FILE = "events.jsonl"


class EventLog:
    """Appends events; each line is written whole, so a reader never sees half of one."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / EVENTS_FILE
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: EventName, **fields: Any) -> None:
        """Writes an event; `time` is this machine's wall clock in seconds, to be compared on one
        machine only."""
        line = json.dumps({"time": time.time(), "event": event, **fields}, default=str)
        with suppress(OSError):  # a full disk must not end a training that does not need the log
            os.write(self._fd, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._fd)


class EventReader:
    """Follows an event log that another process writes."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / EVENTS_FILE
        self._offset = 0

    def skip(self) -> None:
        """Skips what the log holds now."""
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Returns the events since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        end = data.rfind(b"\n") + 1
        self._offset += end
        for line in data[:end].splitlines():
            yield json.loads(line)
