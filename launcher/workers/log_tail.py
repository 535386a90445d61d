"""Follows the log files of workers, and writes their new lines elsewhere.

This file stands apart from `console_output.py`, which decides what is repeated, and reads no file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from elasticzero.launcher.workers.console_output import ALL, ERR, OUT, ConsoleOutput
from elasticzero.launcher.workers.process import Worker
from elasticzero.log_output import REPORTED, REPORTED_END
from elasticzero.text import colored

TAIL_BYTES = 1 << 18
"""Maximum number of bytes of one log that are read at a time."""


@dataclass(frozen=True, slots=True)
class Position:
    """Says how far a log file has been read."""

    offset: int
    inode: int | None = None
    """Number of the file; None: it has not been read yet."""


@dataclass(slots=True)
class LogTail:
    """Follows the workers' log files, and passes each new whole line to `write`."""

    write: Callable[[str], object]
    takes_more: Callable[[], bool] = lambda: True
    """Returns whether `write` takes more at once; else the lines stay in the file until later."""
    console: ConsoleOutput = field(default_factory=ConsoleOutput)
    """Says which text begins each line."""
    _positions: dict[Path, Position] = field(default_factory=dict)
    _prefixes: dict[Path, str] = field(default_factory=dict)
    _within_error: set[Path] = field(default_factory=set)
    """Logs of which the last line read is in an error that the agent prints itself."""

    def follow(self, worker: Worker, streams: int, *, last: bool = False) -> None:
        """Writes the lines that a worker's logs have got since the last call, its prefix before
        each.

        Args:
            worker: The worker.
            streams: The streams that are repeated, as bits.
            last: Whether to write a last line that has no end, too.
        """
        prefix = self.console.line_prefix(worker.rank, worker.local_rank)
        if streams & OUT and worker.stdout_log is not None:
            self._follow(prefix, worker.stdout_log, worker.stdout_start, last)
        if streams & (ERR if worker.stdout_log is not None else ALL):
            self._follow(prefix, worker.log, worker.log_start, last)

    def cut_off(self, log: Path, older: Path) -> None:
        """Writes what was not written yet of a log that was cut off.

        Args:
            log: The log.
            older: The file that its bytes went into.
        """
        position = self._positions.pop(log, None)
        if position is not None:
            self._follow(self._prefixes[log], older, position.offset, last=False)
            self._positions.pop(older, None)
            self._positions[log] = Position(0)

    def _follow(self, prefix: str, log: Path, start: int, last: bool) -> None:
        """Writes what is new in a log.

        Args:
            prefix: Text that begins each line.
            log: The file. One that cannot be opened now, as with too many open files, is read at
                the next call.
            start: Place in the file where this worker's output begins.
            last: Whether to write a last line that has no end, too.
        """
        self._prefixes[log] = prefix
        while self.takes_more():
            position = self._positions.get(log, Position(start))
            try:
                with log.open("rb") as file:
                    position = _position_in(file.fileno(), position)
                    file.seek(position.offset)
                    data = file.read(TAIL_BYTES)
            except OSError:
                return
            end = data.rfind(b"\n") + 1
            is_end = len(data) < TAIL_BYTES
            if last if is_end else not end:
                end = len(data)
            self._positions[log] = Position(position.offset + end, position.inode)
            for line in self._repeated(log, data[:end].decode(errors="replace").splitlines()):
                self.write(f"{prefix}{colored(line)}\n")
            if is_end:
                break
        if last:
            self._within_error.discard(log)

    def _repeated(self, log: Path, lines: list[str]) -> Iterator[str]:
        """Yields the lines of a log that the agent does not print itself."""
        for line in lines:
            if line == REPORTED:
                self._within_error.add(log)
            elif log not in self._within_error:
                yield line
            elif line == REPORTED_END:
                self._within_error.discard(log)


def _position_in(fd: int, position: Position) -> Position:
    """Returns the position in an open file: its beginning where it is another file than before, or
    was cut off since."""
    status = os.fstat(fd)
    another = position.inode is not None and position.inode != status.st_ino
    offset = 0 if another or status.st_size < position.offset else position.offset
    return Position(offset, status.st_ino)
