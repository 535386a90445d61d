"""Decides what the acting leader does while no round is open, and which agent that is.

Pure. The acting leader is the first member of `world` that is alive; before the first world it is
the oldest registration. Its rules:
 L1  There is no world: write the first one when MAX nodes are registered, or when MIN are and no
     node has come for settle_s.
 L2  Every node has finished: write `done`.
 L3  A member's lease has lapsed, the store is well, and no steps prove that the member is alive (V1
     to V4): raise the alarm, unless the member has registered again meanwhile.
 L4  A round is open: once every member has answered, or is silent past alive_s (and a while longer,
     as long as others still answer) or refuses connections, and those that answered have stopped,
     write the next world, or `done` if trying again is useless, or wait for MIN nodes (`regroup`).
 L5  A committed checkpoint is damaged, and the next world would begin behind it: say so in its
     reason. Write `done` instead with --strict-checkpoint, or if no checkpoint is good.
 L6  A node waits and there is room: let the world grow (by A8). Not if the node is quarantined (B4
     in `failure_policy`), nor while a member is not registered, for it would lose its place in the
     round. A registered node counts as alive: a lapsed lease shows the dead, and the reread before
     the write shows the living. For a while after a backup of etcd was restored, a registration
     brings no node into a world. If operators have lowered MAX, let the world shrink (by A8); the
     last members in its order wait.
 L7  Operators stop the job: let it end (by A8), or at once if no node trains (E2 in `termination`).
 L8  Every node reports its workers as `stalled`, so they wait for each other: raise the alarm.
 L9  While the store is away, request nothing of the workers: no agent could write the world, or the
     end, for which they would stop (L6 and L7; A11 for a node that leaves).
 L10 A drained registration is in no next world, even if its node may not know of it yet: neither is
     it taken into one, nor does it keep its place at the end of a round.
 L11 With --shard node all nodes of a world have as many workers; others wait.
 L12 From the job's second run on, a node of the release before is taken into no world: it cannot
     derive the secret of the run.
 L13 While a proposal stands (`planned`), request no other change: it waits, or ends the proposal.
 L14 All nodes of a world have one build of ElasticZero and torch, by BD1 to BD5 in `placement`;
     others are set aside.
Rules of liveness, for L3; a lapsed lease is only a suspicion:
 V1  It counts only while the agent's own lease is confirmed, and the store has been well for a TTL.
 V2  It does not count while steps prove that the member is alive: a step was finished with it after
     the lease lapsed, or less than half a TTL before. A lease is renewed each third of its TTL, so
     a node whose death lets the lease lapse has made no step for longer than that. A node that has
     made one is cut off from the store, and trains.
 V3  Steps prove nothing any more when the workers here have waited for the next one for a TTL, and
     for twice the longest of the last ones, or have finished for so long; where no step is due,
     after PROOF_OF_LIFE_S. The member may have died meanwhile, and no later lapse would show it.
 V4  Steps prove that the workers of a member live, and not that its agent does. While that is
     suspended, no snapshot is held by all nodes: each step is one more to be done again, once the
     workers cannot go on without their agent. So steps prove nothing any more once the agent has
     answered no request for a TTL, and training has gone on since the lapse for a TTL, and for as
     long as before the lapse since the newest held snapshot: going back then costs at most twice
     what it would have cost at once. An agent that answers is cut off from the store alone, however
     long it takes to save. Where that snapshot lacks a part without the member, V3 alone counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from elasticzero.errors import ExitCode
from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.messages import FLAG_GROW, FLAG_LEAVE, FLAG_STOP
from elasticzero.launcher.protocol.actions import (
    Decision,
    ExitAgent,
    RaiseAlarm,
    RequestBoundaryStop,
    WriteDone,
    WriteWorld,
    wait,
)
from elasticzero.launcher.protocol.documents import (
    FIRST_RUN,
    UNSTATED,
    Alarm,
    Done,
    Member,
    Report,
    World,
)
from elasticzero.launcher.protocol.failure_policy import (
    quarantine_reason,
    quarantined,
    still_quarantined,
)
from elasticzero.launcher.protocol.hang_rules import deadlock
from elasticzero.launcher.protocol.placement import (
    Build,
    alike,
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
from elasticzero.launcher.protocol.resume import choose_resume
from elasticzero.launcher.protocol.termination import (
    refuse_damaged_checkpoint,
    skipped_checkpoint,
    skipped_checkpoint_note,
    stop_from_storage,
)
from elasticzero.launcher.protocol.view import StoreHealth, View
from elasticzero.text import count_text, list_text

NAMES_SHOWN = 8
REMNANTS = "etcd was restored from a backup: waiting until the leases of nodes that are gone lapse"
PLAIN_END = "every rank's script has ended with status 0; none called elasticzero.run"
"""Reason for the end of a job whose script makes no visible steps."""
PROOF_OF_LIFE_S = 30.0
PROOF_STEPS = 2.0
"""A step is waited for up to this multiple of the longest of the last steps."""


def is_leader(view: View) -> bool:
    """Returns whether this agent acts for the job: the first member of `world` that is alive.

    In a round a member is alive if it has answered and its registration exists. At other times, and
    for an agent that does not see the answers, it is alive if it is registered.
    """
    world = view.world
    if world is None:
        return view.oldest
    answers = view.reports if view.round_s is not None else None
    for node in world.nodes:
        if node == view.me.node:
            return True
        present = view.members is None or node not in view.missing_since_s
        if present and (answers is None or _is_answer(world, node, answers.get(node))):
            return False
    return False


def answers_of(view: View) -> dict[str, Report]:
    """Returns the reports made in this round; reports of the training before it do not show which
    nodes live."""
    world = view.world
    assert world is not None
    return {
        node: report
        for node, report in (view.reports or {}).items()
        if _is_answer(world, node, report)
    }


def _is_answer(world: World, node: str, report: Report | None) -> bool:
    """Returns whether a node's report was made in the round that ends a world, by its member.

    Args:
        world: The world.
        node: Name of the node.
        report: Its report; None: there is none.
    """
    if report is None or report.phase not in ("alive", "stopped"):
        return False
    return world.find(node, report.incarnation) is not None


def candidates_of(view: View) -> list[Member]:
    """Returns the nodes that are registered, not drained (L10), and not of a release that cannot
    take part in this run (L12)."""
    members = list((view.members or {}).values())
    if view.control.drain:
        members = [member for member in members if not view.control.drains(member)]
    takes_any = view.me.run <= FIRST_RUN
    return members if takes_any else [m for m in members if m.run != UNSTATED]


def all_state_runs(documents: Iterable[Member | Report]) -> bool:
    """Returns whether all of these documents are of nodes that prove the secret, and do not show
    it: those of the release before state no run."""
    return all(document.run != UNSTATED for document in documents)


def waiting_of(view: View, world: World) -> list[Member]:
    """Returns the nodes that wait for a place, of any build: L11."""
    candidates = alike(candidates_of(view), world.shard, world.members[0].nproc)
    return [member for member in candidates if not world.names(member)]


def joiners_of(view: View, world: World) -> list[Member]:
    """Returns the nodes that wait for a place and that the world may take: L11 and L14."""
    return of_build(waiting_of(view, world), present_build(view, world))


def present_build(view: View, world: World) -> Build | None:
    """Returns the build of a world; None: no member states one."""
    if (build := build_of(world)) is not None:
        return build
    members = (as_registered(member, view.members) for member in world.members)
    return next((build for m in members if (build := build_of(m)) is not None), None)


def gives_way(view: View, world: World, staying: Iterable[Member], policy: JobPolicy) -> bool:
    """Returns whether the build that trains gives way to another one when the next world is
    written (L14); MIN nodes of that one wait then.

    Args:
        view: What this agent sees.
        world: World of the view.
        staying: Members of it that stay.
        policy: Limits and times, with operators' changes.
    """
    waiting = waiting_of(view, world)
    present = present_build(view, world) if waiting else None
    if all(fits(member, present) for member in waiting):
        return False
    members = [*(as_registered(member, view.members) for member in staying), *waiting]
    return present != choose_build(members, present, policy.min_nodes, policy.max_nodes)


def new_candidates(view: View, world: World | None, policy: JobPolicy) -> list[Member]:
    """Returns the nodes that a world may have in which nobody stays: L11 and L14.

    Args:
        view: What this agent sees, with the registrations.
        world: World that it follows; None: there was none.
        policy: Limits and times, with operators' changes.
    """
    registered = candidates_of(view)
    present, shard = (None, policy.shard) if world is None else (build_of(world), world.shard)
    build = choose_build(registered, present, policy.min_nodes, policy.max_nodes)
    return alike(of_build(registered, build), shard)


def odd_one_text(registered: Sequence[Member], candidates: Sequence[Member]) -> str:
    """Returns why the first world has not all nodes; empty: it has.

    Args:
        registered: All nodes, in the order in which they came.
        candidates: Those of them that it may have.
    """
    if len(candidates) in (0, len(registered)):
        return ""
    nodes = {member.node for member in candidates}
    odd = next((member for member in registered if member.node not in nodes), None)
    if odd is None:
        return ""
    others = (member for member in candidates if not fits(odd, build_of(member)))
    return unlike(odd, next(others, candidates[0]))


def form_first_world(view: View, now_s: float, policy: JobPolicy) -> Decision:
    """Decides while the job has no world: waits for nodes, and has the oldest one write it (L1).

    Args:
        view: What this agent sees.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    if view.leaving:
        return Decision((ExitAgent(ExitCode.LEFT),), "leaving before the job began")
    if now_s - view.began_s >= policy.join_timeout_s:
        count = "" if view.members is None else f"; {len(view.members)} here"
        reason = (
            f"error: fewer than {policy.min_nodes} nodes came together within "
            f"{policy.join_timeout_s:g} s (--join-timeout){count}"
        )
        return Decision((ExitAgent(ExitCode.UNAVAILABLE),), reason)
    if view.world_unread:
        return wait("waiting for etcd to say how far the job has come")
    if not is_leader(view) or view.members is None:
        return wait("waiting for the oldest node to write the first world")
    if view.control.stop:
        return stop_from_storage(view)
    if view.remnants:
        return wait(REMNANTS)
    candidates = new_candidates(view, None, policy)
    ready = len(candidates)
    if ready < policy.min_nodes:
        why = odd_one_text(candidates_of(view), candidates)
        why = f"; {why}" if why else ""
        return wait(f"{ready} of at least {policy.min_nodes} nodes are here{why}")
    settling_s = view.last_join_s + policy.settle_s - now_s
    if ready < policy.max_nodes and settling_s > 0:
        attendance = f"{count_text(ready, 'node')} {'is' if ready == 1 else 'are'} here"
        return wait(f"{attendance}; waiting {policy.settle_s:g} s for more")
    if view.storage_pending is not None:
        return wait(view.storage_pending)
    members = order_members(None, candidates, (), policy.max_nodes)
    resume = choose_resume(None, {}, view.storage_step, members)
    if (refused := refuse_damaged_checkpoint(view, resume, policy)) is not None:
        return refused
    cause = f"{count_text(len(members), 'node')} came together"
    release, torch = stated_versions(members)
    first = World(
        generation=1,
        token=view.token,
        members=members,
        strategy=policy.strategy,
        shard=policy.shard,
        redundancy=policy.redundancy,
        resume=resume,
        reason=cause + skipped_checkpoint_note(view, resume),
        bad_steps=view.bad_steps,
        skipped=skipped_checkpoint(view, resume, cause),
        proofs=all_state_runs(members),
        release=release,
        torch=torch,
    )
    return Decision((WriteWorld(first),), first.reason)


