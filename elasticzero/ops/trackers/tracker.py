"""Defines what an experiment tracker is to the process that writes to it, and opens one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

from elasticzero.launcher.options.trackers import TrackerTarget
from elasticzero.ops.trackers.averages import Row

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
        """Ends the work of this process.

        Args:
            outcome: outcome of the whole job; None: the job goes on.
        """


def open_tracker(target: TrackerTarget, job: str, *, begins: bool) -> Tracker:
    """Opens the newest run of a job, or a new one.

    Args:
        target: the kind of tracker, and its place.
        job: the job's name.
        begins: whether the job begins anew, from its first step, so that it has a new run, unless
            the newest one holds nothing yet.
    """
    module = import_module(f"elasticzero.ops.trackers.{target.kind}_run")
    opened: Tracker = getattr(module, f"open_{target.kind}_run")(target.place, job, begins=begins)
    return opened
