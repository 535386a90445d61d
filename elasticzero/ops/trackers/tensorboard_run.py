"""Writes event files for TensorBoard.

A run is a directory, DIR/JOB/run-N. Each process that writes has a file of its own there, as
TensorBoard expects. A step is one record, written at once.
"""

from __future__ import annotations

import io
import os
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from elasticzero.ops.trackers.averages import Row
from elasticzero.ops.trackers.tracker import NOTHING

_RUN = re.compile(r"run-(\d{1,9})\Z")
_FILE = re.compile(r"events\.out\.tfevents\.(\d{1,12})\.")


class TensorBoardRun:
    """Appends records to an event file."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        directory.mkdir(parents=True, exist_ok=True)
        self.where = str(directory)
        self.last_step = _last_step(directory)
        self._file = _next_file(directory).open("xb", buffering=0)
        self._append([Event(wall_time=time.time(), file_version="brain.Event:2")])

    def write(self, rows: Sequence[Row]) -> None:
        """Writes one record for each step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._append(
            Event(
                wall_time=row.at,
                step=row.step,
                summary=Summary(
                    value=[
                        Summary.Value(tag=name, simple_value=value)
                        for name, value in row.scalars.items()
                    ]
                ),
            )
            for row in rows
        )

    def _append(self, events: object) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        for event in events:  # type: ignore[attr-defined]
            record = io.BytesIO()
            RecordWriter(record).write(event.SerializeToString())
            data = record.getvalue()
            if self._file.write(data) != len(data):
                raise OSError(f"{self._file.name}: only part of a record could be written")

    def close(self, outcome: str | None) -> None:
        """Closes the file; the outcome has no place in it."""
        self._file.close()


def open_tensorboard_run(place: str, job: str, *, begins: bool) -> TensorBoardRun:
    """Opens the newest run of a job in a directory, or a new one.

    Args:
        place: the directory, which has a folder for each job.
        job: the job's name.
        begins: whether the job begins anew, from its first step, so that it has a new run, unless
            the newest one holds nothing yet.
    """
    folder = Path(place).absolute() / job
    names = os.listdir(folder) if folder.is_dir() else []
    newest = max((int(match[1]) for name in names if (match := _RUN.match(name))), default=1)
    if begins and _last_step(folder / f"run-{newest}") != NOTHING:
        newest += 1
    return TensorBoardRun(folder / f"run-{newest}")


def _files(directory: Path) -> list[Path]:
    """Returns a run's event files, oldest first, by the seconds in their names."""
    numbered = (
        (int(match[1]), path) for path in directory.glob("*") if (match := _FILE.match(path.name))
    )
    return [path for _, path in sorted(numbered)]


def _next_file(directory: Path) -> Path:
    """Returns the path of the next event file.

    TensorBoard reads the files in the order of their names, so that this one comes last even if the
    clock of the node before was ahead.
    """
    files = _files(directory)
    newest = int(_FILE.match(files[-1].name)[1]) if files else 0  # type: ignore[index]
    at_s = max(int(time.time()), newest + 1)
    return directory / f"events.out.tfevents.{at_s}.{socket.gethostname()}.{os.getpid()}.0"


def _last_step(directory: Path) -> int:
    """Returns the last step that a run's files hold. The newest file that holds any has it, since
    steps only grow from file to file."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    for path in reversed(_files(directory)):
        steps = [int(e.step) for e in EventFileLoader(str(path)).Load() if e.HasField("summary")]
        if steps:
            return max(steps)
    return NOTHING
