"""Accounts for the wall time of a job: each second belongs to exactly one class.

Pure: every time comes in as an argument, in seconds of one clock.

Classes of the time, as one member of the job sees it; the first rule that applies counts:
 G1  Between two ends of steps of one generation, or from the restored state to its first step: the
     time for which the step waited for its batch is `data_wait`. The time for which training
     waited for a copy of its state is `snapshot`, or `checkpoint` if the copy becomes one. The
     rest is `productive`. It becomes `wasted` when a later generation does the step again.
 G2  From the last step of a generation until its round opens: `detect`. The part of a step that
     was lost in flight is in it, because no clock shows when the fault struck.
 G3  From there, or from the begin of the first agent, until workers start: `idle` while fewer than
     MIN nodes are registered; `parked` while enough are registered, but fewer than MIN may take
     part, as some are drained or set aside; otherwise `regroup`.
 G4  From the start of workers until their state is in place: `connect` and `restore` for as long
     as the worker measured; the rest is `startup`. A generation that fails before that has only
     `startup`.
 G5  After the last step of a job that ends: `checkpoint` for as long as the last save took; the
     rest is `productive`.
 G6  A script that makes no visible steps is `productive` from the start of its workers.
 G7  Time that no living agent saw, as when all nodes were lost: `productive` for the steps that
     were saved, at the mean of the last steps; the rest is `idle`.
Invariant: the seconds of all classes add up to the time since the job began.

The time of steps is kept in groups, which are the larger the longer ago the steps were. Of a group
that is done again in part, each step has the same share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from elasticzero.serialization import OMIT_DEFAULT, decode

TimeClass = Literal[
    "productive",
    "startup",
    "data_wait",
    "snapshot",
    "checkpoint",
    "wasted",
    "detect",
    "regroup",
    "connect",
    "restore",
    "idle",
    "parked",
]
TIME_CLASSES: tuple[TimeClass, ...] = get_args(TimeClass)
Waiting = Literal["idle", "parked", "regroup"]
"""Classes of the time in which no workers run: G3."""
Stall = Literal["snapshot", "checkpoint"]
GROUPS = 16
"""Maximum number of groups of steps in a `TimeSpent`; twice as many while steps are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """Says where the time of a job has gone, up to a moment; each `World` holds it."""

    until: float
    """Unix time of that moment, by the clock of the node that wrote it."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by class of time; a class that is not named has none."""
    steps: tuple[tuple[int, float], ...] = ()
    """Groups of steps, oldest first: the last step of each, and the productive seconds of its
    steps, which begin after the group before. The first group is empty."""
    returns: int = field(default=0, metadata=OMIT_DEFAULT)
    """Number of times that training went back to an earlier step."""

    @property
    def running_since(self) -> float:
        """Returns the Unix time at which the job would have begun, had it never waited for
        nodes."""
        waited_s = sum(self.seconds.get(kind, 0.0) for kind in ("idle", "parked"))
        return self.until - sum(self.seconds.values()) + waited_s

    def redone_from(self, step: int) -> TimeSpent:
        """Returns this with the time of the steps after `step` as `wasted`."""
        kept, wasted_s = _split_at(self.steps, step)
        seconds = dict(self.seconds)
        if wasted_s:
            seconds["productive"] = seconds.get("productive", 0.0) - wasted_s
            seconds["wasted"] = seconds.get("wasted", 0.0) + wasted_s
        returns = self.returns + (wasted_s > 0)
        return TimeSpent(until=self.until, seconds=seconds, steps=kept, returns=returns)

    def unseen(self, until: float, step: int) -> TimeSpent:
        """Returns this with the time up to `until`, of which no living agent saw anything: G7.

        Args:
            until: Unix time at which that time ends.
            step: Last step of the state that is left.
        """
        gap_s = max(0.0, until - self.until)
        (first, _), (last, _) = (self.steps[0], self.steps[-1]) if self.steps else ((0, 0), (0, 0))
        mean_s = sum(seconds for _, seconds in self.steps) / (last - first) if last > first else 0.0
        productive_s = min(gap_s, max(0, step - last) * mean_s)
        seconds = dict(self.seconds)
        seconds["productive"] = seconds.get("productive", 0.0) + productive_s
        seconds["idle"] = seconds.get("idle", 0.0) + gap_s - productive_s
        steps = (*self.steps, (step, productive_s)) if step > last else self.steps
        return replace(self, until=max(until, self.until), seconds=seconds, steps=steps)


def goodput(seconds: Mapping[str, float]) -> float | None:
    """Returns the productive share of a job's time; None before its first step."""
    productive_s = seconds.get("productive", 0.0)
    return productive_s / sum(seconds.values()) if productive_s > 0 else None


