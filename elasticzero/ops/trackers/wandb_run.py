"""Writes to a run of Weights & Biases, offline unless `WANDB_MODE` says otherwise.

Each process that writes has a folder of its own, DIR/wandb/offline-run-…; all have one id, so that
`wandb sync` makes one run of them. W&B's own variables choose project, entity and more.

W&B keeps what is logged in memory for seconds. So the files say what an offline run holds, and a
node that takes over writes again what was lost with another one. What an online run holds the
record says, in which a step is noted before it is logged.
"""

from __future__ import annotations

import json
import os
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticzero.ops.trackers.averages import Row
from elasticzero.ops.trackers.tracker import NOTHING

PROJECT, OFFLINE = "elasticzero", "offline"
BLOCK_BYTES, PART_HEADER, FILE_HEADER_BYTES = 32768, struct.Struct("<IHB"), 7
"""W&B's files are logs as LevelDB's: parts of records, with checksum, size and kind, in blocks."""
LAST_PARTS = (1, 4)
"""Kinds of parts that end a record: a whole one, and the last of several."""


class RunRecord:
    """Keeps, in a file beside a tracker's own, which run is a job's and to which step it was
    written.

    A step is noted before it is written: a process that dies in between leaves a step out, and no
    step is written twice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: Mapping[str, Any] = {}
        if path.exists():
            self._values = json.loads(path.read_text())

    @property
    def run(self) -> str | None:
        """Returns the name of the run; None: there is none yet."""
        return self._values.get("run")

    @property
    def last_step(self) -> int:
        return int(self._values.get("last_step", NOTHING))

    def put(self, run: str, last_step: int) -> None:
        """Replaces the record, as a whole."""
        self._values = {"run": run, "last_step": last_step}
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(self._values) + "\n")
        part.replace(self._path)


class WandbRun:
    """Logs steps to a run, each once."""

    def __init__(self, run: Any, record: RunRecord, last_step: int) -> None:
        self._run = run
        self._record = record
        self.where = f"{run.id} in {run.dir}"
        self.last_step = last_step

    def write(self, rows: Sequence[Row]) -> None:
        """Notes the last step, and logs all."""
        self._record.put(self._run.id, rows[-1].step)
        for row in rows:
            self._run.log({**row.scalars, "_timestamp": row.at}, step=row.step)

    def close(self, outcome: str | None) -> None:
        """Has W&B write what is left."""
        self._run.finish(exit_code=int(outcome == "failed"))


def open_wandb_run(place: str, job: str, *, begins: bool) -> WandbRun:
    """Opens the newest run of a job, or a new one.

    Args:
        place: the directory of the runs' files.
        job: the job's name.
        begins: whether the job begins anew, from its first step, so that it has a new run, unless
            the newest one holds nothing yet.
    """
    import wandb

    folder = Path(place).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    record = RunRecord(folder / f"elasticzero-{job}.json")
    if record.run is None or (begins and record.last_step != NOTHING):
        record.put(f"{job}-{uuid.uuid4().hex[:8]}", NOTHING)
    assert record.run is not None
    mode = os.environ.get("WANDB_MODE", OFFLINE)
    written = record.last_step
    if mode == OFFLINE:
        files = folder.glob(f"wandb/offline-run-*/run-{record.run}.wandb")
        written = max((step for path in files for step in steps_of(path)), default=NOTHING)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=record.run,
        name=job,
        dir=str(folder),
        resume="allow",
        mode=mode,
        settings=wandb.Settings(console="off", silent=True),
    )
    return WandbRun(run, record, written)


def steps_of(path: Path) -> Iterator[int]:
    """Yields the steps that an offline file holds."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in records_of(path):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            yield int(record.history.step.num)


def records_of(path: Path) -> Iterator[bytes]:
    """Yields the records of an offline file, up to one that was cut short."""
    data, at, record = path.read_bytes(), FILE_HEADER_BYTES, b""
    while at + PART_HEADER.size <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < PART_HEADER.size:
            at += left
            continue
        _, size, kind = PART_HEADER.unpack_from(data, at)
        at += PART_HEADER.size + size
        if at > len(data) or not kind:
            return
        record += data[at - size : at]
        if kind in LAST_PARTS:
            yield record
            record = b""
