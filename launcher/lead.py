"""The acting leader's rules: see `decide`.

Pure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from elasticzero.channel import FLAG_GROW, Resume
from elasticzero.errors import ExitCode
from elasticzero.launcher.actions import (
    Ask,
    Decision,
    Leave,
    RaiseAlarm,
    SaveHeld,
    WriteDone,
    WriteWorld,
    wait,
)
from elasticzero.launcher.view import Limits, View
from elasticzero.launcher.world import (
    Alarm,
    Done,
    Failure,
    Member,
    Report,
    World,
    choose_resume,
    line_up,
    lost_snapshot,
    root_cause,
)

NAMES_SHOWN = 8
MOST_PAUSE_S = 10.0
PROOF_OF_LIFE_S = 30.0
"""So long a finished step speaks for a member whose registration is gone: it may fall silent too,
and no later lapse would tell of that."""
STORAGE_PATIENCE_S = 10.0
"""Storage that has not said by then what it holds is done without, where memory has a snapshot."""
SAVE_AFTER_ALIVE = 2
"""A round that lasts so many times the time to answer is one in which nobody goes on."""
GONE_AT_ONCE = 100
"""So many registrations can end in the transaction that writes a world; others lapse."""


def is_leader(view: View) -> bool:
    """Whether this agent acts for the job: the first member of `world` that is alive.

    In a round those live that answered, as long as their registration stands; at other times those
    that are registered.
    """
    world = view.world
    if world is None:
        return view.oldest
    answers = _answers(view) if view.round_s is not None else None
    for member in world.members:
        if member.node == view.me.node:
            return True
        present = view.members is None or member.node not in view.missing_since_s
        if present and (answers is None or member.node in answers):
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
        for node, report in (view.reports or {}).items()
        if report.phase in ("alive", "stopped") and report.incarnation == incarnations.get(node)
    }


def first_world(view: View, now_s: float, limits: Limits) -> Decision:
    if view.leaving:
        return Decision((Leave(ExitCode.LEFT),), "leaving before the job began")
    if now_s - view.began_s >= limits.join_timeout_s:
        count = "" if view.members is None else f"; {len(view.members)} here"
        reason = (
            f"error: fewer than {limits.min_nodes} nodes came together within "
            f"{limits.join_timeout_s:g} s (--join-timeout){count}"
        )
        return Decision((Leave(ExitCode.UNAVAILABLE),), reason)
    if not is_leader(view) or view.members is None:
        return wait("waiting for the oldest node to write the first world")
    here = len(view.members)
    if here < limits.min_nodes:
        return wait(f"{here} of at least {limits.min_nodes} nodes are here")
    settling_s = view.last_join_s + limits.settle_s - now_s
    if here < limits.max_nodes and settling_s > 0:
        return wait(f"{here} nodes are here; waiting {limits.settle_s:g} s for more")
    if view.storage_pending is not None:
        return wait(view.storage_pending)
    members = line_up(None, list(view.members.values()), (), limits.max_nodes)
    resume = choose_resume(None, {}, view.storage_step)
    if (refused := _refused(view, resume, limits)) is not None:
        return refused
    first = World(
        generation=1,
        token=view.token,
        members=members,
        strategy=limits.strategy,
        resume=resume,
        reason=f"{len(members)} node{'s' * (len(members) > 1)} came together"
        + _passed_over(view, resume),
        bad_steps=view.bad_steps,
    )
    return Decision((WriteWorld(first),), first.reason)


def take_over(view: View, world: World, now_s: float, limits: Limits) -> Decision:
    """A spare's part: nothing, unless the whole world is gone."""
    gone = view.members is not None and all(
        member.node in view.missing_since_s
        and _lapsed(view, view.missing_since_s[member.node], now_s, limits)
        for member in world.members
    )
    if not gone or not view.oldest or view.members is None:
        return wait(f"waiting for a place in the generation after {world.generation}")
    if now_s - max(view.missing_since_s.values()) < limits.lease_ttl_s:
        return wait(
            f"nobody of generation {world.generation} is registered; waiting a TTL for them"
        )
    members = line_up(None, list(view.members.values()), (), limits.max_nodes)
    if len(members) < limits.min_nodes:
        return wait(f"{len(members)} of at least {limits.min_nodes} nodes are here")
    if view.storage_pending is not None:
        return wait(view.storage_pending)
    resume = choose_resume(world, {}, view.storage_step)
    if (refused := _refused(view, resume, limits)) is not None:
        return refused
    following = World(
        generation=world.generation + 1,
        token=view.token,
        members=members,
        strategy=world.strategy,
        resume=resume,
        reason=f"all nodes of generation {world.generation} are gone; {_names(members)} came"
        + _passed_over(view, resume),
        fruitless=world.fruitless,
        bad_steps=view.bad_steps,
    )
    return Decision((WriteWorld(following),), following.reason)


