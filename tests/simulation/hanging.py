"""A model of one node's look at workers that make no step: what `ProgressMonitor` is to an agent.

What a look finds is judged by the real rules (`launcher/protocol/hang_rules.py`); that it takes
time, and what it sees of each kind of hang, is modelled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from elasticzero.ipc.messages import Located
from elasticzero.launcher.protocol.documents import Failure
from elasticzero.launcher.protocol.hang_rules import StalledWorker, blame, due_s

if TYPE_CHECKING:
    from tests.simulation.training import Worker
    from tests.simulation.worker_group import WorkerGroup

Hang = Literal["", "stopped", "locked", "loop"]
"""Why a worker is deaf: a signal stopped it, something holds Python's lock, or it is in a dead
loop, in which a thread still answers."""
ANSWER_S = 1.0
SLOW_LOOK_S = 5.0


class Hanging:
    """The progress of the workers of one node in one generation, as their agent hears of it."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self._examination: Literal["none", "open", "over"] = "none"
        self._stalled: Failure | None = None
        self._limit_s: float | None = None
        self._suspended_only = False
        self.unresponsive: set[int] = set()
        """Ranks that could not obey, as a look has found."""

    def _progress_s(self, worker: Worker) -> float:
        """When a worker last showed progress, in true time."""
        stepped_s = worker.group.stepped_s
        return worker.progress_s if stepped_s is None else max(worker.progress_s, stepped_s)

    def _expected(self) -> list[Worker]:
        due = ("connecting", "restoring", "training")
        return [w for w in self._worker_group.workers if w.phase in due and not w.finished]

    def _watched(self) -> list[Worker]:
        """Those, and the ones whose scripts are still starting."""
        return [
            *self._expected(),
            *(w for w in self._worker_group.workers if w.phase == "starting"),
        ]

    def moved(self) -> None:
        """A worker shows progress, or is at an end: what a look found is so no more."""
        if self._examination == "over":
            self._examination, self._stalled = "none", None

    def frozen_s(self, worker: Worker) -> float:
        """For so long a worker has been seen stopped by a signal."""
        if worker.hang != "stopped":
            return 0.0
        return self._worker_group.cluster.timeline.now_s - worker.hung_s

    @property
    def suspected(self) -> bool:
        """Whether a look was taken, or a worker is stopped: until then a worker that has not gone
        without a step for long looks like any other."""
        return self._examination != "none" or any(
            worker.hang for worker in self._worker_group.workers
        )

    def seen(self) -> dict[str, Any]:
        """The fields of `WorkerGroupState` that tell of progress."""
        worker_group = self._worker_group
        now_s = worker_group.cluster.timeline.now_s
        heard_s = min(now_s, worker_group.agent.deaf_until_s)
        in_loop = worker_group.group.stepped_s is not None
        expected = self._expected()
        due = [now_s - max(heard_s, self._progress_s(w)) for w in expected if not w.busy]
        longest_s = max(due, default=0.0)
        return {
            "silent_s": longest_s if in_loop else 0.0,
            "before_step_s": 0.0 if in_loop else longest_s,
            "frozen_s": max(map(self.frozen_s, self._watched()), default=0.0),
            "stopped_s": max(map(self.frozen_s, worker_group.workers), default=0.0),
            "examination": self._examination,
            "stalled": self._stalled if self._all_due(now_s) else None,
        }

    def _all_due(self, now_s: float) -> bool:
        """See `ProgressMonitor._all_due`."""
        limit_s = due_s(self._limit_s, in_loop=self._worker_group.group.stepped_s is not None)
        return all(now_s - self._progress_s(worker) >= limit_s for worker in self._expected())

    def dump_stacks(
        self, limit_s: float | None, now_s: float, suspended_s: float | None = None
    ) -> None:
        """Find out where those are that make no step."""
        cluster = self._worker_group.cluster
        expected = self._expected()
        subjects = [
            w
            for w in self._watched()
            if (w.hang == "stopped" and self.frozen_s(w) >= (suspended_s or 0.0))
            or (w in expected and not w.busy and suspended_s is None)
        ]
        self._examination, self._limit_s = "open", limit_s
        self._suspended_only = suspended_s is not None
        silent = any(w.hang == "locked" for w in subjects)
        takes_s = cluster.random.uniform(0.03, 0.4) + (ANSWER_S if silent else 0.0)
        if cluster.random.random() < 0.05:
            takes_s += SLOW_LOOK_S
        began_s = cluster.timeline.now_s
        cluster.timeline.after(takes_s, self._judge, subjects, limit_s, began_s)

    def _judge(self, subjects: list[Worker], limit_s: float | None, began_s: float) -> None:
        worker_group = self._worker_group
        if worker_group.agent.dead or worker_group.agent.worker_group is not worker_group:
            return
        now_s, in_loop = (
            worker_group.cluster.timeline.now_s,
            worker_group.group.stepped_s is not None,
        )
        self._examination = "over"
        expected, watched = self._expected(), self._watched()
        failures, guilty = [], False
        for worker in subjects:
            progress_s = self._progress_s(worker)
            if worker not in watched or progress_s > began_s:
                continue
            silence = StalledWorker(
                rank=worker.rank,
                step=worker.step if in_loop else 0,
                silent_s=now_s - progress_s,
                overdue=now_s - progress_s >= due_s(limit_s, in_loop=in_loop),
                state="T" if worker.hang == "stopped" else "S",
                located=_located(worker),
            )
            if (worker not in expected or self._suspended_only) and silence.state != "T":
                continue
            if silence.unresponsive:
                self.unresponsive.add(worker.rank)
            failure = blame(silence)
            failures.append(failure)
            if failure.blame == "hung":
                guilty = True
                worker_group.blame(failure)
        if self._suspended_only and not failures:  # it runs again
            self._examination = "none"
        all_wait = bool(failures) and len(failures) == len(expected) and not guilty
        self._stalled = failures[0] if all_wait else None
        worker_group.wake()


def _located(worker: Worker) -> Located | None:
    if worker.hang in ("stopped", "locked"):
        return None
    return Located(place="train.py:7", waits=worker.hang != "loop")