def _split_at(
    groups: Sequence[tuple[int, float]], step: int
) -> tuple[tuple[tuple[int, float], ...], float]:
    """Returns the groups of steps up to `step`, and the seconds of the steps after it."""
    kept: list[tuple[int, float]] = []
    after_s = 0.0
    before = groups[0][0] if groups else 0
    for last, seconds in groups:
        count = last - before
        share = min(count, max(0, last - step)) / count if count else 0.0
        after_s += share * seconds
        if last <= step:
            kept.append((last, seconds))
        elif not kept or kept[-1][0] < step:
            kept.append((step, (1 - share) * seconds))
        before = last
    return tuple(kept), after_s


def _joined(groups: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Returns the groups of steps with pairs of older ones joined until at most `most` are left."""
    first, *rest = groups
    while len(rest) >= most:
        half = len(rest) // 2 & ~1
        older = zip(rest[0:half:2], rest[1:half:2], strict=True)
        rest = [(last, a + b) for (_, a), (last, b) in older] + rest[half:]
    return [first, *rest]


class TimeAccount:
    """Sorts the time of a job into classes while an agent sees it pass."""

    def __init__(self, now_s: float, before: TimeSpent | None = None) -> None:
        """Begins to account, when no workers run.

        Args:
            now_s: Present time, on the clock of all later calls.
            before: Where the time before has gone; None: there was none.
        """
        self._settled = dict(before.seconds) if before is not None else {}
        self._steps = list(before.steps) if before is not None else []
        self._returns = before.returns if before is not None else 0
        self._open: list[tuple[float, TimeClass]] = [(now_s, "regroup")]
        """Classes of the time that may still become another one, each with its beginning."""
        self._stalls: dict[Stall, float] = {}
        """Seconds for which training has waited since the last step."""
        self._save_s = 0.0
        """Seconds that a save took which has ended since the last step."""
        self._trains = self._ends = False
        """True from the restored state, and from the round that ends the generation, until the
        workers of another one start."""

    @property
    def trains(self) -> bool:
        """Returns whether the workers of this node train."""
        return self._trains

    def waits(self, why: Waiting, now_s: float) -> None:
        """Notes why no workers run, while no generation is there or a round is open."""
        if self._open[-1][1] != why:
            self._open.append((max(now_s, self._open[-1][0]), why))

    def started(self, now_s: float) -> None:
        """Notes that the workers of a generation start."""
        self._settle(now_s)
        self._open = [(now_s, "startup")]

    def plain(self) -> None:
        """Notes that the script of the workers that run makes no visible steps."""
        if not self._trains and self._open[-1][1] == "startup":
            self._open[-1] = (self._open[-1][0], "productive")

    def restored(self, now_s: float, connect_s: float, restore_s: float) -> None:
        """Notes that the state of the workers is in place.

        Args:
            now_s: Present time.
            connect_s: Seconds that the workers took to connect.
            restore_s: Seconds that they took to load the state.
        """
        if self._trains or self._open[-1][1] not in ("startup", "productive"):
            return
        total_s = max(0.0, now_s - self._open[0][0])
        connect_s = min(connect_s, total_s)
        restore_s = min(restore_s, total_s - connect_s)
        self._add("connect", connect_s)
        self._add("restore", restore_s)
        self._add("startup", total_s - connect_s - restore_s)
        self._open = [(max(now_s, self._open[0][0]), "productive")]
        self._stalls, self._trains = {}, True

    def stalled(self, kind: Stall, seconds: float) -> None:
        """Notes that training has waited for a copy of its state."""
        self._stalls[kind] = self._stalls.get(kind, 0.0) + seconds

    def stepped(self, step: int, at_s: float, data_wait_s: float) -> None:
        """Notes the end of a step.

        Args:
            step: The step.
            at_s: Time of its end, which may be before times that were noted already.
            data_wait_s: Seconds of it in which workers waited for data.
        """
        if not self._trains:
            return
        began_s = self._open[0][0]
        at_s = max(at_s, began_s)
        rest_s = at_s - began_s
        for kind, seconds in (("data_wait", data_wait_s), *self._stalls.items()):
            part_s = min(seconds, rest_s)
            self._add(kind, part_s)
            rest_s -= part_s
        self._add("productive", rest_s)
        self._steps = self._steps or [(step - 1, 0.0)]
        self._steps.append((step, rest_s))
        if len(self._steps) > 2 * GROUPS:
            self._steps = _joined(self._steps, GROUPS)
        self._stalls, self._save_s = {}, 0.0
        later = [(since_s, kind) for since_s, kind in self._open[1:] if since_s > at_s]
        follows: TimeClass = "regroup" if self._ends else "productive"
        self._open = [(at_s, "detect" if later else follows), *later]

    def round_opened(self, now_s: float) -> None:
        """Notes that the generation ends."""
        if self._trains:
            self._open[0] = (self._open[0][0], "detect")
        self._open.append((max(now_s, self._open[-1][0]), "regroup"))
        self._ends = True

    def saved(self, seconds: float) -> None:
        """Notes that a save has ended which took so long."""
        self._save_s = seconds

    def ended(self, now_s: float) -> None:
        """Notes that the job has ended well."""
        if self._trains and not self._ends:
            self.stalled("checkpoint", self._save_s)
        self._settle(now_s)
        self._open = [(now_s, "regroup")]

    def seconds(self, now_s: float) -> dict[str, float]:
        """Returns the seconds of each class up to now."""
        totals = dict(self._settled)
        for kind, seconds in self._pending(now_s).items():
            totals[kind] = totals.get(kind, 0.0) + seconds
        return totals

    def spent(self, now_s: float, until: float, resume_step: int) -> TimeSpent:
        """Returns where the time has gone, for the world that follows.

        Args:
            now_s: Present time.
            until: The same as Unix time.
            resume_step: Step that the following generation begins from.
        """
        seconds = {kind: round(s, 6) for kind, s in self.seconds(now_s).items() if s > 0}
        groups = _joined(self._steps, GROUPS) if self._steps else []
        steps = tuple((step, round(s, 6)) for step, s in groups)
        spent = TimeSpent(until=until, seconds=seconds, steps=steps, returns=self._returns)
        return spent.redone_from(resume_step)

    def _pending(self, now_s: float) -> dict[str, float]:
        """Returns the seconds of the classes that are not settled."""
        totals: dict[str, float] = {}
        ends = [*self._open[1:], (max(now_s, self._open[-1][0]), "regroup")]
        for (since_s, kind), (end_s, _) in zip(self._open, ends, strict=True):
            totals[kind] = totals.get(kind, 0.0) + end_s - since_s
        first = self._open[0][1]
        for stall, seconds in self._stalls.items() if self._trains else ():
            part_s = min(seconds, totals[first])
            totals[first] -= part_s
            totals[stall] = totals.get(stall, 0.0) + part_s
        return totals

    def _settle(self, now_s: float) -> None:
        for kind, seconds in self._pending(now_s).items():
            self._add(kind, seconds)
        self._stalls = {}
        self._trains = self._ends = False

    def _add(self, kind: str, seconds: float) -> None:
        self._settled[kind] = self._settled.get(kind, 0.0) + seconds


def replayed(events: Iterable[Mapping[str, Any]]) -> TimeAccount | None:
    """Returns the account that an agent's event log gives; None if it names no beginning.

    The times of the account are the log's, in Unix time.
    """
    account: TimeAccount | None = None
    for event in events:
        account = followed(account, event)
    return account


def followed(account: TimeAccount | None, event: Mapping[str, Any]) -> TimeAccount | None:
    """Returns the account of an event log after one more event of it; None: it has no beginning
    yet."""
    at_s = event["time"]
    if event["event"] == "registered":
        return TimeAccount(at_s)
    goes_on = account is not None and account.trains and event.get("tier") == "live"
    if event["event"] == "world" and event.get("time_spent") is not None and not goes_on:
        return TimeAccount(at_s, decode(TimeSpent, event["time_spent"], "time_spent"))
    if account is not None:
        _take(account, event, at_s)
    return account


def _take(account: TimeAccount, event: Mapping[str, Any], at_s: float) -> None:
    match event["event"]:
        case "waiting":
            account.waits(event["why"], at_s)
        case "start":
            account.started(at_s)
        case "plain":
            account.plain()
        case "restored":
            account.restored(at_s, event["connect_s"], event["restore_s"])
        case "captured" if event["local_rank"] == 0:
            account.stalled(stall_of(event["checkpoint"] or event["direct"]), event["seconds"])
        case "step":
            account.stepped(event["step"], at_s, event["data_wait_s"])
        case "round":
            account.round_opened(at_s)
        case "saved" if event["error"] is None:
            account.saved(event["seconds"])
        case "exit" if event["outcome"] == "finished":
            account.ended(at_s)
        case _:
            pass


def stall_of(checkpoint: bool) -> Stall:
    """Returns the class of a wait for a copy of the state."""
    return "checkpoint" if checkpoint else "snapshot"
