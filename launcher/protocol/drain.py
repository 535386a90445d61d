"""A node that leaves, with or without a deadline: rules A8, A10 and A11 of `decide`.

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
    KillWorkers,
    Leave,
    RaiseAlarm,
    SaveHeld,
    StopWorkers,
    wait,
)
from elasticzero.launcher.protocol.documents import Alarm, Report
from elasticzero.launcher.protocol.leader import ask
from elasticzero.launcher.protocol.policy import Limits
from elasticzero.launcher.protocol.resume import choose_resume
from elasticzero.launcher.protocol.view import Notice, View

MARGIN_SHARE = 0.25
"""The margin before a deadline is no more than this of the whole notice."""
GOES_BEFORE_S = 2.0
"""So long before its deadline, or half of the margin, an agent ends by itself."""


def gathered(notices: Sequence[Notice]) -> Notice | None:
    """What all notices heard so far come to: the reason of the first, the earliest deadline."""
    if not notices:
        return None
    first = notices[0]
    urgent = min(notices, key=_deadline_s)
    if _deadline_s(urgent) >= _deadline_s(first):
        return first
    return replace(urgent, reason=f"{first.reason}, then {urgent.reason}")


def _deadline_s(notice: Notice) -> float:
    return float("inf") if notice.by_s is None else notice.by_s


def last_call_s(notice: Notice | None, limits: Limits) -> float:
    """Until when a boundary is waited for; what is left after that is for handing the state
    over."""
    if notice is None or notice.by_s is None:
        return float("inf")
    whole_s = max(0.0, notice.by_s - notice.heard_s)
    return notice.by_s - min(limits.leave_margin_s, MARGIN_SHARE * whole_s)


def goes_at_s(notice: Notice) -> float:
    """When a leaving node goes, though its round has not ended: what it waits for (storage that
    cannot be written, nodes that are silent) may take longer than the machine is there."""
    if notice.by_s is None:
        return float("inf")
    whole_s = max(0.0, notice.by_s - notice.heard_s)
    return notice.by_s - min(GOES_BEFORE_S, MARGIN_SHARE * whole_s / 2)


def says(view: View) -> str:
    """`node-3 leaves: AWS spot interruption in 118 s`."""
    if view.notice is None:
        return f"{view.me.node} is leaving"
    return f"{view.me.node} leaves: {view.notice.reason}"


def leave(view: View, now_s: float, limits: Limits) -> Decision:
    """A node that leaves while no round is open."""
    reason, workers, notice = says(view), view.workers, view.notice
    if not view.store.reachable:
        return wait(f"{reason}; etcd is away, so it trains on until etcd is back")
    if now_s >= last_call_s(notice, limits) and workers.running > workers.saving:
        text = f"{reason}; no time to end the running step, so back to the newest snapshot"
        alarm = Alarm(node=view.me.node, kind="leave", reason=text)
        return Decision((RaiseAlarm(alarm),), text)
    return ask(view, FLAG_LEAVE, "leave", reason)


def must_leave_alone(view: View, now_s: float, limits: Limits) -> bool:
    """Whether a node's time to leave is nearly up while etcd is away, so that no other node can be
    told: A11."""
    return view.leaving and not view.store.reachable and now_s >= last_call_s(view.notice, limits)


def leave_alone(view: View, now_s: float, limits: Limits) -> Decision:
    """Stop this node's workers, save the snapshot that it holds whole, and leave in time."""
    reason, workers, notice = f"{says(view)}; etcd is still away", view.workers, view.notice
    if notice is None or notice.by_s is None or now_s >= notice.by_s:
        return Decision((Leave(ExitCode.LEFT),), f"{reason}, and the time is up")
    if workers.running and workers.aborted_s is None:
        return Decision((StopWorkers(reason),), f"{reason}: stopping the workers")
    if workers.running:
        late = now_s - (workers.aborted_s or now_s) >= stop_limit_s(view, now_s, limits)
        kill = (KillWorkers(reason, spare_saving=True),) if late and not workers.killed else ()
        return Decision(kill, f"{reason}: waiting for the workers to stop")
    if workers.sealing or view.saving:
        return wait(f"{reason}: saving what memory holds")
    held = _held_alone(view)
    if held is None or view.saved_held == (held.generation, held.step):
        return Decision((Leave(ExitCode.LEFT),), reason)
    if now_s < _saves_from_s(view, notice.by_s, limits):
        return wait(f"{reason}: a node before this one may save what it holds too")
    save = SaveHeld(held.generation, held.step, 1, (0,))
    return Decision((save,), f"{reason}: saving step {held.step} from memory")


def must_give_up(view: View, now_s: float, limits: Limits) -> bool:
    """Whether this node has waited long enough for an etcd that is away to write that the job is
    done: A12."""
    away_s = now_s - view.store.confirmed_s
    return view.workers.finished and not view.store.reachable and away_s >= limits.join_timeout_s


def give_up(view: View, limits: Limits) -> Decision:
    """Leave a job whose training is over, with no word of it in etcd."""
    reason = (
        f"every worker has finished, after step {view.workers.step}, but etcd has not answered for "
        f"{limits.join_timeout_s:g} s (--join-timeout), so the job is not marked as done; the same "
        "command marks it once etcd is back, and finds the checkpoints as they are"
    )
    return Decision((Leave(ExitCode.UNAVAILABLE),), reason)


def _held_alone(view: View) -> Resume | None:
    """The newest snapshot that this node holds whole."""
    world, me = view.world, view.me
    if world is None or not view.can_save:
        return None
    report = Report(incarnation=me.incarnation, phase="stopped", holdings=view.holdings)
    held = choose_resume(world, {me.node: report}, None)
    whole = held.tier == "ram" and len({source.rank for source in held.sources}) == 1
    return held if whole and world.names(me) else None


def _saves_from_s(view: View, by_s: float, limits: Limits) -> float:
    """When this node is to save a snapshot that others may hold too, without a word to them.

    Members save in their order: the first at once, the second when half of the time until `by_s`
    is over, the third after two thirds of it. A save of what storage has by then writes nothing.
    """
    world, begins_s = view.world, last_call_s(view.notice, limits)
    before = 0
    if world is not None:
        here = [m.node for m in world.members if m.node not in view.missing_since_s]
        before = here.index(view.me.node) if view.me.node in here else 0
    return begins_s + (by_s - begins_s) * before / (before + 1)


def stop_limit_s(view: View, told_s: float, limits: Limits) -> float:
    """How long this node's workers, told to stop at `told_s`, may take before they are killed: less
    where the node itself is about to be gone."""
    notice = view.notice
    if notice is None or notice.by_s is None:
        return limits.stop_s
    half_s = (notice.by_s - last_call_s(notice, limits)) / 2
    return min(limits.stop_s, max(limits.alive_s, notice.by_s - half_s - told_s))
