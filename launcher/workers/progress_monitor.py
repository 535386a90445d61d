"""Follows the progress of a node's workers, and dumps the stacks of those past their time.

`hang_rules` decides what too long means; this module measures and collects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import (
    Attached,
    Busy,
    Finished,
    Located,
    LoopExited,
    Message,
    Restored,
    Stepped,
    Stopping,
    Switched,
    Waiting,
)
from elasticzero.launcher.protocol.documents import Failure
from elasticzero.launcher.protocol.hang_rules import (
    STOPPED_S,
    SUSPENDED,
    Suspension,
    blame,
    due_s,
    suspension_after,
)
from elasticzero.launcher.protocol.view import WorkerGroupState
from elasticzero.launcher.workers.stack_dump import (
    DumpTarget,
    StackDumper,
    find_py_spy,
)
from elasticzero.processes import cpu_time, process_state

STEPS_REMEMBERED = 20
"""Number of last steps; the longest of them determines how long a step may take."""
LOOK_EVERY_S = 0.2
"""Least seconds between looks for workers that a signal has suspended, while none is told to
stop."""


@dataclass(slots=True)
class WorkerProgress:
    """Holds the progress of one worker."""

    rank: int
    pid: int
    log: Path
    request_location: Callable[[], None]
    """Requests a report of where its main thread is."""
    starting: bool = True
    """True while its script has not called `elasticzero.run`; a plain one never does."""
    expected: bool = False
    """True while it is to train: it obeys requests, and has reported no end."""
    step: int = 0
    """Last step that it finished."""
    progress_s: float = 0.0
    """Time of its last message that shows progress."""
    in_loop: bool = False
    """True if it has made a step and is in the loop over batches, or left the loop early and waits
    for the other ranks."""
    busy: bool = False
    ended: bool = False
    """True if its process has exited, or waits for another generation."""
    suspension: Suspension | None = None
    """Set while a signal has suspended it."""

    @property
    def silent_since_s(self) -> float:
        """Returns the time since which it makes no progress.

        For a script that is starting, which reports nothing, that is since it was suspended.
        """
        if self.starting and self.suspension is not None:
            return self.suspension.since_s
        return self.progress_s

    @property
    def frozen_s(self) -> float:
        """Returns the seconds for which a signal has suspended it."""
        return self.suspension.seconds if self.suspension is not None else 0.0

    def is_examined(self, suspended_s: float | None) -> bool:
        """Returns whether an examination of workers is about this one; `suspended_s` is that of
        `DumpStacks`."""
        suspended = (self.expected or self.starting) and self.suspension is not None
        if suspended_s is not None:
            return suspended and self.frozen_s >= suspended_s
        return suspended or (self.expected and not self.busy)

    def look(self, now_s: float) -> None:
        """Looks whether a signal has suspended it."""
        if not self.ended:
            state = process_state(self.pid)
            used = cpu_time(self.pid) if state == SUSPENDED else 0
            self.suspension = suspension_after(self.suspension, state, used, now_s)

    def end(self) -> None:
        """Records that its process has exited, or waits for another generation."""
        self.ended, self.suspension = True, None


@dataclass(slots=True)
class ProgressMonitor:
    """Monitors the progress of the workers of one node in one generation."""

    at_fault: set[int] = field(default_factory=set)
    """Ranks that an examination found to blame for a hang."""
    unresponsive: set[int] = field(default_factory=set)
    """Ranks that could not obey, as an examination has found."""
    _workers: dict[int, WorkerProgress] = field(default_factory=dict)
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))
    _dump: StackDumper | None = None
    _judged: bool = False
    _limit_s: float | None = None
    """Limit for a step at the last examination, in seconds; None: no limit."""
    _suspended_only: bool = False
    """True if the last examination is of suspended workers only."""
    _stalled: Failure | None = None
    _looked_s: float = 0.0

    def add(self, worker: WorkerProgress) -> None:
        self._workers[worker.rank] = worker

    @property
    def examining(self) -> bool:
        """Returns whether an examination is under way."""
        return self._dump is not None and not self._judged

    def with_progress(self, state: WorkerGroupState, now_s: float) -> WorkerGroupState:
        """Returns `state` with the fields about progress filled in."""
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
        """Returns whether each worker is past its own time.

        A worker that was busy until just now is not, and those that waited for it soon proceed.
        """
        workers = [worker for worker in self._workers.values() if worker.expected]
        limits = [due_s(self._limit_s, in_loop=worker.in_loop) for worker in workers]
        return all(now_s - p.progress_s >= due for p, due in zip(workers, limits, strict=True))

    def note(self, rank: int, message: Message, now_s: float) -> None:
        """Records a message of a worker.

        Args:
            rank: The worker's rank.
            message: The message.
            now_s: Time at which it came.
        """
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
            case Restored() | Switched():
                pass
            case Waiting():
                worker.end()
                return
            case _:
                return
        self._moved(worker, now_s)

    def renumber(self, ranks: Mapping[int, int]) -> None:
        """Gives the workers other ranks, which they have in a generation that they have entered.

        An examination that is under way ends: it is about ranks of the generation before.

        Args:
            ranks: New rank of each worker, by its old one.
        """
        self.close()
        self._dump, self._judged, self._stalled = None, False, None
        self.at_fault, self.unresponsive = set(), set()
        workers = {ranks[worker.rank]: worker for worker in self._workers.values()}
        for rank, worker in workers.items():
            worker.rank = rank
        self._workers = workers

    def exited(self, rank: int, now_s: float) -> None:
        """Records that a worker's process has exited."""
        worker = self._workers[rank]
        worker.expected = False
        worker.end()
        self._moved(worker, now_s)

    def _moved(self, worker: WorkerProgress, now_s: float) -> None:
        """Records that a worker makes progress or has ended, which voids the findings about it."""
        worker.progress_s = max(worker.progress_s, now_s)
        if self._dump is not None:
            self._dump.moved(worker.rank)
            if self._judged:
                self._dump, self._stalled = None, None

    def dump_stacks(
        self, limit_s: float | None, now_s: float, suspended_s: float | None = None
    ) -> None:
        """Begins an examination: locates the workers that make no step, and dumps their stacks.

        Args:
            limit_s: Limit for a step in the loop, in seconds; None: no limit.
            now_s: Present time.
            suspended_s: Seconds; only workers that a signal has suspended for so long are examined.
                For these the kernel's account is enough, which is there at once. None: all are.
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
            if worker.is_examined(suspended_s)
        ]
        py_spy = None if suspended_s is not None else find_py_spy()
        self._dump, self._judged = StackDumper(targets, now_s, py_spy=py_spy), False
        self._limit_s, self._suspended_only = limit_s, suspended_s is not None

    @property
    def stopped(self) -> set[int]:
        """Returns the ranks that a signal has suspended for long enough to be killed: H7."""
        return {rank for rank, worker in self._workers.items() if worker.frozen_s >= STOPPED_S}

    def poll(self, now_s: float, *, ending: bool = False) -> list[Failure]:
        """Continues an examination; returns what it shows of each worker when it is over.

        It also looks, every `LOOK_EVERY_S`, which workers a signal has suspended.

        Args:
            now_s: Present time.
            ending: Whether the workers are told to stop, so that it looks at each call.
        """
        if ending or now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            for worker in self._workers.values():
                worker.look(now_s)
        if self._dump is None or self._judged or not self._dump.poll(now_s):
            return []
        self._judged = True
        stalled = self._dump.findings(now_s)
        if self._suspended_only:  # what runs again has passed no limit
            stalled = [worker for worker in stalled if worker.state == SUSPENDED]
        if not stalled and (self._dump.targets or self._suspended_only):
            self._dump = None  # all make progress again, so the next that does not is examined anew
            return []
        failures = [blame(worker) for worker in stalled]
        self.unresponsive |= {worker.rank for worker in stalled if worker.unresponsive}
        self.at_fault |= {failure.rank for failure in failures if failure.blame == "hung"}
        all_wait = len(failures) == sum(worker.expected for worker in self._workers.values())
        failures.sort(key=lambda failure: not failure.final)
        self._stalled = failures[0] if failures and all_wait and not self.at_fault else None
        return failures

    def close(self) -> None:
        """Ends the programs that still dump stacks."""
        if self._dump is not None:
            self._dump.close()
