"""Decides what an agent does whose node is to come into a proposed generation.

Pure. Rules:
 PJ1  It starts its workers for the proposal. They run their script up to `session.restore`, beside
      the training of the others, and its report says then that they are ready.
 PJ2  If they cannot come in, or the node is to leave, it withdraws the proposal. Where one is
      withdrawn its workers still wait, for COME_S at most: the others may have
      promised each other to go over before they knew. Then they are ended. The node waits for a
      place as before, and comes in by a stop of all.
 PJ3  Where no member of the world is registered any more, its workers are ended, for nobody will go
      over. Then it takes part in what spares do.
 PJ4  Once its workers have gone over to the generation with all others, it does what each of its
      members does (`switch`). A round of the world before ends them: the next world has its place.
"""

from __future__ import annotations

from dataclasses import replace

from elasticzero.launcher.protocol.actions import (
    Decision,
    PrepareWorkers,
    PutReport,
    WriteProposal,
    wait,
)
from elasticzero.launcher.protocol.documents import Report, World
from elasticzero.launcher.protocol.drain import exit_deadline_s
from elasticzero.launcher.protocol.leader import all_are_lost
from elasticzero.launcher.protocol.planned.proposal import COME_S, objection_of_node
from elasticzero.launcher.protocol.planned.switch import after_switch
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import View


def come_in(view: View, world: World, now_s: float, policy: JobPolicy) -> Decision | None:
    """Decides for a registration that has no place in the world; None: no proposal names it.

    Args:
        view: What this agent sees.
        world: World of the view.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    proposal, workers, me = view.proposal, view.workers, view.me
    if proposal is None or view.alarm is not None:
        return None
    prepared = workers.prepared is not None and workers.prepared.token == proposal.token
    if proposal.find(me.node, me.incarnation) is None or (prepared and workers.killed):
        return None
    if prepared and workers.switched != "no":
        return after_switch(view, world, now_s, policy)
    if prepared and all_are_lost(view, world, now_s, policy):
        return None
    if proposal.withdrawn:
        since_s = view.proposal_s if view.proposal_s is not None else now_s
        waits = workers.running and not workers.failed and now_s - since_s < COME_S
        gone = view.notice is not None and now_s >= exit_deadline_s(view.notice)
        text = f"the change inside the loop is withdrawn: {proposal.withdrawn}"
        return wait(text) if prepared and waits and not gone else None
    failure = workers.failure if prepared else None
    why = f"{me.node} cannot come in: {failure.message}" if failure is not None else ""
    why = why or objection_of_node(view, world, proposal, policy)
    if why and view.store.reachable:
        text = f"the change inside the loop is withdrawn: {why}"
        return Decision((WriteProposal(replace(proposal, withdrawn=why)),), text)
    if not prepared:
        if workers.running:
            return None
        text = f"generation {proposal.generation} is proposed, into which this node comes"
        return Decision((PrepareWorkers(proposal),), f"{text}: its workers start")
    if not workers.awaits:
        return wait("the workers start beside the training of the others")
    report = Report(incarnation=me.incarnation, phase="ready")
    reason = "the workers wait for the others' boundary"
    return wait(reason) if view.my_report == report else Decision((PutReport(report),), reason)
