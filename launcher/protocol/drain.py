"""Decides what a leaving node does, with or without a deadline: A8 and A10 to A12 of `decide`.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elasticzero.errors import ExitCode
from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.messages import FLAG_LEAVE
from elasticzero.launcher.protocol.actions import (
    Decision,
    ExitAgent,
    KillWorkers,
    RaiseAlarm,
    SaveHeldSnapshot,
    StopWorkers,
    wait,
)
from elasticzero.launcher.protocol.documents import Alarm, Report
from elasticzero.launcher.protocol.leader import request_graceful_stop
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.resume import choose_resume
from elasticzero.launcher.protocol.view import PreemptionNotice, View

MARGIN_SHARE = 0.25
"""Largest share of the whole notice that the margin before a deadline takes."""
EXIT_MARGIN_S = 2.0
"""Seconds before its deadline at which an agent exits; half of the margin if that is less."""


def merge_notices(notices: Sequence[PreemptionNotice]) -> PreemptionNotice | None:
    """Returns all notices so far as one, with the reason of the first and the earliest deadline."""
    if not notices:
        return None
    first = notices[0]
    urgent = min(notices, key=_deadline_s)
    if _deadline_s(urgent) >= _deadline_s(first):
        return first
    return replace(urgent, reason=f"{first.reason}, then {urgent.reason}")


def _deadline_s(notice: PreemptionNotice) -> float:
    return float("inf") if notice.by_s is None else notice.by_s


def boundary_deadline_s(notice: PreemptionNotice | None, policy: JobPolicy) -> float:
    """Returns the time until which the node waits for a boundary; the rest is for handing over
    state."""
    if notice is None or notice.by_s is None:
        return float("inf")
    whole_s = max(0.0, notice.by_s - notice.received_s)
    return notice.by_s - min(policy.leave_margin_s, MARGIN_SHARE * whole_s)


def exit_deadline_s(notice: PreemptionNotice) -> float:
    """Returns the time at which a leaving node exits although its round has not ended.

    What the round waits for, such as storage that cannot be written or silent nodes, may take
    longer than the machine lasts.
    """
    if notice.by_s is None:
        return float("inf")
    whole_s = max(0.0, notice.by_s - notice.received_s)
    return notice.by_s - min(EXIT_MARGIN_S, MARGIN_SHARE * whole_s / 2)


def leave_reason(view: View) -> str:
    """Returns a reason such as `node-3 leaves: AWS spot interruption in 118 s`."""
    if view.notice is None:
        return f"{view.me.node} is leaving"
    return f"{view.me.node} leaves: {view.notice.reason}"


def begin_drain(view: View, now_s: float, policy: JobPolicy) -> Decision:
    """Decides for a leaving node while no round is open.

    Args:
        view: What this agent sees.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times; `leave_margin_s` sets from when on no boundary is waited for.
    """
    reason, workers, notice = leave_reason(view), view.workers, view.notice
    if not view.store.reachable:
        return wait(f"{reason}; etcd is away, so it trains on until etcd is back")
    if now_s >= boundary_deadline_s(notice, policy) and workers.running > workers.saving:
        text = f"{reason}; no time to end the running step, so back to the newest snapshot"
        alarm = Alarm(node=view.me.node, kind="leave", reason=text)
        return Decision((RaiseAlarm(alarm),), text)
    return request_graceful_stop(view, FLAG_LEAVE, "leave", reason, now_s, policy)


def must_drain_without_store(view: View, now_s: float, policy: JobPolicy) -> bool:
    """Returns whether a node's time to leave is nearly up while no other node can be reached
    through etcd: A11.

    Args:
        view: What this agent sees.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times; `leave_margin_s` sets when the time is nearly up.
    """
    return (
        view.leaving
        and not view.store.reachable
        and now_s >= boundary_deadline_s(view.notice, policy)
    )


def drain_without_store(view: View, now_s: float, policy: JobPolicy) -> Decision:
    """Stops this node's workers, saves the snapshot that it holds whole, and exits in time.

    Args:
        view: What this agent sees.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times; `stop_s` bounds how long the workers may take.
    """
    reason, workers, notice = f"{leave_reason(view)}; etcd is still away", view.workers, view.notice
    if workers.switched == "left" and not workers.running:
        return Decision((ExitAgent(ExitCode.LEFT),), "left: the others have gone on without it")
    if notice is None or notice.by_s is None or now_s >= notice.by_s:
        return Decision((ExitAgent(ExitCode.LEFT),), f"{reason}, and the time is up")
    if workers.running and workers.aborted_s is None:
        return Decision((StopWorkers(reason),), f"{reason}: stopping the workers")
    if workers.running:
        late = now_s - (workers.aborted_s or now_s) >= stop_limit_s(view, now_s, policy)
        kill = (KillWorkers(reason, spare_saving=True),) if late and not workers.killed else ()
        return Decision(kill, f"{reason}: waiting for the workers to stop")
    if workers.sealing or view.saving:
        return wait(f"{reason}: saving what memory holds")
    held = _held_alone(view)
    if held is None or view.saved_held == (held.generation, held.step):
        return Decision((ExitAgent(ExitCode.LEFT),), reason)
    if now_s < _saves_from_s(view, notice.by_s, policy):
        return wait(f"{reason}: a node before this one may save what it holds too")
    save = SaveHeldSnapshot(held.generation, held.step, 1, (0,))
    return Decision((save,), f"{reason}: saving step {held.step} from memory")


def must_exit_unrecorded(view: View, now_s: float, policy: JobPolicy) -> bool:
    """Returns whether this node has waited long enough for etcd to write that the job is done:
    A12.

    Args:
        view: What this agent sees.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times; `join_timeout_s` is how long etcd is waited for.
    """
    away_s = now_s - view.store.confirmed_s
    return view.workers.finished and not view.store.reachable and away_s >= policy.join_timeout_s


def exit_unrecorded(view: View, policy: JobPolicy) -> Decision:
    """Exits from a job whose training is over, though etcd has no record of that."""
    reason = (
        f"every worker has finished, after step {view.workers.step}, but etcd has not answered for "
        f"{policy.join_timeout_s:g} s (--join-timeout), so the job is not marked as done; the same "
        "command marks it once etcd is back, and finds the checkpoints as they are"
    )
    return Decision((ExitAgent(ExitCode.UNAVAILABLE),), reason)


def _held_alone(view: View) -> Resume | None:
    """Returns the newest snapshot that this node holds whole."""
    world, me = view.world, view.me
    if world is None or not view.can_save:
        return None
    report = Report(incarnation=me.incarnation, phase="stopped", holdings=view.holdings)
    held = choose_resume(world, {me.node: report}, None)
    whole = held.tier == "ram" and len({source.rank for source in held.sources}) == 1
    return held if whole and world.names(me) else None


def _saves_from_s(view: View, by_s: float, policy: JobPolicy) -> float:
    """Returns when this node saves a snapshot that others may hold too, without a message to them.

    Members save in their order: the first at once, the second when half of the time until `by_s` is
    over, the third after two thirds of it. A save of what storage has by then writes nothing.

    Args:
        view: What this agent sees; members without a registration are skipped in the order.
        by_s: Time at which the machine is gone, on the clock of the view's times.
        policy: Limits and times; `leave_margin_s` sets when the first member saves.
    """
    world, begins_s = view.world, boundary_deadline_s(view.notice, policy)
    before = 0
    if world is not None:
        present = [m.node for m in world.members if m.node not in view.missing_since_s]
        before = present.index(view.me.node) if view.me.node in present else 0
    return begins_s + (by_s - begins_s) * before / (before + 1)


def stop_limit_s(view: View, stop_sent_s: float, policy: JobPolicy) -> float:
    """Returns the seconds that this node's workers, told to stop at `stop_sent_s`, may take before
    they are killed.

    It is less where the node itself is about to be gone.

    Args:
        view: What this agent sees; its notice has the deadline, if there is one.
        stop_sent_s: Time at which the workers were told to stop, on the clock of the view's times.
        policy: Limits and times; the result is `stop_s` at most.
    """
    notice = view.notice
    if notice is None or notice.by_s is None:
        return policy.stop_s
    half_s = (notice.by_s - boundary_deadline_s(notice, policy)) / 2
    return min(policy.stop_s, max(policy.alive_s, notice.by_s - half_s - stop_sent_s))
