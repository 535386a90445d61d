"""Follows the progress of a node's workers, and dumps the stacks of those past their time.

`hang_rules` decides what too long means; this module measures and collects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from elasticzero.ipc.messages import (
    Attached,
    Busy,
    Failed,
    Finished,
    Located,
    LoopExited,
    Message,
    Restored,
    Stepped,
    Stopping,
    Waiting,
)
from elasticzero.launcher.protocol.documents import Failure
from elasticzero.launcher.protocol.hang_rules import STOPPED_S, blame, due_s
from elasticzero.launcher.protocol.view import WorkerGroupState
from elasticzero.launcher.workers.stack_dump import (
    DumpTarget,
    StackDumper,
    find_py_spy,
)
from elasticzero.processes import process_state

STEPS_REMEMBERED = 20
"""The longest of so many says how long a step may take."""
FROZEN_EVERY_S = 1.0
"""Seconds between checks for workers that a signal has stopped, while none is told to stop."""


@dataclass(slots=True)
class WorkerProgress:
    """The progress of one worker."""

    rank: int
    pid: int
    log: Path
    request_location: Callable[[], None]
    """Have it asked where it is."""
    starting: bool = True
    """Its script has not called `elasticzero.run` yet; a plain one never does."""
    expected: bool = False
    """It is to train: it obeys requests, and has not said that it is at an end."""
    step: int = 0
    """The last one it finished."""
    progress_s: float = 0.0
    """When it last said something that shows progress."""
    in_loop: bool = False
    """It has made a step, and is in the loop over batches, or left it early and waits for the
    other ranks."""
    busy: bool = False
    ended: bool = False
    """Its process has ended, or waits for another generation."""
    frozen_since_s: float | None = None
    """Since when it is seen stopped by a signal."""
    frozen_s: float = 0.0
    """From the first to the last time that it was seen so."""

    @property
    def silent_since_s(self) -> float:
        """Before it has said anything: since it was stopped, the one thing that is looked for."""
        if self.starting and self.frozen_since_s is not None:
            return self.frozen_since_s
        return self.progress_s

    def update_frozen(self, now_s: float) -> None:
        """See whether a signal has stopped it."""
        if self.ended or process_state(self.pid) != "T":
            self.frozen_since_s, self.frozen_s = None, 0.0
        elif self.frozen_since_s is None:
            self.frozen_since_s = now_s
        else:
            self.frozen_s = now_s - self.frozen_since_s

    def end(self) -> None:
        """It has nothing to do with its generation any more."""
        self.ended, self.frozen_since_s, self.frozen_s = True, None, 0.0


@dataclass(slots=True)
class ProgressMonitor:
    """The progress of the workers of one node in one generation."""

    at_fault: set[int] = field(default_factory=set)
    """Ranks that a look found to blame for a hang."""
    unresponsive: set[int] = field(default_factory=set)
    """Ranks that could not obey, as a look has found."""
    _workers: dict[int, WorkerProgress] = field(default_factory=dict)
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))
    _dump: StackDumper | None = None
    _judged: bool = False
    _limit_s: float | None = None
    """Of the last look."""
    _stalled: Failure | None = None
    _frozen_checked_s: float = 0.0

    def add(self, worker: WorkerProgress) -> None:
        self._workers[worker.rank] = worker

    @property
    def examining(self) -> bool:
        """A look is under way."""
        return self._dump is not None and not self._judged

    def with_progress(self, state: WorkerGroupState, now_s: float) -> WorkerGroupState:
        """`state`, with the fields that tell of progress filled in."""
        workers = [worker for worker in self._workers.values() if worker.expected]
        alive = [worker for worker in self._workers.values() if worker.expected or worker.starting]
        due = [worker for worker in workers if not worker.busy]
        silent = [now_s - worker.progress_s for worker in due if worker.in_loop]
        before = [now_s - worker.progress_s for worker in due if not worker.in_loop]
        examination: Literal["none", "open", "over"] = "over" if self._judged else "open"
        return replace(
            state,
            silent_s=max(silent, default=0.0),
            before_step_s=max(before, default=0.0),
            frozen_s=max((worker.frozen_s for worker in alive), default=0.0),
            stopped_s=max((worker.frozen_s for worker in self._workers.values()), default=0.0),
            longest_step_s=max(self._steps_s, default=0.0),
            examination="none" if self._dump is None else examination,
            stalled=self._stalled if self._all_overdue(now_s) else None,
        )

    def _all_overdue(self, now_s: float) -> bool:
        """Returns whether each worker is past its own time: one that was busy until just now is on
        its way, and with it those that waited for it."""
        workers = [worker for worker in self._workers.values() if worker.expected]
        limits = [due_s(self._limit_s, in_loop=worker.in_loop) for worker in workers]
        return all(now_s - p.progress_s >= due for p, due in zip(workers, limits, strict=True))

    def note(self, rank: int, message: Message, now_s: float) -> None:
        """Take in what a worker said."""
        worker = self._workers[rank]
        match message:
            case Located():
                if self._dump is not None:
                    self._dump.located(rank, message)
                return
            case Stepped():
                now_s = message.at_s
                self._steps_s.append(max(0.0, now_s - worker.progress_s))
                worker.step, worker.in_loop = message.step, True
            case LoopExited(awaits=awaits):
                worker.in_loop = awaits
            case Busy():
                worker.busy = message.doing is not None
            case Attached():
                worker.starting, worker.expected = False, True
            case Finished() | Stopping() | Failed():
                worker.expected = False
            case Restored():
                pass
            case Waiting():
                worker.end()
                return
            case _:
                return
        self._moved(worker, now_s)

    def exited(self, rank: int, now_s: float) -> None:
        """Its process has ended."""
        worker = self._workers[rank]
        worker.expected = False
        worker.end()
        self._moved(worker, now_s)

    def _moved(self, worker: WorkerProgress, now_s: float) -> None:
        """It shows progress, or is at an end: what a look found is so no more."""
        worker.progress_s = max(worker.progress_s, now_s)
        if self._dump is not None:
            self._dump.moved(worker.rank)
            if self._judged:
                self._dump, self._stalled = None, None

    def dump_stacks(self, limit_s: float | None, now_s: float) -> None:
        """Find out where those are that make no step, and have their stacks dumped.

        limit_s: seconds without a step that are too many in the loop; None: none are.
        """
        targets = [
            DumpTarget(
                rank=worker.rank,
                pid=worker.pid,
                log=worker.log,
                step=worker.step,
                silent_since_s=worker.silent_since_s,
                due_s=due_s(limit_s, in_loop=worker.in_loop),
                request_location=worker.request_location,
                starting=worker.starting,
            )
            for worker in self._workers.values()
            if (worker.expected and not worker.busy)
            or ((worker.expected or worker.starting) and worker.frozen_since_s is not None)
        ]
        self._dump, self._judged = StackDumper(targets, now_s, py_spy=find_py_spy()), False
        self._limit_s = limit_s

    @property
    def stopped(self) -> set[int]:
        """Ranks that a signal has stopped: H7."""
        return {rank for rank, worker in self._workers.items() if worker.frozen_s >= STOPPED_S}

    def poll(self, now_s: float, *, ending: bool = False) -> list[Failure]:
        """Go on with a look; what it found about each worker, when it is over. Now and then see
        which workers a signal has stopped; ending: they are told to stop, so see it at once."""
        if ending or now_s - self._frozen_checked_s >= FROZEN_EVERY_S:
            self._frozen_checked_s = now_s
            for worker in self._workers.values():
                worker.update_frozen(now_s)
        if self._dump is None or self._judged or not self._dump.poll(now_s):
            return []
        self._judged = True
        stalled = self._dump.findings(now_s)
        if self._dump.targets and not stalled:
            self._dump = None  # they come on, so the next that does not is looked at again
            return []
        found = [blame(worker) for worker in stalled]
        self.unresponsive |= {worker.rank for worker in stalled if worker.unresponsive}
        self.at_fault |= {failure.rank for failure in found if failure.blame == "hung"}
        all_wait = len(found) == sum(worker.expected for worker in self._workers.values())
        found.sort(key=lambda failure: not failure.final)
        self._stalled = found[0] if found and all_wait and not self.at_fault else None
        return found

    def close(self) -> None:
        """Leave no program running."""
        if self._dump is not None:
            self._dump.close()
