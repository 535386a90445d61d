"""Decides what happens until all ranks go over to a proposed generation at one boundary.

Pure. A node leaves, or gives up its place because operators have lowered MAX, or comes in, without
a stop of the others where the world allows it (`possible`). Nothing of this is needed for that:
whatever goes wrong here, it happens by a stop at a boundary, as `drain` and `leader` decide. Rules:
 PL1  A node that is to leave says so in its report of the running generation, and waits for a
     proposal for PLAN_S, or for a quarter of the time that its deadline leaves. The acting leader
     does not wait where it sees that too few nodes would stay.
 PL2  The acting leader writes the proposal, once all members train and their reports have come: the
     members that stay keep their order, and where operators have lowered MAX the last ones give
     up their places (L6 in `leader`). It writes none where a stop is needed anyway: where fewer
     than MIN would be left, where nodes of another build are to go on (BD3 in `placement`), or
     where the job is to end. Where ranks divide the state, there must be a snapshot of this
     generation of which the nodes that stay hold all parts: the next generation has none of its
     own at first. If nobody leaves, and no member is quarantined (B4 in `failure_policy`), it
     proposes the nodes that the world is to take in (L6), as its last members (`joining`).
 PL3  A world has one proposal at most. It is written on condition that the world stands, without an
     alarm; and it is withdrawn by a word in it, not taken back, so that no other can follow.
 PL4  Each agent tells its workers to prepare for a proposal, where nodes come in once these are
     ready, and withdraws that once it is dead. Workers that have prepared for one are never told to
     prepare for another one of their world.
 PL5  A proposal is withdrawn by whichever agent finds a reason: a worker cannot be prepared, a
     member of the proposal leaves or has lost its registration, MAX is too low for it, the job is
     to end, the leaver's deadline comes near, or PREPARE_S have passed, or COME_S until nodes that
     come in are ready: PREPARE_S where more nodes wait.
 PL6  An alarm ends the generation, and with it the proposal: no agent tells its workers to prepare.
     They may still go over to it, where all of them were prepared before they were stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from elasticzero.launcher.protocol.actions import (
    Decision,
    PrepareWorkers,
    WithdrawPreparation,
    WriteProposal,
    wait,
)
from elasticzero.launcher.protocol.documents import Member, Proposal, Report, World
from elasticzero.launcher.protocol.drain import boundary_deadline_s, leave_reason
from elasticzero.launcher.protocol.failure_policy import quarantined
from elasticzero.launcher.protocol.leader import (
    all_state_runs,
    gives_way,
    joiners_of,
    joining_text,
    parked_text,
    taken_in,
)
from elasticzero.launcher.protocol.placement import as_registered, replica_sources
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import GroupOrder, GroupOutcome, View

PLAN_S = 2.0
"""Maximum seconds for which a node that is to leave waits for a proposal, and for which the leader
of a new world waits until it can propose another size."""
PREPARE_S, PREPARE_GPUS_S = 10.0, 30.0
"""Seconds after which a proposal is withdrawn that the workers have not followed; the second where
they may use NCCL."""
COME_S = 300.0
"""Seconds that the scripts of nodes that come in may take until they are ready."""
PLAN_SHARE, PREPARE_SHARE = 0.25, 0.5
"""Shares of the time from a notice to the last boundary that is waited for: a leaver waits no
longer for a proposal, and for the workers to be prepared."""


def possible(world: World, policy: JobPolicy) -> bool:
    """Returns whether a planned change of this world may happen inside the workers' loops.

    All nodes must be of this release: `proofs` says so.
    """
    able = world.shard == "world" and world.redundancy == "snapshot"
    return policy.changes_inside != "off" and world.proofs and able


def is_open(view: View) -> bool:
    """Returns whether the world of the view has a proposal that is not withdrawn."""
    return view.proposal is not None and not view.proposal.withdrawn


def propose(view: View, world: World, now_s: float, policy: JobPolicy) -> Decision | None:
    """Decides for the leader: returns a proposal without the nodes that leave or are too many, or
    with those that come in, if there is to be one (PL2).

    Args:
        view: What this agent sees.
        world: World of the view, which names this registration; no round is open.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    if not _is_first(view) or not possible(world, policy) or not _is_steady(view):
        return None
    reports = _reports(view, world)
    lowered = view.control.nnodes is not None and len(world.members) > policy.max_nodes
    if reports is None or not all_state_runs((view.members or {}).values()):
        return None
    leave = any(report.leaving for report in reports)
    aside = quarantined(world.strikes, world.strikes, view.struck_s, now_s)
    keeps = not (leave or lowered or any(node in aside for node in world.nodes))
    coming = taken_in(view, world, now_s, policy) if keeps else []
    if not (leave or lowered or coming):
        return None
    pairs = list(zip(world.members, reports, strict=True))
    ready = [
        replace(member, store_port=_fresh_port(view, member, report))
        for member, report in pairs
        if not report.leaving
    ]
    staying = ready[: policy.max_nodes] if lowered else ready
    enough = policy.min_nodes <= len(staying) <= policy.max_nodes
    if not enough or not staying:
        return None
    if any(view.control.drains(member) for member in staying):
        return None
    if gives_way(view, world, staying, policy) or not _parts_stay(view, world, staying):
        return None
    leavers = [(member.node, report.leave_reason) for member, report in pairs if report.leaving]
    reasons = [f"{node} leaves: {why}" if why else f"{node} left" for node, why in leavers]
    if parked := [member.node for member in ready[len(staying) :]]:
        reasons.append(parked_text(parked, len(staying)))
    reason = "; ".join(reasons) or joining_text(coming)
    proposal = Proposal(
        generation=world.generation + 1,
        token=view.token,
        of=world.token,
        members=tuple(as_registered(member, view.members) for member in (*staying, *coming)),
        leavers=tuple(node for node, _ in leavers),
        reason=reason,
    )
    how = "it prepares beside the training" if coming else "the others are to go on inside"
    return Decision((WriteProposal(proposal),), f"{reason}: {how}")