def all_are_lost(view: View, world: World, now_s: float, policy: JobPolicy) -> bool:
    """Returns whether this agent knows that no member of the world is registered.

    Args:
        view: What this agent sees.
        world: World of the view.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    return view.members is not None and all(
        member.node in view.missing_since_s and loss_of(view, member.node, now_s, policy)
        for member in world.members
    )


def spare_take_over(view: View, world: World, now_s: float, policy: JobPolicy) -> Decision:
    """Decides for a spare: it does nothing, unless the whole world is gone.

    Args:
        view: What this agent sees.
        world: World of the view, which does not name this registration.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    gone = all_are_lost(view, world, now_s, policy)
    aside = quarantined(world.strikes, world.strikes, view.struck_s, now_s)
    if not gone or not view.oldest or view.members is None:
        after = f"the generation after {world.generation}"
        if view.me.node in aside:
            why = quarantine_reason(world.strikes, view.me.node)
            return wait(f"set aside, for a place in {after} later: {why}")
        like = fits(view.me, build_of(world.members[0]))
        if not like or not alike([view.me], world.shard, world.members[0].nproc):
            return wait(f"set aside: {unlike(view.me, world.members[0])}")
        return wait(f"waiting for a place in {after}")
    if now_s - max(view.missing_since_s.values()) < policy.lease_ttl_s:
        return wait(
            f"nobody of generation {world.generation} is registered; waiting a TTL for them"
        )
    if view.control.stop:
        return stop_from_storage(view)
    if view.remnants:
        return wait(REMNANTS)
    candidates = new_candidates(view, world, policy)
    waiting = still_quarantined(
        aside, world.strikes, {m.node for m in candidates}, policy.min_nodes
    )
    ready = [member for member in candidates if member.node not in waiting]
    members = order_members(None, ready, (), policy.max_nodes)
    if len(members) < policy.min_nodes:
        return wait(f"{len(members)} of at least {policy.min_nodes} nodes are here")
    if view.storage_pending is not None:
        return wait(view.storage_pending)
    resume = choose_resume(world, {}, view.storage_step, members)
    if (refused := refuse_damaged_checkpoint(view, resume, policy)) is not None:
        return refused
    names = list_text((member.node for member in members), NAMES_SHOWN)
    cause = f"all nodes of generation {world.generation} are gone; {names} came"
    release, torch = stated_versions(members)
    following = World(
        generation=world.generation + 1,
        token=view.token,
        members=members,
        strategy=world.strategy,
        shard=world.shard,
        redundancy=world.redundancy,
        resume=resume,
        reason=cause + skipped_checkpoint_note(view, resume),
        skipped=skipped_checkpoint(view, resume, cause),
        fruitless=world.fruitless,
        furthest=resume.step,
        bad_steps=view.bad_steps,
        micro_batch=world.micro_batch,
        left_out=tuple(batch for batch in world.left_out if batch.step > resume.step),
        setbacks=world.setbacks,
        strikes=world.strikes,
        proofs=all_state_runs(members),
        release=release,
        torch=torch,
    )
    return Decision((WriteWorld(following),), following.reason)


