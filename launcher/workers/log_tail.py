"""Follows the log files of workers, and writes their new lines elsewhere.

This file stands apart from `console_output.py`, which decides what is repeated, and reads no file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from elasticzero.launcher.workers.console_output import ALL, ERR, OUT
from elasticzero.launcher.workers.process import Worker

TAIL_BYTES = 1 << 20


@dataclass(slots=True)
class LogTail:
    """Follows the workers' log files, and passes each new whole line to `write`."""

    write: Callable[[str], object]
    _offsets: dict[Path, int] = field(default_factory=dict)

    def follow(self, worker: Worker, streams: int, *, last: bool = False) -> None:
        """Writes the lines that a worker's logs have got since the last call, with its `[rank]`.

        Args:
            worker: The worker.
            streams: The streams that are repeated, as bits.
            last: Whether to write a last line that has no end, too.
        """
        if streams & OUT and worker.stdout_log is not None:
            self._follow(worker.rank, worker.stdout_log, worker.stdout_start, last)
        if streams & (ERR if worker.stdout_log is not None else ALL):
            self._follow(worker.rank, worker.log, worker.log_start, last)

    def _follow(self, rank: int, log: Path, start: int, last: bool) -> None:
        offset = self._offsets.setdefault(log, start)
        try:
            with log.open("rb") as file:
                file.seek(offset)
                data = file.read(TAIL_BYTES)
        except FileNotFoundError:
            return
        whole = last or len(data) == TAIL_BYTES
        end = len(data) if whole else data.rfind(b"\n") + 1
        self._offsets[log] = offset + end
        for line in data[:end].decode(errors="replace").splitlines():
            self.write(f"[{rank}] {line}\n")
