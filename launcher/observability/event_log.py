"""Writes and reads the agent's event log: one JSON object a line, for people, tests, benchmarks,
`elasticzero local` and `elasticzero report`."""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from elasticzero.launcher.observability.events import EventName
from elasticzero.launcher.observability.output import CLOSE_S, contained, terminal

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
NEWEST_S = 0.5
"""Seconds for which whoever asks for the newest events waits for those that are not written yet."""

log = logging.getLogger(__name__)


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
    """Appends events; each line is written whole, so a reader never sees half of one.

    An agent writes them in the background. What cannot be written, as on a full disk, is left out
    and counted: no training needs it.
    """

    def __init__(
        self,
        directory: Path,
        listeners: Sequence[Callable[[Mapping[str, Any]], None]] = (),
        max_bytes: int = 0,
    ) -> None:
        """Opens the log of a directory, which is made if need be.

        Args:
            directory: Where the log is, or will be.
            listeners: They receive each event that is written.
            max_bytes: Size in bytes from which the log becomes the older part and another is begun;
                0: there is no limit.
        """
        self._max_bytes = max_bytes
        self._listeners = tuple(listeners)
        directory.mkdir(parents=True, exist_ok=True)
        self._folders = [(folder, _mode(folder)) for folder in (directory, *directory.parents)]
        """The directory and those above it, each with its mode."""
        self.path = directory / EVENTS_FILE
        self._fd = os.open(self.path, _APPEND, 0o644)
        self._end = os.fstat(self._fd).st_size
        self._kept: deque[tuple[int, bytes]] = deque()
        """Job-wide events, each with its place in the file."""
        self._kept_bytes = 0
        self._lost = 0
        """Number of events that could not be written since the last one that was."""
        self._lost_why = ""
        self._closed = False

    def write(self, event: EventName, /, **fields: Any) -> None:
        """Writes an event; `time` is this machine's wall clock in seconds, to be compared on one
        machine only. It is now unless it is among the fields."""
        record = {"time": time.time(), "event": event} | fields | {"event": event}
        terminal.do(partial(self._write, record))
        for listen in self._listeners:
            with contained("what follows the agent's events"):
                listen(record)

    def restore(self) -> None:
        """Makes the directory and the file again if somebody has deleted them."""
        terminal.do(self._restore)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._closed:
            return
        data = json.dumps(record, default=str).encode() + b"\n"
        self._restore()
        if self._max_bytes and self._end >= self._max_bytes:
            self._begin_another()
        if self._lost:
            lost = {"event": "events_lost", "count": self._lost, "error": self._lost_why}
            data = json.dumps({"time": time.time(), **lost}).encode() + b"\n" + data
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                os.ftruncate(self._fd, self._end)
                raise OSError(0, "there is no room for a whole line")
        except OSError as error:
            self._lose(error)
            return
        if self._lost:
            log.info("%s is written again; %d events are left out", self.path, self._lost)
            self._lost = 0
        if record["event"] in JOB_WIDE:
            self._kept.append((self._end, data))
            self._kept_bytes += len(data)
        self._end += written
        while self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _lose(self, error: OSError) -> None:
        self._lost_why = error.strerror or str(error)
        self._lost += 1
        if self._lost == 1:
            log.warning(
                "%s cannot be written: %s; training goes on without it, and so it does where the "
                "workers' output cannot be written",
                *(self.path, self._lost_why),
            )

    def _restore(self) -> None:
        if self._closed or os.fstat(self._fd).st_nlink > 0:
            return
        try:
            for folder, mode in reversed(self._folders):
                if not folder.exists():
                    folder.mkdir(exist_ok=True)
                    folder.chmod(mode)
            fd = os.open(self.path, _APPEND, 0o644)
        except OSError as error:
            log.debug("%s cannot be made again: %s", self.path, error)
            return
        self._replace(fd)
        log.warning("somebody deleted %s, which is made again", self.path)

    def _begin_another(self) -> None:
        """Makes the log the older part, in the place of the one before, and begins another."""
        try:
            self.path.replace(older_part(self.path))
            fd = os.open(self.path, _APPEND, 0o644)
        except OSError as error:
            log.debug("%s grows on: %s", self.path, error)
            return
        self._replace(fd)

    def _replace(self, fd: int) -> None:
        """Writes to another file from now on."""
        os.dup2(fd, self._fd, inheritable=False)
        os.close(fd)
        self._end = os.fstat(self._fd).st_size
        self._kept = deque((-1, data) for _, data in self._kept)

    def newest(self, most_bytes: int) -> LogPart:
        """Returns the newest part of the log, at most so many bytes of whole lines, and before it
        the job-wide events that are kept of the rest; callable from any thread.

        So the newest generation is known even where one has made steps for days. Raises
        `FileNotFoundError` if the file is gone.
        """
        terminal.flush(NEWEST_S)
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
        """Closes the file, once all is written."""
        terminal.do(self._close)
        terminal.flush(CLOSE_S)

    def _close(self) -> None:
        self._closed = True
        os.close(self._fd)


_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


def _mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def older_part(log: Path) -> Path:
    """Returns the path of the older part of an event log, which is there if the log was long."""
    return log.with_name(f"{log.name}.1")


class EventReader:
    """Follows an event log that another process writes."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / EVENTS_FILE
        self._offset = 0
        self._inode: int | None = None
        """Number of the file that is read; None: the one that is there."""

    def skip(self) -> None:
        """Skips what the log holds now."""
        if self._path.exists():
            status = self._path.stat()
            self._offset, self._inode = status.st_size, status.st_ino

    def read(self) -> Iterator[dict[str, Any]]:
        """Returns the events since the last call."""
        for line in [*self._rest_of_older_part(), *self._new_lines(self._path, self._inode)]:
            with suppress(ValueError):  # a machine that went down has left half of a line
                yield json.loads(line)

    def _rest_of_older_part(self) -> list[bytes]:
        """Returns what was not read of a log that has become the older part meanwhile."""
        try:
            status = self._path.stat()
        except OSError:
            return []
        before, self._inode = self._inode, status.st_ino
        if before in (None, status.st_ino):
            self._offset = min(self._offset, status.st_size)
            return []
        older = older_part(self._path)
        lines: list[bytes] = []
        with suppress(OSError):
            lines = self._new_lines(older, before)
        self._offset = 0
        return lines

    def _new_lines(self, path: Path, inode: int | None) -> list[bytes]:
        """Returns the whole lines beyond the offset, if the file still is the one of this
        number."""
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_ino != inode:
                    return []
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].splitlines()
