"""Decides what happens until all ranks go over to a proposed generation at one boundary.

Pure. A node leaves, or gives up its place because operators have lowered MAX, without a stop of the
others where the world allows it (`possible`). Nothing of this is needed for that: whatever goes
wrong here, it happens by a stop at a boundary, as `drain` and `leader` decide. Rules:
 PL1  A node that is to leave says so in its report of the running generation, and waits for a
     proposal for PLAN_S, or for a quarter of the time that its deadline leaves. The acting leader
     does not wait where it sees that too few nodes would stay.
 PL2  The acting leader writes the proposal, once all members train and their reports have come: the
     members that stay keep their order, and where operators have lowered MAX the last ones give
     up their places (L6 in `leader`). It writes none where a stop is needed anyway: where fewer
     than MIN would be left, where a node waits for a place that is free then, where nodes of
     another build are to go on (BD3 in `placement`), or where the job is to end. Where ranks divide
     the state, there must be a snapshot of this generation of which the nodes that stay hold all
     parts: the next generation has none of its own at first.
 PL3  A world has one proposal at most. It is written on condition that the world stands, without an
     alarm; and it is withdrawn by a word in it, not taken back, so that no other can follow.
 PL4  Each agent tells its workers to prepare for a proposal, and withdraws that once it is dead.
     Workers that have prepared for one are never told to prepare for another one of their world.
 PL5  A proposal is withdrawn by whichever agent finds a reason: a worker cannot be prepared, a
     member that stays leaves too or has lost its registration, the job is to end, the leaver's
     deadline comes near, or PREPARE_S have passed.
 PL6  An alarm ends the generation, and with it the proposal: no agent tells its workers to prepare.
     They may still go over to it, where all of them were prepared before they were stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    parked_text,
)
from elasticzero.launcher.protocol.placement import as_registered, replica_sources
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import GroupOrder, GroupOutcome, View

PLAN_S = 2.0
"""Maximum seconds for which a node that is to leave waits for a proposal."""
PREPARE_S = 10.0
"""Seconds after which a proposal is withdrawn that the workers have not followed."""
PLAN_SHARE, PREPARE_SHARE = 0.25, 0.5
"""Shares of the time from a notice to the last boundary that is waited for: a leaver waits no
longer for a proposal, and for the workers to be prepared."""


STRATEGIES = ("ddp", "zero1", "zero2")
"""Strategies whose ranks can become those of another world inside their loops."""


def possible(world: World, policy: JobPolicy) -> bool:
    """Returns whether a planned change of this world may happen inside the workers' loops.

    All nodes must be of this release: `proofs` says so.
    """
    able = world.strategy in STRATEGIES
    able &= (world.shard, world.redundancy) == ("world", "snapshot")
    return policy.changes_inside and world.proofs and able and len(world.members) > 1


def is_open(view: View) -> bool:
    """Returns whether the world of the view has a proposal that is not withdrawn."""
    return view.proposal is not None and not view.proposal.withdrawn


def propose(view: View, world: World, now_s: float, policy: JobPolicy) -> Decision | None:
    """Decides for the leader: returns a proposal without the nodes that leave or are too many, if
    there is to be one (PL2).

    Args:
        view: What this agent sees.
        world: World of the view, which names this registration; no round is open.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    new = view.proposal is None and view.workers.prepared is None
    if not new or not possible(world, policy) or not _is_steady(view):
        return None
    reports = _reports(view, world)
    lowered = view.control.nnodes is not None and len(world.members) > policy.max_nodes
    if reports is None or not (lowered or any(report.leaving for report in reports)):
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
    if not all_state_runs((view.members or {}).values()):
        return None
    has_room = len(staying) < policy.max_nodes
    if has_room and _is_replaced(view, world, now_s):
        return None
    if any(view.control.drains(member) for member in staying):
        return None
    if gives_way(view, world, staying, policy) or not _parts_stay(view, world, staying):
        return None
    leavers = [(member.node, report.leave_reason) for member, report in pairs if report.leaving]
    reasons = [f"{node} leaves: {why}" if why else f"{node} left" for node, why in leavers]
    if parked := [member.node for member in ready[len(staying) :]]:
        reasons.append(parked_text(parked, len(staying)))
    reason = "; ".join(reasons)
    proposal = Proposal(
        generation=world.generation + 1,
        token=view.token,
        of=world.token,
        members=tuple(as_registered(member, view.members) for member in staying),
        leavers=tuple(node for node, _ in leavers),
        reason=reason,
    )
    return Decision((WriteProposal(proposal),), f"{reason}: the others are to go on inside")


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
    held = view.workers.held
    if world.strategy == "ddp" or (held is None and view.workers.stepped_s):
        return True
    if held is None or held <= world.resume.step:
        return False
    nodes = {member.node for member in staying}
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


def _is_replaced(view: View, world: World, now_s: float) -> bool:
    """Returns whether another node waits for the place that is left.

    Args:
        view: What this agent sees.
        world: World of the view.
        now_s: Present time, on the clock of the view's times.
    """
    aside = quarantined(world.strikes, world.strikes, view.struck_s, now_s)
    return any(member.node not in aside for member in joiners_of(view, world))


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
    if prepared is None and workers.restored:
        gone = ", ".join(without(world, proposal))
        return Decision((PrepareWorkers(proposal),), f"the workers prepare to go on without {gone}")
    return None


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
    stays = proposal.find(me.node, me.incarnation) is not None
    if not possible(world, policy):
        return f"{me.node} does not take part in one"
    if workers.refused:
        return workers.refused
    if workers.order is not GroupOrder.TRAIN or workers.outcome is not GroupOutcome.OPEN:
        return f"the workers on {me.node} stop"
    if view.control.stop:
        return "an operator stops the job"
    if stays and view.leaving:
        return f"{me.node} is to leave too"
    if not stays and now_s >= _share_s(view, PREPARE_SHARE, policy):
        return f"there is too little time left for {me.node}"
    staying = {member.node for member in proposal.members}
    if missing := sorted(staying & view.missing_since_s.keys()):
        return f"{missing[0]} is not registered"
    odd = [n for n in sorted(staying) if _does_not_stay((view.reports or {}).get(n))]
    if odd:
        return f"{odd[0]} is to leave too, or does not train"
    waited_s = now_s - (view.proposal_s if view.proposal_s is not None else now_s)
    if waited_s >= PREPARE_S:
        return f"not all workers were prepared within {PREPARE_S:g} s"
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