def _names(members: tuple[Member, ...]) -> str:
    return ", ".join(member.node for member in members[:NAMES_SHOWN])


def lead(view: View, world: World, now_s: float, limits: Limits) -> Decision | None:
    """What the leader does while no round is open; None: nothing."""
    if view.reports is None:
        return None
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
    training = (view.workers.restored or view.workers.plain) and not view.workers.finished
    if spare and room > 0 and training and now_s - view.last_join_s >= limits.grow_settle_s:
        return ask(view, FLAG_GROW, "grow", f"{', '.join(spare[:room])} joins")
    return None


def _lapsed(view: View, since_s: float, now_s: float, limits: Limits) -> bool:
    """Whether a missing registration means a missing node: see the rules of liveness."""
    health = view.store
    own_lease_is_fresh = now_s - health.confirmed_s <= limits.lease_ttl_s / 2
    store_is_well = health.reachable and now_s - health.well_since_s >= limits.lease_ttl_s
    stepped_s = view.workers.stepped_s
    proven_alive = stepped_s >= since_s and now_s - stepped_s < PROOF_OF_LIFE_S
    return own_lease_is_fresh and store_is_well and not proven_alive


def ask(view: View, flags: int, kind: Literal["leave", "grow"], reason: str) -> Decision:
    """A graceful change: by the control word where the workers have one, else by the alarm."""
    workers = view.workers
    if workers.asked & flags == flags:
        return wait(f"{reason}: waiting for the next boundary")
    if workers.attached:
        return Decision((Ask(flags),), reason)
    if workers.running == 0:
        return wait(f"{reason}: the workers are starting")
    alarm = Alarm(node=view.me.node, kind=kind, reason=reason)
    return Decision((RaiseAlarm(alarm),), reason)


def conclude(view: View, world: World, now_s: float, limits: Limits) -> Decision:
    """The acting leader's part of a round."""
    opened_s = max(view.round_s or now_s, view.store.well_since_s)
    fresh = now_s - opened_s < limits.lease_ttl_s
    answers = _answers(view)
    answered = [m for m in world.members if m.node in answers and (fresh or _registered(view, m))]
    silent = [m.node for m in world.members if m not in answered]
    asked_s = None if view.alarm_s is None else max(view.alarm_s, view.store.well_since_s)
    if silent and (asked_s is None or now_s - asked_s < limits.alive_s):
        return wait(f"waiting for an answer of {', '.join(silent[:NAMES_SHOWN])}")
    late = [m.node for m in answered if answers[m.node].phase != "stopped"]
    if late and now_s - opened_s < limits.stop_s + limits.save_s:
        return wait(f"waiting for the workers of {', '.join(late[:NAMES_SHOWN])} to stop")
    reports = {m.node: answers[m.node] for m in answered if m.node not in late}
    cause = root_cause(reports)
    resume = choose_resume(world, reports, view.storage_step)
    do_without = resume.tier == "ram" and now_s - opened_s >= STORAGE_PATIENCE_S
    if view.storage_pending is not None and not do_without:
        return wait(view.storage_pending)
    if (refused := _refused(view, resume, limits)) is not None:
        return refused
    fruitless = _fruitless(world, resume.step, cause, silent)
    if cause is not None and (cause[1].final or fruitless > limits.max_restarts):
        node, failure = cause
        again = "" if failure.final else f" {fruitless} times in a row without progress"
        reason = f"rank {failure.rank} on {node} failed{again}: {failure.message}"
        done = Done(outcome="failed", step=resume.step, reason=reason, failure=failure)
        return Decision((WriteDone(done),), reason)
    pause_s = min(MOST_PAUSE_S, 0.25 * 2**fruitless) if fruitless > 1 else 0.0
    if now_s - opened_s < pause_s:
        return wait(f"failed {fruitless} times without progress; pausing for {pause_s:g} s")
    staying = [
        replace(m, store_port=reports[m.node].store_port)
        for m in answered
        if m.node in reports and not reports[m.node].leaving
    ]
    taken = {m.node for m in staying}
    registered = (view.members or {}).values()
    joiners = [m for m in registered if m.node not in taken and not world.names(m)]
    members = line_up(world, joiners, staying, limits.max_nodes)
    if len(members) < limits.min_nodes:
        return wait(f"{len(members)} of at least {limits.min_nodes} nodes are left; state is kept")
    reason = _why(view, world, members, silent, cause)
    if cause is None or cause[1].bad_step is None:
        reason += _passed_over(view, resume)
    reason += lost_snapshot(world, reports, resume)
    following = World(
        generation=world.generation + 1,
        token=view.token,
        members=members,
        strategy=world.strategy,
        resume=resume,
        reason=reason,
        fruitless=fruitless,
        bad_steps=view.bad_steps,
    )
    return Decision((WriteWorld(following, _gone(view, world, members)),), reason)


