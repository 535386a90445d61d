"""Defines the states of a worker within one generation, and every transition between them.

Pure. A worker's state has three parts, each an enum, and one table (`TRANSITIONS`) moves them:

 Stage    how far the worker has come into the generation. A plain script stays at STARTING.
 Outcome  how its training has ended, as far as it has reported that.
 Process  whether its process still works for the generation.

What a worker reports is never taken back, so every part only moves forward. An event that the table
does not list for a part leaves that part as it is; so a repeated event changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto


class Event(Enum):
    """Lists the events of a worker: it reports something, or its process exits."""

    ATTACHED = auto()
    """It has called `elasticzero.run`."""
    RESTORED = auto()
    """The worker's state is in place."""
    STOPPING = auto()
    """It has left its loop, and may write its snapshot."""
    FINISHED = auto()
    """The training is done; of a plain script: it has exited with status 0."""
    FAILED = auto()
    """It has reported an error."""
    WAITING = auto()
    """It is done with the generation, and is ready for another."""
    EXITED = auto()
    """The worker's process has exited."""


class Stage(Enum):
    STARTING = auto()
    ATTACHED = auto()
    RESTORED = auto()


class Outcome(Enum):
    OPEN = auto()
    STOPPING = auto()
    FAILED = auto()
    FAILED_STOPPING = auto()
    """It has reported an error, and has left its loop; it may write its snapshot."""
    FINISHED = auto()
    FINISHED_FAILED = auto()
    """The training is done, and the rest of the script has failed."""


class Process(Enum):
    WORKING = auto()
    WAITING = auto()
    EXITED = auto()


Part = Stage | Outcome | Process

TRANSITIONS: Mapping[tuple[Part, Event], Part] = {
    (Stage.STARTING, Event.ATTACHED): Stage.ATTACHED,
    (Stage.ATTACHED, Event.RESTORED): Stage.RESTORED,
    (Outcome.OPEN, Event.STOPPING): Outcome.STOPPING,
    (Outcome.OPEN, Event.FAILED): Outcome.FAILED,
    (Outcome.OPEN, Event.FINISHED): Outcome.FINISHED,
    (Outcome.STOPPING, Event.FAILED): Outcome.FAILED_STOPPING,
    (Outcome.FAILED, Event.STOPPING): Outcome.FAILED_STOPPING,
    (Outcome.FINISHED, Event.FAILED): Outcome.FINISHED_FAILED,
    (Process.WORKING, Event.WAITING): Process.WAITING,
    (Process.WORKING, Event.EXITED): Process.EXITED,
    (Process.WAITING, Event.EXITED): Process.EXITED,
}


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Holds the state of one worker."""

    stage: Stage = Stage.STARTING
    outcome: Outcome = Outcome.OPEN
    process: Process = Process.WORKING

    def after(self, event: Event) -> WorkerState:
        """Returns the state that `event` leads to."""
        stage = TRANSITIONS.get((self.stage, event), self.stage)
        outcome = TRANSITIONS.get((self.outcome, event), self.outcome)
        process = TRANSITIONS.get((self.process, event), self.process)
        assert isinstance(stage, Stage)
        assert isinstance(outcome, Outcome)
        assert isinstance(process, Process)
        return replace(self, stage=stage, outcome=outcome, process=process)

    @property
    def attached(self) -> bool:
        """Returns whether it has called `elasticzero.run`."""
        return self.stage is not Stage.STARTING

    @property
    def restored(self) -> bool:
        """Returns whether its training state has been loaded."""
        return self.stage is Stage.RESTORED

    @property
    def stopping(self) -> bool:
        """Returns whether it has left its loop before its training was done."""
        return self.outcome in (Outcome.STOPPING, Outcome.FAILED_STOPPING)

    @property
    def finished(self) -> bool:
        """Returns whether its training is done."""
        return self.outcome in (Outcome.FINISHED, Outcome.FINISHED_FAILED)

    @property
    def failed(self) -> bool:
        """Returns whether it has reported an error."""
        return self.outcome in (Outcome.FAILED, Outcome.FAILED_STOPPING, Outcome.FINISHED_FAILED)

    @property
    def running(self) -> bool:
        """Returns whether its process exists."""
        return self.process is not Process.EXITED

    @property
    def at_work(self) -> bool:
        """Returns whether its process works for the generation."""
        return self.process is Process.WORKING

    @property
    def ready_for_another(self) -> bool:
        """Returns whether its process waits for another generation."""
        return self.process is Process.WAITING

    @property
    def needs_signal(self) -> bool:
        """Returns whether only a signal can stop it.

        A script that has failed exits by itself, once its exit functions have run.
        """
        return self.running and not self.attached and not self.failed