def _is_first(view: View) -> bool:
    """Returns whether the world has had no proposal yet, as far as this agent sees (PL3)."""
    return view.proposal is None and view.workers.prepared is None


def is_about_to_propose(view: View, world: World, now_s: float, policy: JobPolicy) -> bool:
    """Returns whether the leader waits with a stop for another size of the world, because what a
    proposal needs may be about to come: reports of members, a snapshot.

    Args:
        view: What the acting leader sees.
        world: World of the view.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    return _is_first(view) and possible(world, policy) and now_s < proposes_until_s(view, now_s)


def proposes_until_s(view: View, now_s: float) -> float:
    """Returns the time until which the leader of a new world waits with a stop."""
    return (view.world_s if view.world_s is not None else now_s) + PLAN_S


def _is_steady(view: View) -> bool:
    """Returns whether nothing but the leave is to happen, as far as this agent sees."""
    workers = view.workers
    trains = workers.restored and workers.order is GroupOrder.TRAIN
    trains &= workers.outcome is GroupOutcome.OPEN and not workers.failed
    quiet = view.store.reachable and view.members is not None and not view.missing_since_s
    return trains and quiet and not (view.control.stop or view.remnants)


def _parts_stay(view: View, world: World, staying: Sequence[Member]) -> bool:
    """Returns whether the nodes that stay hold all parts of the newest snapshot, as far as
    snapshots decide what a lost worker costs.

    Args:
        view: What the acting leader sees.
        world: World of the view.
        staying: Members that are to stay.
    """
    held, nodes = view.workers.held, {member.node for member in staying}
    all_stay = nodes.issuperset(world.nodes)
    if all_stay or world.strategy == "ddp" or (held is None and view.workers.stepped_s):
        return True
    if held is None or held <= world.resume.step:
        return False
    stays = [member.node in nodes for member in world.members]
    sources = replica_sources([member.zone for member in world.members])
    replicated = {source for source, stay in zip(sources, stays, strict=True) if stay}
    return all(stay or index in replicated for index, stay in enumerate(stays))


def _reports(view: View, world: World) -> list[Report] | None:
    """Returns the reports of all members in their order; None: one does not train, or has not said
    so."""
    put = [(view.reports or {}).get(member.node) for member in world.members]
    train = [report for report in put if report is not None and report.phase == "restored"]
    return train if len(train) == len(put) else None


def _fresh_port(view: View, member: Member, report: Report) -> int:
    """Returns the port for rank 0's store that this member has bound.

    Args:
        view: What this agent sees.
        member: A member of the world.
        report: Its report of this generation.
    """
    return view.me.store_port if member.node == view.me.node else report.store_port


def follow(view: View, world: World, now_s: float, policy: JobPolicy) -> Decision | None:
    """Decides what an agent does about the proposal of its world; None: nothing (PL4, PL5).

    Args:
        view: What this agent sees.
        world: World of the view, which names this registration; no round is open.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    proposal, workers = view.proposal, view.workers
    prepared = workers.prepared
    if prepared is not None and not workers.withdrawn:
        why = _death(prepared, proposal)
        if why:
            return Decision((WithdrawPreparation(why),), why)
    if proposal is None or proposal.withdrawn or not view.store.reachable:
        return None
    why = _objection(view, world, proposal, now_s, policy)
    if why:
        text = f"the change inside the loop is withdrawn: {why}"
        return Decision((WriteProposal(replace(proposal, withdrawn=why)),), text)
    coming = coming_in(world, proposal)
    if coming and not proposal.ready:
        if not _are_ready(view, coming):
            return None
        names = ", ".join(member.node for member in coming)
        ready = WriteProposal(replace(proposal, ready=True))
        return Decision((ready,), f"{names} is ready: the workers are to prepare")
    if prepared is None and workers.restored:
        gone = ", ".join(without(world, proposal))
        how = f"without {gone}" if gone else f"with {', '.join(m.node for m in coming)}"
        return Decision((PrepareWorkers(proposal),), f"the workers prepare to go on {how}")
    return None


