"""Decides what happens once the workers have gone over to a proposed generation at a boundary.

Pure. The workers do that without a message to the store; `world` names the generation before until
it is written. Rules:
 PS1  From the boundary on the proposal is the world, whatever becomes of its document: the agents
     whose workers have entered it write `world` from it, the first member at once, and each other
     one a second later than the member before it. They all write the same.
 PS2  That write is refused where an alarm of the world before stands, and an alarm of that world is
     refused once it does not stand any more. So a world comes from a proposal or from a round, and
     never from both.
 PS3  Until then a failure is an alarm of the world before, and its round a round like any other.
     Snapshots of the generation that was entered count in it. The next world has another token, and
     a number above that generation's.
 PS4  An agent whose workers were prepared for the world that it reads enters it, and starts none.
 PS5  A node that the others go on without waits until it reads that world, which does not name it.
      Then it exits if it leaves, and else waits for a place. If its deadline comes first, it exits
      then: no other node needs what it holds. Its workers are not killed before they have come to
      the boundary: others may come to it through them.
 PS6  Where all nodes that went on are lost before that, nobody is left to write the world. A node
      that they went on without ends the world before by an alarm: it may hold the only state.
"""

from __future__ import annotations

from elasticzero.errors import ExitCode
from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.protocol.actions import (
    Decision,
    ExitAgent,
    RaiseAlarm,
    WriteWorld,
    wait,
)
from elasticzero.launcher.protocol.documents import Alarm, Ancestor, Proposal, World
from elasticzero.launcher.protocol.drain import exit_deadline_s, leave_reason
from elasticzero.launcher.protocol.failure_policy import (
    failures_without_progress,
    progress_floor,
    setbacks,
    strikes,
)
from elasticzero.launcher.protocol.leader import loss_of
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.regroup import GONE_AT_ONCE, left_out_after
from elasticzero.launcher.protocol.view import View

WRITE_AFTER_S = 1.0
"""Seconds by which each member writes the world later than the one before it."""
UNKNOWN_STEP = -1
"""Step of a world whose boundary is not known yet."""
KEPT_ANCESTORS = 16
"""Number of generations before it whose snapshots a world admits."""


def world_after(
    world: World, proposal: Proposal, step: int = UNKNOWN_STEP, lasted_s: float = 0.0
) -> World:
    """Returns the world that a proposal makes of another one.

    Args:
        world: World that the proposal changes.
        proposal: The proposal.
        step: Boundary at which the workers go over to it; UNKNOWN_STEP: they have not.
        lasted_s: Seconds for which `world` was seen.
    """
    count = failures_without_progress(world, step, None, {})
    resume = Resume(tier="live", step=step)
    return World(
        generation=proposal.generation,
        token=proposal.token,
        members=proposal.members,
        strategy=world.strategy,
        shard=world.shard,
        redundancy=world.redundancy,
        resume=resume,
        reason=proposal.reason,
        fruitless=count,
        furthest=progress_floor(world, step, count),
        bad_steps=world.bad_steps,
        micro_batch=world.micro_batch,
        left_out=left_out_after(world, resume, {}),
        setbacks=setbacks(world, step, None),
        strikes=strikes(world, {}, lasted_s),
        trained=sum(world.names(member) for member in proposal.members),
        proofs=world.proofs,
        release=world.release,
        torch=world.torch,
        ancestors=_ancestors(world, step),
        time_spent=world.time_spent,
    )


def _ancestors(world: World, step: int) -> tuple[Ancestor, ...]:
    """Returns the states before `step` that are on the lineage of a world that follows one without
    a stop."""
    resume, before = world.resume, world.ancestors
    if resume.tier == "ram":
        before = (Ancestor(generation=resume.generation, first=resume.step, last=resume.step),)
    last = Ancestor(generation=world.generation, first=resume.step, last=step)
    return (*before, last)[-KEPT_ANCESTORS:]


def enters(view: View, world: World) -> bool:
    """Returns whether the workers of this node are those of a world that is new to their agent
    (PS4)."""
    prepared, me = view.workers.prepared, view.me
    if prepared is None or prepared.token != world.token:
        return False
    return prepared.find(me.node, me.incarnation) is not None


def leaves(view: View, world: World) -> bool:
    """Returns whether the workers of this node leave the others at the boundary from which on they
    are a world's (PS5)."""
    prepared = view.workers.prepared
    return prepared is not None and prepared.token == world.token and not enters(view, world)


def after_switch(view: View, world: World, now_s: float, policy: JobPolicy) -> Decision:
    """Decides for an agent whose workers have gone over to a generation that `world` does not name
    yet, or have left it to the others (PS1, PS5, PS6).

    Args:
        view: What this agent sees.
        world: World of the view; no round is open.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, of which the TTL of a lease counts.
    """
    workers = view.workers
    proposal = workers.prepared
    assert proposal is not None, "workers go over to what they were prepared for"
    index = proposal.find(view.me.node, view.me.incarnation)
    if workers.switched == "left" or index is None:
        if view.notice is not None and now_s >= exit_deadline_s(view.notice):
            return Decision((ExitAgent(ExitCode.LEFT),), "left: the others go on without it")
        missing, staying = view.missing_since_s, [member.node for member in proposal.members]
        if all(node in missing and loss_of(view, node, now_s, policy) for node in staying):
            reason = f"all nodes that went on without {view.me.node} are lost"
            alarm = Alarm(node=view.me.node, kind="lapse", reason=reason)
            return Decision((RaiseAlarm(alarm, lost=staying[0]),), reason)
        why = leave_reason(view) if view.leaving else f"{view.me.node} gives up its place"
        return wait(f"{why}: the others have gone on without it")
    waited_s = now_s - workers.switched_s
    if not view.store.reachable or waited_s < WRITE_AFTER_S * index:
        return wait(f"generation {proposal.generation} trains, and is about to be recorded")
    lasted_s = now_s - (view.world_s if view.world_s is not None else now_s)
    following = world_after(world, proposal, workers.switched_step, lasted_s)
    return Decision((WriteWorld(following, _gone(view, proposal)),), following.reason)


def _gone(view: View, proposal: Proposal) -> tuple[str, ...]:
    """Returns the leavers whose registrations end with the world before."""
    members = view.members or {}
    registered = [node for node in proposal.leavers if node in members]
    gone = [node for node in registered if view.world is None or view.world.names(members[node])]
    return tuple(gone[:GONE_AT_ONCE])
