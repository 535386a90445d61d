"""Writes and reads the agent's event log: one JSON object a line, for people, tests, benchmarks,
`elasticzero local` and `elasticzero report`."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from elasticzero.launcher.observability.events import EventName

EVENTS_FILE = "events.jsonl"
JOB_WIDE: frozenset[EventName] = frozenset(
    {
        *("serving", "registered", "waiting", "round", "world", "start", "plain", "restored"),
        *("recovery", "checkpoint", "exit"),
    }
)
"""Events that tell the course of the whole job, and come a few times in a generation."""
KEPT_BYTES = 1 << 20
"""Bytes of job-wide events that a log keeps in memory besides the file: the newest ones."""


@dataclass(frozen=True, slots=True)
class LogPart:
    """Holds the newest part of a log: job-wide events of the older part, then a range of the
    file."""

    head: bytes
    file: BinaryIO
    """The open file, which whoever asked for the part closes."""
    start: int
    stop: int

    @property
    def left_out_bytes(self) -> int:
        return self.start - len(self.head)


class EventLog:
    """Appends events; each line is written whole, so a reader never sees half of one."""

    def __init__(
        self, directory: Path, listeners: Sequence[Callable[[Mapping[str, Any]], None]] = ()
    ) -> None:
        """Opens the log of a directory, which is made if need be.

        Args:
            directory: Where the log is, or will be.
            listeners: They receive each event that is written.
        """
        self._listeners = tuple(listeners)
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / EVENTS_FILE
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._end = os.fstat(self._fd).st_size
        self._kept: deque[tuple[int, bytes]] = deque()
        """Job-wide events, each with its place in the file."""
        self._kept_bytes = 0

    def write(self, event: EventName, **fields: Any) -> None:
        """Writes an event; `time` is this machine's wall clock in seconds, to be compared on one
        machine only."""
        record = {"time": time.time(), "event": event, **fields}
        data = json.dumps(record, default=str).encode() + b"\n"
        with suppress(OSError):  # a full disk must not end a training that does not need the log
            written = os.write(self._fd, data)
            if event in JOB_WIDE:
                self._kept.append((self._end, data))
                self._kept_bytes += len(data)
            self._end += written
        while self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        for listen in self._listeners:
            listen(record)

    def newest(self, most_bytes: int) -> LogPart:
        """Returns the newest part of the log, at most so many bytes of whole lines, and before it
        the job-wide events that are kept of the rest; callable from any thread.

        So the newest generation is known even where one has made steps for days. Raises
        `FileNotFoundError` if the file is gone.
        """
        file = self.path.open("rb")
        stop = os.fstat(file.fileno()).st_size
        start = max(0, stop - most_bytes)
        if start > 0:
            file.seek(start - 1)
            start += len(file.readline()) - 1
        start = min(start, stop)
        head = b"".join(data for place, data in self._kept.copy() if place < start)
        return LogPart(head, file, start, stop)

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
