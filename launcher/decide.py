"""What the agent sees, and the time, to what it does next and one sentence why.

Pure: `decide(view, now_s, limits)` reads no clock, file or socket. The agent calls it after every
event and performs the actions; a decision is a function of what is so, not of what happened, so
being told the same thing twice changes nothing, and a restart of the loop loses nothing.

Rules of every agent, the first that applies:
 A1  `done` stands: stop the workers; exit when they are gone.
 A2  `world` gives this registration a place in a newer generation: start its workers.
 A3  `world` does not name this registration: stop the workers; if leaving, go once the others have
     their state; otherwise wait, as a spare.
 A4  a worker failed: raise the alarm.
 A5  the alarm stands: answer `alive`, and stop the workers where they are; past the deadline, kill.
 A6  the round is open and all workers have stopped: report `stopped` with what memory holds.
 A7  all workers finished: report `finished`.
 A8  leaving, or the leader of a world that shall change, with workers training: ask them to stop
     at a boundary; workers that cannot be asked are stopped by the alarm.
 A9  all workers have restored: report `restored`.
Rules of the acting leader, who is the first member of `world` that is alive (before the first
world: the oldest registration):
 L1  no world: write the first when MAX nodes are there, or MIN are and nobody came for settle_s.
 L2  everybody finished: write `done`.
 L3  a member's lease has lapsed, the store is well and no step was finished with it since: raise
     the alarm.
 L4  a round is open: once every member answered, or is silent past alive_s, and those alive have
     stopped: write the next world, or `done` where trying again is useless, or wait for MIN.
 L5  a node waits and there is room: let the world grow (by A8).
Invariant: nothing is written about a generation other than the one that `world` names, and every
write is conditioned on that document's revision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from elasticzero.channel import FLAG_GROW, FLAG_LEAVE
from elasticzero.errors import ExitCode
from elasticzero.launcher.view import Limits, View
from elasticzero.launcher.world import (
    Alarm,
    Done,
    Failure,
    Member,
    Phase,
    Report,
    World,
    choose_resume,
    line_up,
    root_cause,
)


@dataclass(frozen=True, slots=True)
class Start:
    world: World
    index: int


@dataclass(frozen=True, slots=True)
class Ask:
    flags: int


@dataclass(frozen=True, slots=True)
class StopWorkers:
    reason: str


@dataclass(frozen=True, slots=True)
class KillWorkers:
    reason: str


@dataclass(frozen=True, slots=True)
class RaiseAlarm:
    alarm: Alarm


@dataclass(frozen=True, slots=True)
class PutReport:
    report: Report


@dataclass(frozen=True, slots=True)
class WriteWorld:
    world: World
    gone: tuple[str, ...] = ()
    """Registrations that end with the former world: who lives registers anew."""


@dataclass(frozen=True, slots=True)
class WriteDone:
    done: Done


@dataclass(frozen=True, slots=True)
class Leave:
    code: ExitCode


Action = (
    Start
    | Ask
    | StopWorkers
    | KillWorkers
    | RaiseAlarm
    | PutReport
    | WriteWorld
    | WriteDone
    | Leave
)


@dataclass(frozen=True, slots=True)
class Decision:
    actions: tuple[Action, ...]
    reason: str


def wait(reason: str) -> Decision:
    return Decision((), reason)


def decide(view: View, now_s: float, limits: Limits) -> Decision:
    """The next actions of this agent, and why."""
    workers, world = view.workers, view.world
    if view.done is not None:
        return _wind_up(view, view.done)
    if world is None:
        return _before_the_first_world(view, now_s, limits)
    index = world.find(view.me.node, view.me.incarnation)
    if index is None:
        return _outside(view, world, now_s, limits)
    if workers.generation < world.generation:
        return Decision((Start(world, index),), f"generation {world.generation}: {world.reason}")
    if view.round_s is not None:
        return _round(view, world, now_s, limits)
    return _training(view, world, now_s, limits)


def is_leader(view: View) -> bool:
    """Whether this agent acts for the job: the first member of `world` that is alive."""
    if view.world is None:
        return view.oldest
    for member in view.world.members:
        if member == view.me or member.node == view.me.node:
            return True
        if view.round_s is not None:
            if member.node in _answers(view):
                return False
        elif view.members is None or member.node in view.members:
            return False
    return False


def _answers(view: View) -> dict[str, Report]:
    """The reports made in this round; those of the training before it say nothing about who
    lives."""
    world = view.world
    assert world is not None
    incarnations = {member.node: member.incarnation for member in world.members}
    return {
        node: report
        for node, report in view.reports.items()
        if report.phase in ("alive", "stopped") and report.incarnation == incarnations.get(node)
    }


def _wind_up(view: View, done: Done) -> Decision:
    workers = view.workers
    if workers.running and not workers.killed:
        return Decision((KillWorkers(f"the job is over: {done.reason}"),), "the job is over")
    if workers.running:
        return wait("the job is over: the workers are being stopped")
    code = ExitCode.FAILED if done.outcome == "failed" else ExitCode.DONE
    return Decision((Leave(code),), f"the job is {done.outcome}: {done.reason}")


def _before_the_first_world(view: View, now_s: float, limits: Limits) -> Decision:
    if view.leaving:
        return Decision((Leave(ExitCode.LEFT),), "leaving before the job began")
    if now_s - view.began_s >= limits.join_timeout_s:
        reason = f"no world came about within {limits.join_timeout_s:g} s (--join-timeout)"
        return Decision((Leave(ExitCode.UNAVAILABLE),), reason)
    if not is_leader(view) or view.members is None:
        return wait("waiting for the oldest node to write the first world")
    here = len(view.members)
    if here < limits.min_nodes:
        return wait(f"{here} of at least {limits.min_nodes} nodes are here")
    settling_s = view.last_join_s + limits.settle_s - now_s
    if here < limits.max_nodes and settling_s > 0:
        return wait(f"{here} nodes are here; waiting {limits.settle_s:g} s for more")
    members = line_up(None, list(view.members.values()), (), limits.max_nodes)
    resume = choose_resume(None, {}, view.storage_step)
    first = World(
        generation=1,
        token=view.token,
        members=members,
        strategy=limits.strategy,
        resume=resume,
        reason=f"{len(members)} node{'s' * (len(members) > 1)} came together",
    )
    return Decision((WriteWorld(first),), first.reason)


def _outside(view: View, world: World, now_s: float, limits: Limits) -> Decision:
    """This registration has no place in the world."""
    workers = view.workers
    if workers.running and not workers.killed:
        reason = f"generation {world.generation} goes on without this node"
        return Decision((KillWorkers(reason),), reason)
    if not view.leaving:
        return wait("waiting for a place in the next generation")
    needed = world.resume.tier == "ram" and any(
        source.node == view.me.node for source in world.resume.sources
    )
    unread = any(m.node not in view.reports for m in world.members)
    if needed and unread and now_s - (view.outside_s or now_s) < limits.handover_s:
        return wait("serving this node's snapshots until the others have read them")
    return Decision((Leave(ExitCode.LEFT),), "left: the others have what this node held")


def _training(view: View, world: World, now_s: float, limits: Limits) -> Decision:
    """No round is open."""
    workers = view.workers
    if workers.failed:
        reason = _first_words(workers.failure)
        alarm = Alarm(node=view.me.node, kind="failure", reason=reason)
        return Decision((RaiseAlarm(alarm),), reason)
    if workers.restored and not workers.finished and view.my_report is None:
        return _report(view, "restored", f"training, generation {world.generation}")
    if is_leader(view):
        decision = _lead(view, world, now_s, limits)
        if decision is not None:
            return decision
    if workers.finished:
        return _report(view, "finished", "every worker here has finished")
    if view.leaving:
        return _ask(view, FLAG_LEAVE, "leave", f"{view.me.node} is leaving")
    if workers.restored:
        return wait(f"training, generation {world.generation}")
    return wait(f"generation {world.generation}: the workers are starting")


def _first_words(failure: Failure | None) -> str:
    if failure is None:
        return "a worker ended"
    if failure.blame == "peer":
        return f"rank {failure.rank} lost a peer"
    return f"rank {failure.rank}: {failure.message}"


def _lead(view: View, world: World, now_s: float, limits: Limits) -> Decision | None:
    """What the leader does while no round is open; None: nothing."""
    reports = [view.reports.get(member.node) for member in world.members]
    if all(report is not None and report.phase == "finished" for report in reports):
        step = max(report.final_step or 0 for report in reports if report is not None)
        done = Done(outcome="finished", step=step, reason=f"finished after step {step}")
        return Decision((WriteDone(done),), done.reason)
    for node, since_s in view.missing_since_s.items():
        report = view.reports.get(node)
        if report is not None and report.phase == "finished":
            continue
        if _lapsed(view, since_s, now_s, limits):
            alarm = Alarm(node=view.me.node, kind="lapse", reason=f"the lease of {node} lapsed")
            return Decision((RaiseAlarm(alarm),), alarm.reason)
    spare = [m.node for m in (view.members or {}).values() if not world.names(m)]
    room = limits.max_nodes - len(world.members)
    training = view.workers.restored and not view.workers.finished
    if spare and room > 0 and training and now_s - view.last_join_s >= limits.grow_settle_s:
        return _ask(view, FLAG_GROW, "grow", f"{', '.join(spare[:room])} joins")
    return None


def _lapsed(view: View, since_s: float, now_s: float, limits: Limits) -> bool:
    """Whether a missing registration means a missing node: see the rules of liveness."""
    health = view.store
    own_lease_is_fresh = now_s - health.confirmed_s <= limits.lease_ttl_s / 2
    store_is_well = health.reachable and now_s - health.well_since_s >= limits.lease_ttl_s
    return own_lease_is_fresh and store_is_well and view.workers.stepped_s < since_s


def _ask(view: View, flag: int, kind: Literal["leave", "grow"], reason: str) -> Decision:
    """A graceful change: by the control word where the workers have one, else by the alarm."""
    workers = view.workers
    if workers.asked & flag:
        return wait(f"{reason}: waiting for the next boundary")
    if workers.attached:
        return Decision((Ask(flag),), reason)
    if workers.running == 0:
        return wait(f"{reason}: the workers are starting")
    alarm = Alarm(node=view.me.node, kind=kind, reason=reason)
    return Decision((RaiseAlarm(alarm),), reason)


def _report(view: View, phase: Phase, reason: str) -> Decision:
    report = Report(
        incarnation=view.me.incarnation,
        phase=phase,
        store_port=view.me.store_port,
        leaving=view.leaving,
        holdings=view.holdings if phase == "stopped" else (),
        failure=view.workers.failure if phase == "stopped" else None,
        final_step=view.workers.step if phase in ("finished", "stopped") else None,
    )
    return wait(reason) if view.my_report == report else Decision((PutReport(report),), reason)


def _round(view: View, world: World, now_s: float, limits: Limits) -> Decision:
    """A regroup round is open: by an alarm, or because workers left at a boundary."""
    workers, opened_s = view.workers, view.round_s or now_s
    if view.alarm is None and now_s - opened_s >= limits.alive_s:
        alarm = Alarm(node=view.me.node, kind="silence", reason="not every node has answered")
        return Decision((RaiseAlarm(alarm),), "asking who is alive")
    if workers.running:
        actions: list[Action] = []
        if view.alarm is not None and workers.aborted_s is None:
            actions.append(StopWorkers(view.alarm.reason))
        told_s = workers.aborted_s
        stuck = told_s is not None and now_s - told_s >= limits.stop_s
        if stuck and not workers.killed:
            actions.append(KillWorkers(f"not stopped within {limits.stop_s:g} s"))
        if view.alarm is not None:
            answer = _report(view, "alive", "")
            actions = [*answer.actions, *actions]
        return Decision(
            tuple(actions), f"stopping: {view.alarm.reason if view.alarm else 'boundary'}"
        )
    stopped = _report(view, "stopped", "stopped, and said what memory holds")
    if stopped.actions:
        return stopped
    if is_leader(view) and view.members is not None:
        return _conclude(view, world, now_s, limits)
    return wait("stopped; waiting for the next generation")


def _conclude(view: View, world: World, now_s: float, limits: Limits) -> Decision:
    """The acting leader's part of a round."""
    opened_s = max(view.round_s or now_s, view.store.well_since_s)
    answers = _answers(view)
    answered = [m for m in world.members if m.node in answers]
    silent = [m.node for m in world.members if m.node not in answers]
    patience_s = limits.alive_s if view.alarm is not None else 2 * limits.alive_s
    if silent and now_s - opened_s < patience_s:
        return wait(f"waiting for an answer of {', '.join(silent[:5])}")
    late = [m.node for m in answered if answers[m.node].phase != "stopped"]
    if late and now_s - opened_s < 2 * limits.stop_s:
        return wait(f"waiting for the workers of {', '.join(late[:5])} to stop")
    reports = {m.node: answers[m.node] for m in answered if m.node not in late}
    cause = root_cause(reports)
    resume = choose_resume(world, reports, view.storage_step)
    fruitless = _fruitless(world, resume.step, cause)
    if cause is not None and (cause[1].final or fruitless > limits.max_restarts):
        node, failure = cause
        again = "" if failure.final else f" {fruitless} times in a row without progress"
        reason = f"rank {failure.rank} on {node} failed{again}: {failure.message}"
        done = Done(outcome="failed", step=resume.step, reason=reason, failure=failure)
        return Decision((WriteDone(done),), reason)
    fresh = now_s - opened_s < limits.lease_ttl_s
    staying = [
        replace(m, store_port=reports[m.node].store_port)
        for m in answered
        if m.node in reports and not reports[m.node].leaving and (fresh or _registered(view, m))
    ]
    taken = {m.node for m in staying}
    registered = (view.members or {}).values()
    joiners = [m for m in registered if m.node not in taken and not world.names(m)]
    members = line_up(world, joiners, staying, limits.max_nodes)
    if len(members) < limits.min_nodes:
        return wait(f"{len(members)} of at least {limits.min_nodes} nodes are left; state is kept")
    reason = _why(view, world, members, silent, cause)
    following = World(
        generation=world.generation + 1,
        token=view.token,
        members=members,
        strategy=world.strategy,
        resume=resume,
        reason=reason,
        fruitless=fruitless,
    )
    return Decision((WriteWorld(following, _gone(view, world, members)),), reason)


