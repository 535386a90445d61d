"""A node that leaves, with or without a deadline: rules A8, A10 and A11 of `decide`.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elasticzero.errors import ExitCode
from elasticzero.launcher.actions import Decision, Leave, RaiseAlarm, wait
from elasticzero.launcher.lead import ask
from elasticzero.launcher.view import Limits, Notice, View
from elasticzero.launcher.world import Alarm
from elasticzero.messages import FLAG_LEAVE

MARGIN_SHARE = 0.25
"""The margin before a deadline is no more than this of the whole notice."""


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


def says(view: View) -> str:
    """`node-3 leaves: AWS spot interruption in 118 s`."""
    if view.notice is None:
        return f"{view.me.node} is leaving"
    return f"{view.me.node} leaves: {view.notice.reason}"


def leave(view: View, now_s: float, limits: Limits) -> Decision:
    """A node that leaves while no round is open."""
    reason, workers, notice = says(view), view.workers, view.notice
    if not view.store.reachable:
        if notice is not None and notice.by_s is not None and now_s >= notice.by_s:
            return Decision((Leave(ExitCode.LEFT),), f"{reason}; its time is up, etcd still away")
        return wait(f"{reason}; etcd is away, so it trains on until etcd is back")
    if now_s >= last_call_s(notice, limits) and workers.running > workers.saving:
        text = f"{reason}; no time to end the running step, so back to the newest snapshot"
        alarm = Alarm(node=view.me.node, kind="leave", reason=text)
        return Decision((RaiseAlarm(alarm),), text)
    return ask(view, FLAG_LEAVE, "leave", reason)


def stop_limit_s(view: View, told_s: float, limits: Limits) -> float:
    """How long this node's workers, told to stop at `told_s`, may take before they are killed: less
    where the node itself is about to be gone."""
    notice = view.notice
    if notice is None or notice.by_s is None:
        return limits.stop_s
    half_s = (notice.by_s - last_call_s(notice, limits)) / 2
    return min(limits.stop_s, max(limits.alive_s, notice.by_s - half_s - told_s))
