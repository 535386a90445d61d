"""The acting leader's rules: see `decide`.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

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
from elasticzero.launcher.blame import (
    AGAIN,
    Cause,
    fruitless,
    likeness,
    set_aside,
    setbacks,
    strikes,
)
from elasticzero.launcher.ending import given_up, stop, stop_from_storage
from elasticzero.launcher.hangs import deadlock, deadlocked
from elasticzero.launcher.view import Limits, View
from elasticzero.launcher.world import (
    Alarm,
    Done,
    Member,
    Report,
    World,
    choose_resume,
    line_up,
    lost_snapshot,
    root_cause,
)
from elasticzero.messages import FLAG_GROW, FLAG_LEAVE, FLAG_STOP, Resume

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

    In a round those live that answered, as long as their registration stands; at other times, and
    to an agent that does not see the answers, those that are registered.
    """
    world = view.world
    if world is None:
        return view.oldest
    seen = view.round_s is not None and view.reports is not None
    answers = _answers(view) if seen else None
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
    if view.control.stop:
        return stop_from_storage(view)
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
        aside = set_aside(world.strikes, world.strikes, view.struck_s, now_s)
        after = f"the generation after {world.generation}"
        if view.me.node in aside:
            return wait(f"set aside, for a place in {after} later: {AGAIN}")
        return wait(f"waiting for a place in {after}")
    if now_s - max(view.missing_since_s.values()) < limits.lease_ttl_s:
        return wait(
            f"nobody of generation {world.generation} is registered; waiting a TTL for them"
        )
    if view.control.stop:
        return stop_from_storage(view)
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
        setbacks=world.setbacks,
        strikes=world.strikes,
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
    if (alarm := deadlock(view.me.node, reports)) is not None:
        return Decision((RaiseAlarm(alarm),), alarm.reason)
    for node, since_s in view.missing_since_s.items():
        report = view.reports.get(node)
        if report is not None and report.phase == "finished":
            continue
        if _lapsed(view, since_s, now_s, limits):
            alarm = Alarm(node=view.me.node, kind="lapse", reason=f"the lease of {node} lapsed")
            return Decision((RaiseAlarm(alarm),), alarm.reason)
    if view.workers.finished:
        return None
    if view.control.stop:
        return ask(view, FLAG_STOP, "stop", "an operator stops the job")
    if not (view.workers.restored or view.workers.plain):
        return None
    room = limits.max_nodes - len(world.members)
    if room < 0 and view.control.nnodes is not None:
        return ask(view, FLAG_LEAVE, "leave", f"scaled to at most {_nodes(limits.max_nodes)}")
    aside = set_aside(world.strikes, world.strikes, view.struck_s, now_s)
    registered = (view.members or {}).values()
    spare = [m.node for m in registered if not world.names(m) and m.node not in aside]
    if spare and room > 0 and now_s - view.last_join_s >= limits.grow_settle_s:
        return ask(view, FLAG_GROW, "grow", f"{', '.join(spare[:room])} joins")
    return None


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"


def _lapsed(view: View, since_s: float, now_s: float, limits: Limits) -> bool:
    """Whether a missing registration means a missing node: see the rules of liveness."""
    health = view.store
    own_lease_is_fresh = now_s - health.confirmed_s <= limits.lease_ttl_s / 2
    store_is_well = health.reachable and now_s - health.well_since_s >= limits.lease_ttl_s
    stepped_s = view.workers.stepped_s
    proven_alive = stepped_s >= since_s and now_s - stepped_s < PROOF_OF_LIFE_S
    return own_lease_is_fresh and store_is_well and not proven_alive


def ask(view: View, flags: int, kind: Literal["leave", "grow", "stop"], reason: str) -> Decision:
    """A graceful change: by the control word where the workers have one, else by the alarm."""
    workers = view.workers
    if workers.asked & flags == flags:
        return wait(f"{reason}: waiting for the next boundary")
    if workers.attached:
        return Decision((Ask(flags),), reason)
    if workers.running == 0 or not workers.plain:
        return wait(f"{reason}: the workers are starting")
    alarm = Alarm(node=view.me.node, kind=kind, reason=reason)
    return Decision((RaiseAlarm(alarm),), reason)


