"""Decides when workers count as hung, and which of them is to blame.

Pure. Rules:
 H1  In the loop over batches, a step is due within --hang-timeout after the last one; with `auto`
     within STEPS_LONG times the longest of the last steps, but not before FLOOR_S.
 H2  Before the first step of a generation, and outside the loop, FIRST_STEP_S are allowed. A worker
     that left its loop before the end, and waits for the other ranks to do so, is due as in H1.
 H3  In a `session.busy(…)` section no step is due.
 H4  A process that a signal has suspended is past its time after --hang-timeout; with `auto` after
     SUSPENDED_S, however long steps are. This holds whatever it was doing, until its training is
     over; also in a busy section, while its script starts, and for a plain script. A process counts
     as suspended while each look finds it so and its CPU time stands still. A debugger suspends by
     other means, and a process that waits, sleeps or swaps is not suspended: H1 to H3 hold for
     these.
 H5  A suspended worker is to blame. So is one past its time that does not answer, or that is in its
     own code. One that is in a collective, or uses a GPU, is not: it may wait for a peer, on this
     node or another, that is busy or to blame. If every node says so of all its workers, each past
     its own time, they wait for each other. If one of them left its loop alone, that is the
     script's fault, and is final.
 H6  After the alarm of a hang every node examines its workers. A suspended worker's alarm is that
     of a failure, for nothing is in doubt. Workers that could not obey are killed at once. The
     others are told to stop, and killed HANG_STOP_S later. The same holds if a worker is to blame
     here and the alarm is of another failure.
 H7  A worker that is told to stop, for whatever reason, and that a signal has suspended for
     STOPPED_S, will not obey: it is killed then. No other worker's time to stop is shortened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from elasticzero.ipc.messages import Located
from elasticzero.launcher.protocol.documents import Alarm, Failure, Report, World
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import WorkerGroupState

SUSPENDED = "T"
"""State of a process that a signal has suspended, as in /proc/PID/stat."""
STEPS_LONG = 10.0
FLOOR_S = 60.0
FIRST_STEP_S = 1800.0
EXAMINATION_GRACE_S = 1.0
"""Seconds after an alarm of a hang in which agents examine their workers before any is stopped."""
EXAMINATION_LIMIT_S = 10.0
"""Seconds after which an examination that is not over is no longer waited for."""
HANG_STOP_S = 5.0
"""Seconds within which a worker must have left its loop, or it is killed: H6."""
STOPPED_S = 0.5
"""Seconds for which a process must be seen suspended by a signal before it is killed for that:
H7."""
SUSPENDED_S = 2.0
"""Seconds for which a process must be seen suspended by a signal before it is to blame, where
--hang-timeout is `auto`: H4."""
LOOK_S = 1.0
"""Maximum seconds that a look adds to the time for which a process has been suspended. A longer
time since the look before is one in which the agent itself did not run."""
RANKS_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Suspension:
    """Says for how long looks have found a process suspended, without one that did not: H4."""

    since_s: float
    """Time of the first of these looks."""
    looked_s: float
    """Time of the last one."""
    cpu_time: int
    """CPU time of the process at all of them, in any unit."""
    seconds: float = 0.0


def suspension_after(
    before: Suspension | None, state: str, cpu_time: int, now_s: float
) -> Suspension | None:
    """Returns the suspension of a process after a look at it; None: it is not suspended.

    Args:
        before: The suspension until then.
        state: State of the process, one letter as in /proc/PID/stat.
        cpu_time: CPU time that the process has used so far. Where it has grown, the process has run
            since the look before, as it does where a program suspends it again and again.
        now_s: Time of the look.
    """
    if state != SUSPENDED:
        return None
    if before is None or before.cpu_time != cpu_time:
        return Suspension(now_s, now_s, cpu_time)
    seconds = before.seconds + min(now_s - before.looked_s, LOOK_S)
    return Suspension(before.since_s, now_s, cpu_time, seconds)


def step_limit_s(workers: WorkerGroupState, policy: JobPolicy) -> float | None:
    """Returns the seconds without a step that are too many in the loop; None: there is no limit."""
    limit_s = policy.hang_timeout_s
    if limit_s == 0:
        return None
    return limit_s if limit_s is not None else max(FLOOR_S, STEPS_LONG * workers.longest_step_s)


def due_s(limit_s: float | None, *, in_loop: bool) -> float:
    """Returns the seconds without a step after which one worker is past its time: H1 and H2."""
    if limit_s is None:
        return inf
    return limit_s if in_loop else max(FIRST_STEP_S, limit_s)


def suspension_limit_s(policy: JobPolicy) -> float:
    """Returns the seconds for which a worker may be suspended: H4."""
    limit_s = policy.hang_timeout_s
    return SUSPENDED_S if limit_s is None else limit_s or inf


def overdue(workers: WorkerGroupState, policy: JobPolicy) -> str | None:
    """Returns why all workers should be examined: H1 and H2; None: they need not be."""
    limit_s = step_limit_s(workers, policy)
    if limit_s is None:
        return None
    if workers.silent_s >= limit_s:
        return f"no step for {limit_s:g} s"
    if workers.before_step_s >= (longer_s := due_s(limit_s, in_loop=False)):
        return f"no first step for {longer_s:g} s"
    return None


def suspended(workers: WorkerGroupState, policy: JobPolicy) -> str | None:
    """Returns why the suspended workers should be examined: H4; None: they need not be."""
    limit_s = suspension_limit_s(policy)
    if workers.frozen_s < limit_s:
        return None
    return f"a worker is stopped by a signal for {limit_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledWorker:
    """Holds what was found about a worker that makes no step."""

    rank: int
    step: int
    """Last step that it finished in this generation; 0: none."""
    silent_s: float
    overdue: bool
    """True if H1 or H2 applies to this worker."""
    state: str = ""
    """Process state, one letter as in /proc/PID/stat; `T`: suspended by a signal."""
    wait: str = ""
    """Place in the kernel where its main thread sleeps."""
    located: Located | None = None
    """Location that the worker has reported; None: it has reported none."""

    @property
    def unresponsive(self) -> bool:
        """Returns whether it could not obey if it was told to stop."""
        return self.state == SUSPENDED or self.located is None


def blame(worker: StalledWorker) -> Failure:
    """Chooses the worker that is to blame, by H5."""
    after = f"after step {worker.step}" if worker.step else "before its first step"
    located, guilty = worker.located, worker.overdue
    if worker.state == SUSPENDED:
        guilty, state = True, "it is stopped by a signal (SIGSTOP)"
    elif located is None:
        kernel = f" in {worker.wait}" if worker.wait else ""
        state = (
            f"it does not answer: something holds Python's lock, or the kernel does not let it run "
            f"(state {worker.state or '?'}{kernel})"
        )
    elif located.waits:
        guilty = False
        state = f"it seems to wait for other ranks, at {located.place}"
    else:
        state = f"it is at {located.place}"
    return Failure(
        rank=worker.rank,
        blame="hung" if guilty else "peer",
        message=f"no step for {worker.silent_s:.1f} s {after}; {state}",
        step=worker.step,
        final=not guilty and located is not None and located.left,
    )


def deadlock(me: str, reports: Sequence[Report | None]) -> Alarm | None:
    """Returns an alarm where every node reports that its workers wait for others; None: some do
    not."""
    phases = {report.phase if report is not None else None for report in reports}
    if "stalled" not in phases or phases - {"stalled", "finished"}:
        return None
    waiting = [r.failure for r in reports if r is not None and r.failure is not None]
    waiting.sort(key=lambda failure: not failure.final)
    parts = [f"rank {failure.rank}: {failure.message}" for failure in waiting[:RANKS_SHOWN]]
    omission = [f"and {len(waiting) - RANKS_SHOWN} more"] if len(waiting) > RANKS_SHOWN else []
    reason = "; ".join(["the ranks wait for each other", *parts, *omission])
    left = next((failure.rank for failure in waiting if failure.final), None)
    return Alarm(node=me, kind="hang", reason=reason, left=left)


def deadlocked(world: World, alarm: Alarm | None) -> tuple[str, Failure] | None:
    """Returns a failure in place of an alarm of a hang for which no rank is to blame; it counts."""
    if alarm is None or alarm.kind != "hang":
        return None
    index = next((i for i, m in enumerate(world.members) if m.node == alarm.node), 0)
    return alarm.node, Failure(rank=world.first_rank(index), blame="peer", message=alarm.reason)


def left_alone(world: World, alarm: Alarm | None) -> tuple[str, Failure] | None:
    """Returns the failure of a rank that left its loop alone, for which all others wait: H5."""
    if alarm is None or alarm.left is None:
        return None
    for index, member in enumerate(world.members):
        if alarm.left in world.ranks(index):
            failure = Failure(rank=alarm.left, blame="user", message=alarm.reason, final=True)
            return member.node, failure
    return None
