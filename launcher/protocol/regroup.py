"""Ends a regroup round: L4 of the acting leader, and what every node saves where no node can go on
(A6 of `decide`).

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elasticzero.ipc.assignment import LeftOutBatch, Resume
from elasticzero.launcher.goodput import Waiting
from elasticzero.launcher.protocol.actions import Decision, SaveHeldSnapshot, WriteWorld, wait
from elasticzero.launcher.protocol.documents import Alarm, Failure, Member, Report, World
from elasticzero.launcher.protocol.failure_policy import (
    AGAIN,
    Cause,
    failures_without_progress,
    outliers,
    progress_floor,
    quarantine_reason,
    quarantined,
    repeated_failure_note,
    root_cause,
    setbacks,
    still_quarantined,
    strikes,
    trained,
)
from elasticzero.launcher.protocol.hang_rules import deadlocked, left_alone
from elasticzero.launcher.protocol.leader import (
    NAMES_SHOWN,
    all_state_runs,
    answers_of,
    joiners_of,
    new_candidates,
    parked_text,
    present_build,
    waiting_of,
)
from elasticzero.launcher.protocol.placement import (
    as_registered,
    build_of,
    choose_build,
    fits,
    of_build,
    order_members,
    stated_versions,
    unlike,
)
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.resume import choose_resume, describe_incomplete_snapshot
from elasticzero.launcher.protocol.termination import (
    await_holders,
    end_once_saved,
    fail_for_unwritten_checkpoint,
    fail_job,
    refuse_damaged_checkpoint,
    refuse_unverified_state,
    skipped_checkpoint,
    skipped_checkpoint_note,
    stop_job,
)
from elasticzero.launcher.protocol.view import View
from elasticzero.text import list_text

MOST_PAUSE_S = 10.0
STORAGE_PATIENCE_S = 10.0
"""Seconds without an answer of storage after which the leader no longer waits for what it holds, if
memory has a snapshot; the time before the round does not count."""
SAVE_AFTER_ALIVE = 2
"""A round that lasts longer than this multiple of the time to answer counts as one in which no node
goes on."""
STILL_SHARE, STILL_MOST = 0.2, 4.0
"""Where so many members answer that their time is over before all have, the leader waits for the
others as long as another answer comes within this share of the time, up to this multiple of it: a
node that is left out costs another generation."""
GONE_AT_ONCE = 100
"""Maximum number of registrations that end in the transaction that writes a world; others lapse."""


def close_round(view: View, world: World, now_s: float, policy: JobPolicy) -> Decision:
    """Decides for the acting leader in a round.

    Args:
        view: What this agent sees.
        world: World of the view, whose round is open.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    opened_s = max(view.round_s or now_s, view.store.outage_end_s)
    answers = answers_of(view)
    answered = [m for m in world.members if m.node in answers and _lives(view, m, now_s, policy)]
    heard = {m.node for m in answered}
    silent = [m.node for m in world.members if m.node not in heard]
    asked_s = None if view.alarm_s is None else max(view.alarm_s, view.store.outage_end_s)
    waits = asked_s is None or now_s - asked_s < policy.alive_s
    waits |= asked_s is not None and _answers_come(view, now_s - asked_s, now_s, policy)
    if not view.refusing.issuperset(silent) and waits:
        return wait(f"waiting for an answer of {list_text(silent, NAMES_SHOWN)}")
    late = [m.node for m in answered if answers[m.node].phase != "stopped"]
    if late and now_s - opened_s < policy.stop_s + policy.save_s:
        return wait(f"waiting for the workers of {list_text(late, NAMES_SHOWN)} to stop")
    present = {m.node: answers[m.node] for m in answered}
    reports = {node: report for node, report in present.items() if report.phase == "stopped"}
    cause = left_alone(world, view.alarm) or root_cause(reports) or deadlocked(world, view.alarm)
    resume = choose_resume(world, reports, view.storage_step)
    storage_s = max(opened_s, view.storage_asked_s or opened_s)
    do_without = resume.tier == "ram" and now_s - storage_s >= STORAGE_PATIENCE_S
    staying = tuple(
        _at_port(m, reports[m.node].store_port)
        for m in answered
        if m.node in reports and not reports[m.node].leaving and not view.control.drains(m)
    )
    able = _able(view, world, staying, now_s)
    if view.storage_pending is not None and not do_without:
        few = len(able) < policy.min_nodes
        return wait(_too_few(len(able), policy) if few else view.storage_pending)
    waited_s = now_s - opened_s
    if (end := refuse_damaged_checkpoint(view, resume, policy)) is not None:
        return end_once_saved(view, resume, end, waited_s, policy)
    if (end := fail_for_unwritten_checkpoint(view, cause)) is not None:
        away = _away(view, world, reports)
        held = await_holders(view, resume, cause, away, waited_s, policy)
        return held or end_once_saved(view, resume, end, waited_s, policy)
    if (refused := refuse_unverified_state(reports, resume, cause)) is not None:
        return refused
    excused = cause is not None and cause[0] in reports and reports[cause[0]].leaving
    odd = outliers(world, reports, able, policy.min_nodes)
    outcome = _Round(silent=tuple(silent), staying=staying, cause=cause, odd=odd)
    following = _judged(view, world, outcome, resume, (present, reports), now_s)
    excused |= bool(odd)
    if (end := fail_job(following, cause, policy, excused=excused)) is not None:
        return end_once_saved(view, resume, end, waited_s, policy)
    if view.control.stop:
        return stop_job(view, resume, waited_s, policy)
    failed = following.fruitless
    pause_s = min(MOST_PAUSE_S, 0.25 * 2**failed) if failed > 1 else 0.0
    if waited_s < pause_s:
        return wait(f"failed {failed} times without progress; pausing for {pause_s:g} s")
    aside = quarantined(world.strikes, following.strikes, view.struck_s, now_s)
    outcome = replace(outcome, aside=aside)
    return _next_world(
        view, following, outcome, policy, describe_incomplete_snapshot(world, reports, resume)
    )


