"""Finds and reads the event logs of a job: the only module of the report that reads files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticzero.errors import UserError
from elasticzero.launcher.observability.event_log import EVENTS_FILE, older_part
from elasticzero.ops.report.digest import digest, parsed
from elasticzero.ops.report.life import AgentLife
from elasticzero.ops.report.model import NodeLog, RunSummary
from elasticzero.ops.report.runs import last_run
from elasticzero.ops.report.summarize import summarize_run
from elasticzero.ops.report.thinning import sampled, stride
from elasticzero.text import list_text

WHOLE_BYTES = 96 << 20
"""Bytes of logs that are read line by line; of longer logs some steps are left out."""
NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class LogFile:
    """Names the event log of one node."""

    node: str
    path: Path
    cut_bytes: int = 0
    """Bytes of older events that are missing in it."""


def find_logs(directory: Path, job: str | None) -> tuple[str, list[LogFile]]:
    """Returns the name of a job and its logs, in a directory of one node, one job or several jobs.

    Args:
        directory: the directory of a node's logs, of a job's, or of several jobs'.
        job: the job to choose of several; None: there is only one. A job's own directory has its
            name, whatever is chosen.

    Raises:
        UserError: there is no such log, or there are several jobs and none is chosen.
    """
    directory = directory.absolute()
    if not directory.is_dir():
        what = "is no directory" if directory.exists() else "does not exist"
        raise UserError(f"{directory} {what}; give the directory of a job's logs, DIR/JOB")
    if (directory / EVENTS_FILE).is_file():
        return directory.parent.name, [_log_file(directory / EVENTS_FILE)]
    try:
        node_logs = sorted(directory.glob(f"*/{EVENTS_FILE}"))
        below: dict[str, list[Path]] = {}
        for path in sorted(directory.glob(f"*/*/{EVENTS_FILE}")):
            below.setdefault(path.parent.parent.name, []).append(path)
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror}") from None
    if job is not None and job in below:
        return job, list(map(_log_file, below[job]))
    if node_logs:
        return directory.name, list(map(_log_file, node_logs))
    names = list_text(below, NAMES_SHOWN)
    if job is not None and below:
        raise UserError(f"{directory} has no logs of job {job!r}, only those of: {names}")
    if len(below) == 1:
        [(name, paths)] = below.items()
        return name, list(map(_log_file, paths))
    if below:
        raise UserError(f"{directory} has the logs of several jobs: choose by --job one of {names}")
    raise UserError(
        f"{directory} has no event log ({EVENTS_FILE}); give the directory of a job's logs, which "
        "is DIR/JOB with --log-dir DIR, that of one node below it, or DIR"
    )


def _log_file(path: Path) -> LogFile:
    return LogFile(path.parent.name, path)


def read_run(job: str, files: Sequence[LogFile], *, running: bool = False) -> RunSummary:
    """Returns what the logs say of the last run of a job.

    Args:
        job: the job's name.
        files: the logs of its nodes.
        running: whether the job was running when its agents were asked.

    Raises:
        UserError: a log cannot be read, or none holds an event.
    """
    lives: list[AgentLife] = []
    logs: list[NodeLog] = []
    for file in files:
        try:
            size = sum(path.stat().st_size for path in _parts(file))
            every = stride(size, WHOLE_BYTES // len(files))
            lives += digest(file.node, parsed(sampled(_lines(file), every)), every)
        except OSError as error:
            raise UserError(f"{file.path} cannot be read: {error.strerror}") from None
        logs.append(NodeLog(node=file.node, bytes=size, cut_bytes=file.cut_bytes, every=every))
    run = last_run(lives)
    if run is None:
        place = files[0].path if len(files) == 1 else f"the {len(files)} logs of job {job}"
        raise UserError(f"{place}: there is no event in it yet; wait until an agent has started")
    return summarize_run(job, run, logs, running=running)


def _lines(file: LogFile) -> Iterator[bytes]:
    for path in _parts(file):
        with path.open("rb") as log:
            yield from log


def _parts(file: LogFile) -> list[Path]:
    """Returns the files of a log, the older part first."""
    older = older_part(file.path)
    return [older, file.path] if older.exists() else [file.path]