def conclude(view: View, world: World, now_s: float, limits: Limits) -> Decision:
    """The acting leader's part of a round."""
    opened_s = max(view.round_s or now_s, view.store.well_since_s)
    answers = _answers(view)
    answered = [m for m in world.members if m.node in answers and _lives(view, m, now_s, limits)]
    heard = {m.node for m in answered}
    silent = [m.node for m in world.members if m.node not in heard]
    asked_s = None if view.alarm_s is None else max(view.alarm_s, view.store.well_since_s)
    if silent and (asked_s is None or now_s - asked_s < limits.alive_s):
        return wait(f"waiting for an answer of {', '.join(silent[:NAMES_SHOWN])}")
    late = [m.node for m in answered if answers[m.node].phase != "stopped"]
    if late and now_s - opened_s < limits.stop_s + limits.save_s:
        return wait(f"waiting for the workers of {', '.join(late[:NAMES_SHOWN])} to stop")
    present = {m.node: answers[m.node] for m in answered}
    reports = {node: report for node, report in present.items() if node not in late}
    cause = root_cause(reports) or deadlocked(world, view.alarm)
    resume = choose_resume(world, reports, view.storage_step)
    do_without = resume.tier == "ram" and now_s - opened_s >= STORAGE_PATIENCE_S
    if view.storage_pending is not None and not do_without:
        return wait(view.storage_pending)
    if (refused := _refused(view, resume, limits)) is not None:
        return refused
    following = World(
        generation=world.generation + 1,
        token=view.token,
        members=(),
        strategy=world.strategy,
        resume=resume,
        reason="",
        fruitless=fruitless(world, resume.step, cause, present),
        bad_steps=view.bad_steps,
        setbacks=setbacks(world, resume.step, cause),
        strikes=strikes(world, reports, now_s - (view.world_s or now_s)),
    )
    if (ended := given_up(following, cause, limits)) is not None:
        return ended
    if view.control.stop:
        return stop(view, resume, now_s - opened_s, limits)
    failed = following.fruitless
    pause_s = min(MOST_PAUSE_S, 0.25 * 2**failed) if failed > 1 else 0.0
    if now_s - opened_s < pause_s:
        return wait(f"failed {failed} times without progress; pausing for {pause_s:g} s")
    staying = tuple(
        replace(m, store_port=reports[m.node].store_port)
        for m in answered
        if m.node in reports and not reports[m.node].leaving
    )
    aside = set_aside(world.strikes, following.strikes, view.struck_s, now_s)
    found = _Round(silent=tuple(silent), staying=staying, aside=frozenset(aside), cause=cause)
    return _next_world(view, following, found, limits, lost_snapshot(world, reports, resume))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Who is there for the next world, and what the last one ended of."""

    silent: tuple[str, ...]
    staying: tuple[Member, ...]
    aside: frozenset[str]
    cause: Cause | None


def _next_world(view: View, following: World, found: _Round, limits: Limits, lost: str) -> Decision:
    """The next world with its members, or waiting for enough of them. lost: what is to be said of
    a snapshot that nobody holds whole."""
    world, cause = view.world, found.cause
    assert world is not None
    stay = {m.node for m in found.staying}
    registered = (view.members or {}).values()
    joiners = [m for m in registered if m.node not in stay and not world.names(m)]
    new, old = ([m for m in ms if m.node not in found.aside] for ms in (joiners, found.staying))
    members = line_up(world, new, old, limits.max_nodes)
    if len(members) < limits.min_nodes:
        members = line_up(world, joiners, found.staying, limits.max_nodes)
    if len(members) < limits.min_nodes:
        return wait(f"{len(members)} of at least {limits.min_nodes} nodes are left; state is kept")
    following = replace(following, members=members)
    reason = _why(view, world, following, found)
    if cause is None or cause[1].bad_step is None:
        reason += _passed_over(view, following.resume)
    following = replace(following, reason=reason + lost)
    return Decision((WriteWorld(following, _gone(view, world, members)),), following.reason)


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
    reports = {n: r for n, r in _answers(view).items() if r.phase == "stopped"}
    ending = view.control.stop and len(reports) == len(world.members)
    waited_s = now_s - (view.round_s or now_s)
    if not view.can_save or (waited_s < SAVE_AFTER_ALIVE * limits.alive_s and not ending):
        return None
    resume = choose_resume(world, reports, view.storage_step)
    if resume.tier != "ram" or resume.step <= (view.storage_step or 0):
        return None
    order = {member.node: index for index, member in enumerate(world.members)}
    writers: dict[int, str] = {}
    for source in sorted(resume.sources, key=lambda source: order[source.node]):
        writers.setdefault(source.rank, source.node)
    mine = tuple(rank for rank, node in writers.items() if node == view.me.node)
    why = "an operator stops the job" if view.control.stop else "nobody can go on"
    reason = f"{why}: saving step {resume.step} from memory"
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


def _lives(view: View, member: Member, now_s: float, limits: Limits) -> bool:
    """Whether a member that answered is there still: its registration may have lapsed for a while,
    but a node that has come anew is not what it was.

    For a TTL after the round's beginning, and after the store's return unless it had been missing
    for a TTL before: a slow answer counts as a return too, and brings nobody back.
    """
    found = (view.members or {}).get(member.node)
    if found is not None:
        return found.incarnation == member.incarnation
    ttl_s, well_s = limits.lease_ttl_s, view.store.well_since_s
    missing_s = view.missing_since_s.get(member.node, now_s)
    young = now_s - (view.round_s or now_s) < ttl_s
    return young or (now_s - well_s < ttl_s and well_s - missing_s < ttl_s)


def _registered(view: View, member: Member) -> bool:
    found = (view.members or {}).get(member.node)
    return found is not None and found.incarnation == member.incarnation


def _departure(node: str, report: Report | None, alarm: Alarm | None) -> str:
    """Why a node left, in its own words; empty if it gave none."""
    if alarm is not None and alarm.kind == "leave" and alarm.node == node:
        return alarm.reason
    if report is not None and report.leave_reason:
        return f"{node} leaves: {report.leave_reason}"
    return ""


def _why(view: View, world: World, following: World, found: _Round) -> str:
    """One sentence: what changed between the two worlds."""
    before, after = ({m.node for m in w.members} for w in (world, following))
    silent, stay, cause = found.silent, {m.node for m in found.staying}, found.cause
    parts = []
    if silent:
        parts.append(f"{', '.join(silent)} {'is' if len(silent) == 1 else 'are'} lost")
    left = sorted(before - after - set(silent) - stay)
    reports = view.reports or {}
    explained = {n: text for n in left if (text := _departure(n, reports.get(n), view.alarm))}
    if unexplained := [n for n in left if n not in explained]:
        parts.append(f"{', '.join(unexplained)} left")
    parts += explained.values()
    spare = sorted((before - after) & stay)
    parts += [f"{node} is set aside: {AGAIN}" for node in spare if node in found.aside]
    parked = [node for node in spare if node not in found.aside]
    if parked:
        most = _nodes(len(after))
        parts.append(f"{', '.join(parked)} wait{'s' * (len(parked) == 1)}: {most} at most")
    if after - before:
        parts.append(f"{', '.join(sorted(after - before))} joined")
    if cause is not None and cause[1].blame != "peer":
        node, failure = cause
        verb = "hung" if failure.blame == "hung" else "failed"
        parts.append(f"rank {failure.rank} on {node} {verb} ({failure.message})")
        if alike := likeness(following.setbacks):
            parts.append(alike)
    if not parts:
        parts.append(view.alarm.reason if view.alarm is not None else "workers stopped")
    return "; ".join(parts)