def _at_port(member: Member, port: int) -> Member:
    """Returns a member whose store is at a port; itself where that is known, as of most."""
    return member if member.store_port == port else replace(member, store_port=port)


def _too_few(count: int, policy: JobPolicy) -> str:
    """Returns why no world can follow, whatever storage holds."""
    return f"{count} of at least {policy.min_nodes} nodes are left; state is kept"


def _away(view: View, world: World, reports: Mapping[str, Report]) -> list[str]:
    """Returns the members that do not answer, and may come back as they were: neither has another
    process registered by their names, nor refuses their hosts connections, nor did they leave.

    Args:
        view: What this agent sees.
        world: World of the view, whose round is open.
        reports: Reports by node, of the nodes whose workers have stopped.
    """
    members = [m for m in world.members if m.node not in reports and m.node not in view.refusing]
    left = {node for node, report in answers_of(view).items() if report.leaving}
    registered = view.members or {}
    return [
        m.node
        for m in members
        if registered.get(m.node, m).incarnation == m.incarnation and m.node not in left
    ]


def _answers_come(view: View, waited_s: float, now_s: float, policy: JobPolicy) -> bool:
    """Returns whether members still answer, one soon after another, though the time to answer is
    over.

    Args:
        view: What this agent sees.
        waited_s: Seconds since the members were asked.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, of which `alive_s` counts.
    """
    comes = view.answered_s is not None and now_s - view.answered_s < STILL_SHARE * policy.alive_s
    return comes and waited_s < STILL_MOST * policy.alive_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Holds which nodes are there for the next world, and why the last one ended."""

    silent: tuple[str, ...]
    staying: tuple[Member, ...]
    cause: Cause | None
    odd: Mapping[str, Failure]
    """Nodes that are set aside at once, each with the failure that speaks against it."""
    aside: Mapping[str, float] = field(default_factory=dict)
    """Nodes that are set aside, each with the seconds for which it still waits."""


def _able(view: View, world: World, staying: Sequence[Member], now_s: float) -> set[str]:
    """Returns the nodes that the next world could have: members that stay, and waiting nodes that
    are not set aside.

    Args:
        view: What this agent sees.
        world: World of the view.
        staying: Members of that world that stay.
        now_s: Present time, on the clock of the view's times.
    """
    aside = quarantined(world.strikes, world.strikes, view.struck_s, now_s)
    waiting = {m.node for m in joiners_of(view, world)}
    return (waiting - aside.keys()) | {member.node for member in staying}


def _trains(world: World, cause: Cause | None) -> bool:
    """Returns whether a failure is of a node that has trained before this generation."""
    return cause is not None and cause[0] in {m.node for m in world.members[: world.trained]}


def _judged(
    view: View,
    world: World,
    outcome: _Round,
    resume: Resume,
    answers: tuple[Mapping[str, Report], Mapping[str, Report]],
    now_s: float,
) -> World:
    """Returns the next world without its members: its state, and the attribution of the failures.

    Args:
        view: What this agent sees.
        world: World of the view, whose round is closed.
        outcome: The nodes that are there, and the cause of the round's failure.
        resume: State that the next world starts from.
        answers: Reports by node: of the nodes that are there, and of those whose workers have
            stopped.
        now_s: Present time, on the clock of the view's times.
    """
    present, reports = answers
    cause = outcome.cause
    recorded = cause if not outcome.odd or _trains(world, cause) else None
    count = failures_without_progress(
        world, resume.step, recorded, present, excused=bool(outcome.odd)
    )
    lasted_s = now_s - (view.world_s or now_s)
    switched = any(report.switched for report in present.values())
    entered = world.generation + 1 if switched else 0
    return World(
        generation=(entered or world.generation) + 1,
        entered=entered,
        token=view.token,
        members=(),
        strategy=world.strategy,
        shard=world.shard,
        redundancy=world.redundancy,
        resume=resume,
        reason="",
        fruitless=count,
        furthest=progress_floor(world, resume.step, count),
        bad_steps=view.bad_steps,
        micro_batch=micro_batch_limit(world, reports),
        left_out=left_out_after(world, resume, reports),
        setbacks=setbacks(world, resume.step, recorded, reports),
        strikes=strikes(world, reports, lasted_s, outcome.odd),
        trained=0,
    )


def micro_batch_limit(world: World, reports: Mapping[str, Report]) -> int | None:
    """Returns the most samples of a micro-batch of automatic size in the next generation; None: no
    rank was short of memory so far."""
    failures = [report.failure for report in reports.values()]
    halved = [failure.micro_batch for failure in failures if failure is not None]
    return min((size for size in (world.micro_batch, *halved) if size is not None), default=None)


def left_out_after(
    world: World, resume: Resume, reports: Mapping[str, Report]
) -> tuple[LeftOutBatch, ...]:
    """Returns the global batches after `resume` that are left out; the state of `resume` records
    those before it as skipped.

    Args:
        world: World of the generation that ends.
        resume: State that the next world starts from.
        reports: Reports by node, whose failures may leave out another batch.
    """
    failures = [report.failure for report in reports.values()]
    new = [failure.left_out for failure in failures if failure is not None]
    every = {*world.left_out, *(batch for batch in new if batch is not None)}
    after = [batch for batch in every if batch.step > resume.step]
    return tuple(sorted(after, key=lambda batch: batch.step))


def _take_proofs(view: View, members: Iterable[Member], resume: Resume) -> bool:
    """Returns whether all nodes that have to do with the next world prove the secret.

    Args:
        view: What this agent sees.
        members: Members of the next world, as they are registered.
        resume: State that it starts from, of which nodes may hold a part that leave now.
    """
    holders = {source.node for source in resume.sources}
    reports = [report for node, report in (view.reports or {}).items() if node in holders]
    return all_state_runs((*members, *reports))


def _next_world(
    view: View, following: World, outcome: _Round, policy: JobPolicy, lost: str
) -> Decision:
    """Returns the next world with its members, or a decision to wait for enough of them.

    Args:
        view: What this agent sees.
        following: The next world without its members.
        outcome: The nodes that are there, and why the last world ended.
        policy: Limits and times, with operators' changes.
        lost: Note on a snapshot that no node holds whole; empty: there is none.
    """
    world, cause = view.world, outcome.cause
    assert world is not None
    new, old = _places(view, world, following, outcome, policy)
    members = order_members(world, new, old, policy.max_nodes)
    if len(members) < policy.min_nodes:
        return wait(_too_few(len(members), policy))
    before = trained(world, view.reports or {}, {m.node for m in members if world.names(m)})
    proofs = _take_proofs(view, members, following.resume)
    release, torch = stated_versions(members)
    following = replace(following, members=members, trained=before, proofs=proofs)
    following = replace(following, release=release, torch=torch)
    reason = _why(view, world, following, outcome)
    failure = cause[1] if cause is not None and cause[1].bad_step is not None else None
    if failure is None:
        reason += skipped_checkpoint_note(view, following.resume)
    rest = _why(view, world, following, outcome, damage=False) + lost
    skipped = skipped_checkpoint(view, following.resume, rest, failure)
    following = replace(following, reason=reason + lost, skipped=skipped)
    return Decision((WriteWorld(following, _gone(view, world, members)),), following.reason)


def _places(
    view: View, world: World, following: World, outcome: _Round, policy: JobPolicy
) -> tuple[list[Member], list[Member]]:
    """Returns the nodes that come, and those that stay, in the next world: of one build (L14), and
    without nodes that are quarantined still.

    Args:
        view: What this agent sees.
        world: World of the view.
        following: The next world without its members.
        outcome: The nodes that are there, and why the last world ended.
        policy: Limits and times, with operators' changes.
    """
    stay = {m.node for m in outcome.staying}
    registered = [] if view.remnants else waiting_of(view, world)
    joiners = [m for m in registered if m.node not in stay]
    old = [as_registered(member, view.members) for member in outcome.staying]
    able = [m for m in (*old, *joiners) if m.node not in outcome.aside]
    least, most = policy.min_nodes, policy.max_nodes
    build = choose_build(able, present_build(view, world), least, most)
    old, joiners = of_build(old, build), of_build(joiners, build)
    present = {m.node for m in (*joiners, *old)}
    waiting = still_quarantined(outcome.aside, following.strikes, present, least)
    new, kept = ([m for m in ms if m.node not in waiting] for ms in (joiners, old))
    return new, kept


def waiting_class(view: View, now_s: float, policy: JobPolicy) -> Waiting:
    """Returns the class of the time in which the job has no workers: G3 in `goodput`.

    Args:
        view: What this agent sees.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    if view.members is None:
        return "regroup"
    reports = view.reports or {}
    leave = {node for node, report in reports.items() if report.leaving}
    world = view.world
    if world is None:
        able = len(new_candidates(view, None, policy))
    else:
        able = len(_able(view, world, [m for m in world.members if m.node in view.members], now_s))
    if len(view.members.keys() - leave) < policy.min_nodes:
        return "idle"
    return "parked" if able < policy.min_nodes else "regroup"