def lead(
    view: View, world: World, now_s: float, policy: JobPolicy, *, may_propose: bool = False
) -> Decision | None:
    """Decides for the leader while no round is open; returns None where it has nothing to do.

    Args:
        view: What this agent sees.
        world: World of the view, which names this registration.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
        may_propose: Whether another size of the world is about to be proposed (`planned`).
    """
    if view.reports is None:
        return None
    reports = [view.reports.get(member.node) for member in world.members]
    if all(report is not None and report.phase == "finished" for report in reports):
        step = max(report.final_step or 0 for report in reports if report is not None)
        early = max(report.end_reason for report in reports if report is not None)
        reason = f"finished after step {step}" if step or view.workers.attached else PLAIN_END
        reason += f": {early}" if early else ""
        done = Done(outcome="finished", step=step, reason=reason, end_reason=early)
        return Decision((WriteDone(done),), done.reason)
    if (alarm := deadlock(view.me.node, reports)) is not None:
        return Decision((RaiseAlarm(alarm),), alarm.reason)
    for node in view.missing_since_s:
        report = view.reports.get(node)
        if report is not None and report.phase == "finished":
            continue
        if reason := loss_of(view, node, now_s, policy):
            alarm = Alarm(node=view.me.node, kind="lapse", reason=reason)
            return Decision((RaiseAlarm(alarm, lost=node),), alarm.reason)
    if view.workers.finished or not view.store.reachable:
        return None
    if view.proposal is not None and not view.proposal.withdrawn:
        return None
    if view.control.stop:
        reason = "an operator stops the job"
        return request_graceful_stop(view, FLAG_STOP, "stop", reason, now_s, policy)
    if may_propose or not (view.workers.restored or view.workers.plain):
        return None
    if len(world.members) > policy.max_nodes and view.control.nnodes is not None:
        reason = f"scaled to at most {count_text(policy.max_nodes, 'node')}"
        return request_graceful_stop(view, FLAG_LEAVE, "leave", reason, now_s, policy)
    if joining := taken_in(view, world, now_s, policy):
        reason = joining_text(joining)
        return request_graceful_stop(view, FLAG_GROW, "grow", reason, now_s, policy)
    return None


