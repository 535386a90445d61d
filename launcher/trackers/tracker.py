"""Defines what an experiment tracker is to the process that writes to it, and opens one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from elasticzero.launcher.options.trackers import TrackerTarget
from elasticzero.launcher.trackers.averages import Row

NOTHING = -1
"""The last step of a run that holds none."""


class Tracker(Protocol):
    """Writes the scalars of a job to one run of a tracker."""

    where: str
    """Names the run for people."""
    last_step: int
    """The last step that the run held when it was opened, or `NOTHING`."""

    def write(self, rows: Sequence[Row]) -> None:
        """Writes steps that follow each other; raises any error of the tracker."""

    def close(self, outcome: str | None) -> None:
        """Ends the work of this process. outcome: of the whole job; None: it goes on."""


def open_tracker(target: TrackerTarget, job: str, *, begins: bool) -> Tracker:
    """Opens the newest run of a job, or a new one.

    begins: the job begins anew, from its first step, so that it has a new run, unless the newest
    one holds nothing yet.
    """
    module = import_module(f"elasticzero.launcher.trackers.{target.kind}_run")
    opened: Tracker = getattr(module, f"open_{target.kind}_run")(target.place, job, begins=begins)
    return opened


class RunRecord:
    """Keeps, in a file beside a tracker's own, which run is a job's and to which step it was
    written.

    A step is noted before it is written: a process that dies between leaves a step out, and none is
    written twice.
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