def others_may_save(view: View, now_s: float, policy: JobPolicy) -> bool:
    """Returns whether a node that leaves no other one behind must wait.

    What it holds may be part of a snapshot that becomes whole once others have stopped too.

    Args:
        view: What this agent sees of an open round.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times; past `stop_s` and `save_s` together it need not wait.
    """
    waited_s = now_s - (view.round_s or now_s)
    if not view.can_save or waited_s >= policy.stop_s + policy.save_s:
        return False
    return view.reports is None or any(r.phase != "stopped" for r in answers_of(view).values())


def save_held(view: View, world: World, now_s: float, policy: JobPolicy) -> Decision | None:
    """Returns this node's part in making the newest whole snapshot in memory a checkpoint; None: it
    has none.

    That happens in a round that lasts, mostly because no node can go on. Of several nodes that hold
    a shard the first in the world's order writes it; where that one is lost, the next one.

    Args:
        view: What this agent sees.
        world: World of the view, whose round is open.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times; `alive_s` sets from when on a round counts as lasting.
    """
    if not view.can_save:
        return None
    answers = answers_of(view)
    living = [m for m in world.members if view.members is None or _lives(view, m, now_s, policy)]
    stopped = [m.node for m in living if m.node in answers and answers[m.node].phase == "stopped"]
    reports = {node: answers[node] for node in stopped}
    ending = view.control.stop and len(reports) == len(world.members)
    waited_s = now_s - (view.round_s or now_s)
    if waited_s < SAVE_AFTER_ALIVE * policy.alive_s and not ending:
        return None
    resume = choose_resume(world, reports, view.storage_step)
    if resume.tier != "ram" or resume.step <= (view.storage_step or 0):
        return None
    order = {member.node: index for index, member in enumerate(world.members)}
    writers: dict[int, str] = {}
    for source in sorted(resume.sources, key=lambda source: order[source.node]):
        writers.setdefault(source.rank, source.node)
    ranks = tuple(rank for rank, node in writers.items() if node == view.me.node)
    why = "an operator stops the job" if view.control.stop else "the next generation is late"
    reason = f"{why}: saving step {resume.step} from memory"
    told = view.saved_held == (resume.generation, resume.step)
    if not ranks or (told and set(ranks) <= set(view.saved_ranks)):
        return wait(reason) if view.saving and waited_s < policy.save_timeout_s else None
    action = SaveHeldSnapshot(resume.generation, resume.step, len(writers), ranks)
    return Decision((action,), reason)