def taken_in(view: View, world: World, now_s: float, policy: JobPolicy) -> list[Member]:
    """Returns the nodes that a world is to take in now (L6).

    Args:
        view: What this agent sees.
        world: World of the view.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    room = policy.max_nodes - len(world.members)
    settled = now_s - view.last_join_s >= policy.grow_settle_s
    if room <= 0 or not settled or view.missing_since_s or view.remnants:
        return []
    aside = quarantined(world.strikes, world.strikes, view.struck_s, now_s)
    return [member for member in joiners_of(view, world) if member.node not in aside][:room]


def joining_text(members: Iterable[Member]) -> str:
    """Returns that these nodes come into the world."""
    return f"{', '.join(member.node for member in members)} joins"


def parked_text(nodes: Sequence[str], count: int) -> str:
    """Returns that members of a world have no place in the next one, which has so many nodes."""
    return f"{', '.join(nodes)} wait{'s' * (len(nodes) == 1)}: {count_text(count, 'node')} at most"


def leases_are_conclusive(store: StoreHealth, now_s: float, ttl_s: float) -> bool:
    """Returns whether a missing registration can mean a missing node (V1).

    It can if the agent's own lease is fresh, and after an outage of the store every node had a TTL
    to register again.

    Args:
        store: What the agent knows of the store's outages and of its own lease.
        now_s: Present time, on the same clock.
        ttl_s: Seconds after which a lease that is not renewed lapses.
    """
    own_lease_is_fresh = now_s - store.confirmed_s <= ttl_s / 2
    store_is_well = store.reachable and now_s - store.outage_end_s >= ttl_s
    return own_lease_is_fresh and store_is_well


def loss_of(view: View, node: str, now_s: float, policy: JobPolicy) -> str:
    """Returns why a member that is not registered is gone (V1, V2 and V4); empty: it may live.

    Args:
        view: What this agent sees.
        node: The member's node, for which the view says since when it is not registered.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, of which the TTL of a lease counts.
    """
    if not leases_are_conclusive(view.store, now_s, policy.lease_ttl_s):
        return ""
    after_s = view.missing_since_s[node] - policy.lease_ttl_s / 2
    if not _makes_steps(view, after_s, now_s, policy):
        return f"the lease of {node} lapsed"
    if _agent_is_lost(view, node, now_s, policy):
        return f"the lease of {node} lapsed, and its agent does not answer"
    return ""


def _agent_is_lost(view: View, node: str, now_s: float, policy: JobPolicy) -> bool:
    """Returns whether the agent of a member has been silent for so long that the steps of its
    workers count for nothing: V4.

    Args:
        view: What this agent sees.
        node: The member's node, for which the view says since when it is not registered.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, of which the TTL of a lease counts.
    """
    workers, silent_s = view.workers, view.unanswered_since_s.get(node)
    if view.world is None or silent_s is None or workers.held is None:
        return False
    if workers.held <= view.world.resume.step and not _is_whole_without(view.world.resume, node):
        return False
    unheld_s = max(0.0, view.missing_since_s[node] - workers.held_s)
    since_s = max(view.missing_since_s[node], workers.held_s)
    waited = now_s - since_s >= max(policy.lease_ttl_s, unheld_s)
    return waited and now_s - silent_s >= policy.lease_ttl_s


def _is_whole_without(resume: Resume, node: str) -> bool:
    """Returns whether the state that a generation starts from can be read without a node."""
    if resume.tier != "ram":
        return True
    ranks = {source.rank for source in resume.sources}
    return ranks == {source.rank for source in resume.sources if source.node != node}


def _makes_steps(view: View, after_s: float, now_s: float, policy: JobPolicy) -> bool:
    """Returns whether all members make steps, and made one after `after_s`: V3.

    Args:
        view: What this agent sees of its own workers, which step together with all others.
        after_s: Earliest time of the last step that still proves the others alive.
        now_s: Present time, on the same clock.
        policy: Limits and times, of which the TTL of a lease counts.
    """
    workers = view.workers
    trained = view.world is not None and workers.generation == view.world.generation
    quiet_s = now_s - workers.stepped_s
    waited_s = quiet_s if workers.finished else workers.silent_s
    most_s = max(policy.lease_ttl_s, PROOF_STEPS * workers.longest_step_s)
    goes_on = waited_s < most_s and quiet_s < PROOF_OF_LIFE_S
    return trained and workers.stepped_s >= after_s and goes_on


def request_graceful_stop(
    view: View,
    flags: int,
    kind: Literal["leave", "grow", "stop"],
    reason: str,
    now_s: float,
    policy: JobPolicy,
) -> Decision:
    """Requests a graceful change, by the control word where the workers have one, otherwise by the
    alarm.

    Workers that start slowly are not waited for: until all have their state in place no step is
    made, so an alarm loses none. It would where a node outside of the world holds a part of that
    state: then they are waited for, as long as that node serves it.

    Args:
        view: What this agent sees.
        flags: Bits of the control word that ask for the change.
        kind: Kind of the alarm, where one is raised instead.
        reason: Reason of the decision and of the alarm.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times; `handover_s` is how long a node outside of the world serves.
    """
    workers = view.workers
    slow = workers.running and (workers.plain or workers.late)
    if slow and not _reads_from_outside(view, now_s, policy):
        alarm = Alarm(node=view.me.node, kind=kind, reason=reason)
        return Decision((RaiseAlarm(alarm),), reason)
    if workers.requested & flags == flags:
        return wait(f"{reason}: waiting for the next boundary")
    if workers.attached:
        return Decision((RequestBoundaryStop(flags),), reason)
    return wait(f"{reason}: the workers are starting")


def _reads_from_outside(view: View, now_s: float, policy: JobPolicy) -> bool:
    """Returns whether a node that has left the world still serves a part of the state that the
    world starts from, and that no member holds.

    Args:
        view: What this agent sees.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times; `handover_s` bounds how long such a node serves.
    """
    world = view.world
    if world is None or world.resume.tier != "ram":
        return False
    serves_from_s = max(view.world_s or now_s, view.store.outage_end_s)
    members = {member.node for member in world.members}
    sources = world.resume.sources
    held = {source.rank for source in sources if source.node in members}
    lacks = any(source.rank not in held for source in sources)
    return lacks and now_s - serves_from_s < policy.handover_s