def others_may_save(view: View, now_s: float, limits: Limits) -> bool:
    """Whether a node that leaves nobody behind must wait: what it holds may be part of a snapshot
    that becomes whole once others have stopped too."""
    waited_s = now_s - (view.round_s or now_s)
    if not view.can_save or waited_s >= limits.stop_s + limits.save_s:
        return False
    return view.reports is None or any(r.phase != "stopped" for r in _answers(view).values())


def save_held(view: View, world: World, now_s: float, limits: Limits) -> Decision | None:
    """What this node does of the newest whole snapshot in memory becoming a checkpoint, when a
    round lasts because nobody can go on; None: nothing.

    Of several that hold a shard the first in the world's order writes it.
    """
    if not view.can_save or now_s - (view.round_s or now_s) < SAVE_AFTER_ALIVE * limits.alive_s:
        return None
    reports = {n: r for n, r in _answers(view).items() if r.phase == "stopped"}
    resume = choose_resume(world, reports, view.storage_step)
    if resume.tier != "ram" or resume.step <= (view.storage_step or 0):
        return None
    order = {member.node: index for index, member in enumerate(world.members)}
    writers: dict[int, str] = {}
    for source in sorted(resume.sources, key=lambda source: order[source.node]):
        writers.setdefault(source.rank, source.node)
    mine = tuple(rank for rank, node in writers.items() if node == view.me.node)
    reason = f"nobody can go on: saving step {resume.step} from memory"
    if view.saved_held == (resume.generation, resume.step) or not mine:
        return wait(reason) if view.saving else None
    action = SaveHeld(resume.generation, resume.step, len(writers), mine)
    return Decision((action,), reason)


def _refused(view: View, resume: Resume, limits: Limits) -> Decision | None:
    """The end of a job that would have to begin behind a damaged checkpoint, where that is not
    allowed, or where there is no good one; None: it may go on from `resume`."""
    damage = view.damage
    if damage is None or (resume.step >= damage.step and resume.tier != "fresh"):
        return None
    if resume.tier == "fresh":
        then = "no other is good; mend it, or give an empty --checkpoint-dir to begin anew"
    elif limits.strict_checkpoint:
        then = (
            f"--strict-checkpoint forbids going on from step {resume.step}; mend it, or run again "
            "with --restart and without --strict-checkpoint"
        )
    else:
        return None
    reason = f"the checkpoint of step {damage.step} is damaged: {damage.reason}; {then}"
    done = Done(outcome="failed", step=resume.step, reason=reason)
    return Decision((WriteDone(done),), reason)


def _passed_over(view: View, resume: Resume) -> str:
    """The end of a world's reason, where a damaged checkpoint is passed over."""
    damage = view.damage
    if damage is None or resume.step >= damage.step:
        return ""
    return f"; the checkpoint of step {damage.step} is damaged: {damage.reason}"


def _gone(view: View, world: World, members: tuple[Member, ...]) -> tuple[str, ...]:
    """The nodes of the former world that have no place in the next, as they were registered."""
    after = {member.node for member in members}
    left_out = [m for m in world.members if m.node not in after]
    found = [member.node for member in left_out if _registered(view, member)]
    return tuple(found[:GONE_AT_ONCE])


def _registered(view: View, member: Member) -> bool:
    found = (view.members or {}).get(member.node)
    return found is not None and found.incarnation == member.incarnation


def _fruitless(
    world: World, resume_step: int, cause: tuple[str, Failure] | None, silent: list[str]
) -> int:
    """Failures in a row without progress: a worker's own fault, or of peers that are all there."""
    if resume_step > world.resume.step:
        return 0
    own_fault = cause is not None and (cause[1].blame != "peer" or not silent)
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