def _gone(view: View, world: World, members: tuple[Member, ...]) -> tuple[str, ...]:
    """Returns the nodes of the former world that have no place in the next, as they were
    registered.

    Args:
        view: What this agent sees.
        world: The former world.
        members: Members of the next world.
    """
    after = {member.node for member in members}
    left_out = [m for m in world.members if m.node not in after]
    gone = [member.node for member in left_out if _registered(view, member)]
    return tuple(gone[:GONE_AT_ONCE])


def _lives(view: View, member: Member, now_s: float, policy: JobPolicy) -> bool:
    """Returns whether a member that answered still exists.

    Its registration may have lapsed for a while, but a node that has come anew is not what it was.
    This holds for a TTL after the round's beginning, and after the store's return unless the member
    had been missing for a TTL before: a slow answer counts as a return too, and brings no node
    back.

    Args:
        view: What this agent sees of the registrations and the store's outages.
        member: Member of the world, which has answered in this round.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, of which the TTL of a lease counts.
    """
    registration = (view.members or {}).get(member.node)
    if registration is not None:
        return registration.incarnation == member.incarnation
    ttl_s, well_s = policy.lease_ttl_s, view.store.outage_end_s
    missing_s = view.missing_since_s.get(member.node, now_s)
    young = now_s - (view.round_s or now_s) < ttl_s
    return young or (now_s - well_s < ttl_s and well_s - missing_s < ttl_s)