def _gone(view: View, world: World, members: tuple[Member, ...]) -> tuple[str, ...]:
    """The nodes of the former world that have no place in the next, as they were registered."""
    after = {member.node for member in members}
    left_out = [m for m in world.members if m.node not in after]
    return tuple(member.node for member in left_out if _registered(view, member))


def _registered(view: View, member: Member) -> bool:
    found = (view.members or {}).get(member.node)
    return found is not None and found.incarnation == member.incarnation


def _fruitless(world: World, resume_step: int, cause: tuple[str, Failure] | None) -> int:
    if resume_step > world.resume.step:
        return 0
    own_fault = cause is not None and cause[1].blame != "peer"
    return world.fruitless + 1 if own_fault else world.fruitless


def _why(
    view: View,
    world: World,
    members: tuple[Member, ...],
    silent: list[str],
    cause: tuple[str, Failure] | None,
) -> str:
    """One sentence: what changed between the two worlds."""
    before, after = {m.node for m in world.members}, {m.node for m in members}
    parts = []
    if silent:
        parts.append(f"{', '.join(silent)} {'is' if len(silent) == 1 else 'are'} lost")
    left = [n for n in sorted(before - after) if n not in silent]
    if left:
        parts.append(f"{', '.join(left)} left")
    if after - before:
        parts.append(f"{', '.join(sorted(after - before))} joined")
    if cause is not None and cause[1].blame != "peer":
        node, failure = cause
        parts.append(f"rank {failure.rank} on {node} failed ({failure.message})")
    if not parts:
        parts.append(view.alarm.reason if view.alarm is not None else "workers stopped")
    return "; ".join(parts)