def coming_in(world: World, proposal: Proposal) -> list[Member]:
    """Returns the members of a proposal that are not of the world that it changes."""
    return [member for member in proposal.members if not world.names(member)]


def _are_ready(view: View, coming: Sequence[Member]) -> bool:
    """Returns whether the workers of these nodes wait for the others, as far as this agent sees."""
    reports = view.reports or {}
    return all(
        (report := reports.get(member.node)) is not None
        and (report.phase, report.incarnation) == ("ready", member.incarnation)
        for member in coming
    )


def without(world: World, proposal: Proposal) -> list[str]:
    """Returns the members that a proposal leaves out, by their nodes and in their order."""
    return [m.node for m in world.members if proposal.find(m.node, m.incarnation) is None]


def _death(prepared: Proposal, proposal: Proposal | None) -> str:
    """Returns why the proposal that workers prepare for is dead; empty: it is not.

    Args:
        prepared: Proposal that the workers were told of.
        proposal: Proposal of the world in the store, as this agent sees it; None: there is none,
            because the store has lost it.
    """
    if proposal is None or proposal.token != prepared.token:
        return "the proposal is gone"
    return proposal.withdrawn


def _objection(
    view: View, world: World, proposal: Proposal, now_s: float, policy: JobPolicy
) -> str:
    """Returns the reason for which this agent withdraws a proposal; empty: it has none (PL5).

    Args:
        view: What this agent sees.
        world: World of the view.
        proposal: Its proposal, which is not withdrawn.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    workers, me = view.workers, view.me
    if why := objection_of_node(view, world, proposal, policy):
        return why
    stays = proposal.find(me.node, me.incarnation) is not None
    if workers.order is not GroupOrder.TRAIN or workers.outcome is not GroupOutcome.OPEN:
        return f"the workers on {me.node} stop"
    if not stays and now_s >= _share_s(view, PREPARE_SHARE, policy):
        return f"there is too little time left for {me.node}"
    coming = coming_in(world, proposal)
    staying = {member.node for member in proposal.members} - {member.node for member in coming}
    if view.members is not None:
        gone = [m.node for m in coming if not _is_registered(m, view.members)]
        if gone:
            return f"{gone[0]} is not registered"
    if missing := sorted(staying & view.missing_since_s.keys()):
        return f"{missing[0]} is not registered"
    odd = [n for n in sorted(staying) if _does_not_stay((view.reports or {}).get(n))]
    if odd:
        return f"{odd[0]} is to leave too, or does not train"
    waited_s = now_s - (view.proposal_s if view.proposal_s is not None else now_s)
    if coming and not proposal.ready:
        others_wait = len(proposal.members) < policy.max_nodes and len(coming) < len(
            joiners_of(view, world)
        )
        limit_s = PREPARE_S if others_wait and view.members is not None else COME_S
        late = waited_s >= limit_s
        return f"{coming[0].node} was not ready within {limit_s:g} s" if late else ""
    limit_s = PREPARE_GPUS_S if policy.changes_inside == "on" else PREPARE_S
    if waited_s >= limit_s:
        return f"not all workers were prepared within {limit_s:g} s"
    return ""


def _is_registered(member: Member, members: Mapping[str, Member]) -> bool:
    registered = members.get(member.node)
    return registered is not None and registered.incarnation == member.incarnation


def objection_of_node(view: View, world: World, proposal: Proposal, policy: JobPolicy) -> str:
    """Returns the reason for which this node alone cannot follow a proposal, whether it is a member
    of the world or comes in; empty: it can.

    Args:
        view: What this agent sees.
        world: World of the view.
        proposal: Its proposal, which is not withdrawn.
        policy: Limits and times, with operators' changes.
    """
    me = view.me
    if not possible(world, policy):
        return f"{me.node} does not take part in one"
    if view.workers.refused:
        return view.workers.refused
    if view.control.stop:
        return "an operator stops the job"
    if view.leaving and proposal.find(me.node, me.incarnation) is not None:
        return f"{me.node} is to leave" + " too" * world.names(me)
    if len(proposal.members) > max(policy.max_nodes, len(world.members)):
        return f"there is room for {policy.max_nodes} nodes alone"
    return ""


def _does_not_stay(report: Report | None) -> bool:
    """Returns whether a report says that its node does not go on to train here."""
    return report is not None and (report.leaving or report.phase not in ("restored", "stalled"))


def _share_s(view: View, share: float, policy: JobPolicy) -> float:
    """Returns the end of a share of the time that a leaving node has until the last boundary that
    it waits for; infinite: it has no deadline.

    Args:
        view: What this agent sees, with the notice.
        share: Share of that time.
        policy: Limits and times, of which `leave_margin_s` counts.
    """
    deadline_s = boundary_deadline_s(view.notice, policy)
    if view.notice is None or deadline_s == float("inf"):
        return float("inf")
    return view.notice.received_s + share * (deadline_s - view.notice.received_s)


def await_change(view: View, world: World, now_s: float, policy: JobPolicy) -> Decision | None:
    """Decides for a node that is to leave: returns a wait as long as it may leave without a stop of
    the others; None: it asks for a stop (PL1).

    Args:
        view: What this agent sees.
        world: World of the view, which names this registration; no round is open.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    workers, report = view.workers, view.my_report
    leaving = {view.me.node}
    leaving |= {node for node, other in (view.reports or {}).items() if other.leaving}
    staying = [member for member in world.members if member.node not in leaving]
    if not possible(world, policy) or view.control.stop:
        return None
    if not staying or len(staying) < policy.min_nodes:
        return None
    if not workers.restored or workers.requested or workers.refused or not view.store.reachable:
        return None
    reason = leave_reason(view)
    if view.proposal is None:
        if report is None or not report.leaving or view.asked_s is None:
            return None
        until_s = min(view.asked_s + PLAN_S, _share_s(view, PLAN_SHARE, policy))
        return wait(f"{reason}: waiting for a proposal") if now_s < until_s else None
    me = view.me
    if view.proposal.withdrawn or view.proposal.find(me.node, me.incarnation) is not None:
        return None
    return wait(f"{reason}: waiting until the others are prepared to go on without it")