def _registered(view: View, member: Member) -> bool:
    registration = (view.members or {}).get(member.node)
    return registration is not None and registration.incarnation == member.incarnation


def _departure(node: str, report: Report | None, alarm: Alarm | None) -> str:
    """Returns why a node left, in its own words; empty if it gave no reason.

    Args:
        node: Name of the node.
        report: Its report; None: it made none.
        alarm: Alarm of the round, which may be this node's; None: there is none.
    """
    if alarm is not None and alarm.kind == "leave" and alarm.node == node:
        return alarm.reason
    if report is not None and report.leave_reason:
        return f"{node} leaves: {report.leave_reason}"
    return ""


def _why(
    view: View, world: World, following: World, outcome: _Round, *, damage: bool = True
) -> str:
    """Returns one sentence on what changed between the two worlds.

    Args:
        view: What this agent sees.
        world: World of the generation that ends.
        following: The next world, with its members.
        outcome: The nodes that are there, and why the last world ended.
        damage: Whether to repeat the message of a rank that found a damaged checkpoint.
    """
    before, after = ({m.node for m in w.members} for w in (world, following))
    silent, stay, cause = outcome.silent, {m.node for m in outcome.staying}, outcome.cause
    parts = []
    if silent:
        parts.append(f"{', '.join(silent)} {_is(silent)} lost")
    left = sorted(before - after - set(silent) - stay)
    reports = view.reports or {}
    explained = {n: text for n in left if (text := _departure(n, reports.get(n), view.alarm))}
    if unexplained := [n for n in left if n not in explained]:
        parts.append(f"{', '.join(unexplained)} left")
    parts += explained.values()
    if needed := sorted((after - before) & outcome.aside.keys()):
        why = quarantine_reason(following.strikes, needed[0])
        parts.append(f"{', '.join(needed)} {_is(needed)} needed, though set aside: {why}")
    odd = _odd_builds(view, following, outcome)
    parts += [f"{node} is set aside: {text}" for node, text in odd.items()]
    spare = sorted((before - after) & stay - odd.keys())
    struck = [node for node in spare if node in outcome.aside]
    parts += [
        f"{node} is set aside: {quarantine_reason(following.strikes, node)}" for node in struck
    ]
    parked = [node for node in spare if node not in outcome.aside]
    if parked:
        parts.append(parked_text(parked, len(after)))
    if after - before:
        parts.append(f"{', '.join(sorted(after - before))} joined")
    if cause is not None and cause[1].blame != "peer":
        node, failure = cause
        verb = "hung" if failure.blame == "hung" else "failed"
        if failure.blame == "rollback":
            parts.append(failure.message)
        elif node not in struck or quarantine_reason(following.strikes, node) == AGAIN:
            message = f" ({failure.message})" if damage or failure.bad_step is None else ""
            parts.append(f"rank {failure.rank} on {node} {verb}{message}")
        if not outcome.odd and (alike := repeated_failure_note(following.setbacks)):
            parts.append(alike)
    if not parts:
        parts.append(view.alarm.reason if view.alarm is not None else "workers stopped")
    return "; ".join(parts)


def _odd_builds(view: View, following: World, outcome: _Round) -> dict[str, str]:
    """Returns the members that stay and have another build than the next world, and why they are
    set aside, by node.

    Args:
        view: What this agent sees.
        following: The next world, with its members.
        outcome: The nodes that are there.
    """
    after = {member.node for member in following.members}
    odd = {}
    for stays in outcome.staying:
        member = as_registered(stays, view.members)
        others = (other for other in following.members if not fits(member, build_of(other)))
        if member.node not in after and (other := next(others, None)) is not None:
            odd[member.node] = unlike(member, other)
    return odd


def _is(nodes: Sequence[str]) -> str:
    return "is" if len(nodes) == 1 else "are"
