"""Maps an agent's view of the cluster and the current time to its next actions, and says why.

Pure: `decide(view, now_s, policy)` reads no clock, file or socket. The agent calls it after every
event and performs the actions. A decision depends on the present state and not on what happened
before, so a repeated event changes nothing, and a restart of the loop loses nothing.

Rules of every agent; the first that applies counts:
 A1  `done` is written: stop the workers, and exit when they are gone.
 A2  `world` gives this registration a place in a newer generation, or in another one of the same
     number (the store has lost its data, and of two histories this one counts): start its workers.
 A3  `world` does not name this registration: stop the workers. If the node leaves, exit once the
     others have their state; otherwise wait as a spare. The oldest spare writes the next world when
     no member of `world` has been registered for a TTL. A spare beyond --spares exits, too.
 A4  A worker has failed: raise the alarm. The workers are past their time to make a step
     (`hang_rules`): ask each where it is, and dump the stacks. A worker that is found to blame has
     failed. If none is, report `stalled` until a step is made. Only a worker that a signal has
     suspended is past its time: examine that one.
 A5  An alarm is raised: answer `alive`, and stop the workers where they are; past the deadline,
     kill them. Kill those that a signal has suspended at once (H7 in `hang_rules`). If the alarm is
     of a hang, dump the stacks before any worker is stopped, and kill workers that cannot obey. If
     it is of bad input, and no node has trained yet, stop the workers ALIKE_S later: they may meet
     the same error.
 A6  A round is open, all workers have stopped and their shards are sealed: report `stopped` with
     the snapshots in memory. If no node can go on, or the job is to end (E2, E4 and E5 in
     `termination`): first save the newest whole snapshot, each node its part of it, and stay until
     that is done, for --save-timeout at most.
 A7  All workers have finished: report `finished`.
 A8  The node leaves, or it is the leader of a world that shall change or end, and workers train:
     request them to stop at a boundary. Workers that cannot be asked, or that start slowly and so
     are at no step yet, are stopped by an alarm, but not while they read a part of their state from
     a node that has left the world.
 A9  All workers have restored their state: report `restored`.
 A10 The node leaves by a deadline, and the time left is only enough to hand the state over: do not
     wait for the running step, raise the alarm. In a round, kill this node's workers that do not
     stop in half of that time. When all of it is over, exit, whatever the round still waits for.
 A11 The node leaves while the store is away: train on until it is back, for no node could write a
     world without this one. When the time left is only enough to save the state: stop the workers,
     save the snapshot that this node holds whole, in the order of members, and exit. This comes
     before A2.
 A12 All workers have finished, and etcd has not answered for --join-timeout: exit, for the job is
     over and perhaps no agent can ever write so. This comes before A2.
 A13 A later run of the job has taken the place of this node's: kill the workers, write nothing, and
     exit with SUPERSEDED when they are gone. This comes before all others.
 A14 A planned change may happen inside the workers' loops: see `planned`. An agent whose workers
     have gone over to a world enters it, and does not start them. This comes before A2.
The rules of the acting leader (L1 to L13) stand in `leader`.
Invariant: an agent writes about no generation but the one that `world` names, and every write is
conditioned on that document's revision.
"""

from __future__ import annotations

from math import inf
from typing import Literal

from elasticzero.errors import ExitCode, later_run_text
from elasticzero.launcher.protocol.actions import (
    Decision,
    DumpStacks,
    EnterWorld,
    ExitAgent,
    KillSuspended,
    KillUnresponsive,
    KillWorkers,
    PutReport,
    RaiseAlarm,
    Start,
    StopWorkers,
    WriteDone,
    WriteWorld,
    wait,
)
from elasticzero.launcher.protocol.documents import Alarm, Done, Failure, Phase, Report, World
from elasticzero.launcher.protocol.drain import (
    begin_drain,
    drain_without_store,
    exit_deadline_s,
    exit_unrecorded,
    leave_reason,
    must_drain_without_store,
    must_exit_unrecorded,
    stop_limit_s,
)
from elasticzero.launcher.protocol.hang_rules import (
    EXAMINATION_GRACE_S,
    EXAMINATION_LIMIT_S,
    HANG_STOP_S,
    STOPPED_S,
    due_s,
    overdue,
    step_limit_s,
    suspended,
    suspension_limit_s,
)
from elasticzero.launcher.protocol.leader import (
    form_first_world,
    gives_way,
    is_leader,
    lead,
    spare_take_over,
)
from elasticzero.launcher.protocol.planned.joining import come_in
from elasticzero.launcher.protocol.planned.proposal import (
    await_change,
    follow,
    is_about_to_propose,
    is_open,
    possible,
    propose,
    proposes_until_s,
)
from elasticzero.launcher.protocol.planned.switch import after_switch, enters, leaves
from elasticzero.launcher.protocol.policy import JobPolicy, with_operator_overrides
from elasticzero.launcher.protocol.regroup import close_round, others_may_save, save_held
from elasticzero.launcher.protocol.termination import exit_code_of
from elasticzero.launcher.protocol.view import GroupOrder, GroupOutcome, View

ALIKE_S = 1.0
"""Seconds for which workers that begin are not stopped after another node's bad input."""
READ = ("restored", "stalled", "finished")
"""Phases of a node that has read the state that it starts from."""


def decide(view: View, now_s: float, policy: JobPolicy) -> Decision:
    """Returns the next actions of this agent, and why.

    Args:
        view: What this agent sees of its node, the store and the cluster.
        now_s: Present time, on the monotonic clock of the view's times.
        policy: Limits of the user and times of the protocol, without operators' changes.
    """
    policy = with_operator_overrides(policy, view.control)
    workers, world = view.workers, view.world
    if view.later_run:
        return _give_way(view)
    if view.done is not None:
        return _wind_up(view, view.done)
    if must_drain_without_store(view, now_s, policy):
        return drain_without_store(view, now_s, policy)
    if must_exit_unrecorded(view, now_s, policy):
        return exit_unrecorded(view, policy)
    if world is None:
        return form_first_world(view, now_s, policy)
    index = world.find(view.me.node, view.me.incarnation)
    if index is None:
        return _outside(view, world, now_s, policy)
    another = workers.token not in ("", world.token)  # of the same number: see `outranks`
    if workers.generation < world.generation or another:
        if enters(view, world):
            return Decision((EnterWorld(world),), f"generation {world.generation}: {world.reason}")
        if world.resume.tier == "live":
            return _cannot_enter(view, world)
        return Decision((Start(world, index),), f"generation {world.generation}: {world.reason}")
    if view.round_s is not None:
        return _round(view, world, now_s, policy)
    return _training(view, world, now_s, policy)


def _cannot_enter(view: View, world: World) -> Decision:
    """Ends a generation that began without a stop, and whose workers this node does not have."""
    if view.alarm is not None:
        return wait(f"generation {world.generation} ends: {view.alarm.reason}")
    reason = f"{view.me.node} has no workers that have entered generation {world.generation}"
    return Decision((RaiseAlarm(Alarm(node=view.me.node, kind="failure", reason=reason)),), reason)


def quiet_until_s(view: View, decision: Decision, now_s: float, policy: JobPolicy) -> float:
    """Returns the time until which `decide` decides the same for a view that does not change.

    It is computed where agents wait for what wakes them: for the first world, for a place, for the
    next world, or for a change while their workers train. In every other state it is `now_s`.

    Args:
        view: What this agent sees of its node, the store and the cluster.
        decision: What was decided from it.
        now_s: Time of that, on the monotonic clock of the view's times.
        policy: Limits of the user and times of the protocol, without operators' changes.
    """
    policy = with_operator_overrides(policy, view.control)
    world = view.world
    odd = view.leaving or view.later_run or view.done is not None or view.remnants
    odd |= view.control.stop or view.workers.sealing or not view.store.reachable
    odd |= is_open(view) or (view.workers.prepared is not None and not view.workers.withdrawn)
    if decision.actions or odd:
        return now_s
    if world is None:
        return now_s if view.oldest else view.began_s + policy.join_timeout_s
    if world.find(view.me.node, view.me.incarnation) is None:
        waits = view.members is None and not view.surplus and not view.workers.running
        return inf if waits else now_s
    if view.round_s is None:
        return _trains_until_s(view, world, now_s, policy)
    if view.workers.running or view.members is not None or view.reports is not None:
        return now_s
    return view.round_s + policy.alive_s if view.alarm is None else inf


def _trains_until_s(view: View, world: World, now_s: float, policy: JobPolicy) -> float:
    """Returns the time until which nothing is to be decided about workers that train.

    Args:
        view: What this agent sees.
        world: World of the view, which names this registration; no round is open.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    workers = view.workers
    trains = (workers.restored or workers.plain) and workers.outcome is GroupOutcome.OPEN
    trains &= workers.order is GroupOrder.TRAIN and not workers.failed
    trains &= workers.examination == "none"
    changes = view.missing_since_s or any(not world.names(m) for m in (view.members or {}).values())
    if not trains or changes:
        return now_s
    limit_s = step_limit_s(workers, policy)
    in_loop_s = due_s(limit_s, in_loop=True) - workers.silent_s
    suspended_s = suspension_limit_s(policy) - workers.frozen_s if workers.frozen_s else inf
    longer_s = due_s(limit_s, in_loop=False) - workers.before_step_s
    until_s = now_s + min(in_loop_s, suspended_s, longer_s)
    waits = is_leader(view) and is_about_to_propose(view, world, now_s, policy)
    return min(until_s, proposes_until_s(view, now_s)) if waits else until_s


def _give_way(view: View) -> Decision:
    """Ends this node's part in a run that is over (A13)."""
    workers, reason = view.workers, later_run_text(view.me.run, view.later_run)
    if workers.running:
        return Decision(() if workers.killed else (KillWorkers(reason),), reason)
    return Decision((ExitAgent(ExitCode.SUPERSEDED),), reason)


def _wind_up(view: View, done: Done) -> Decision:
    workers = view.workers
    if workers.running and not workers.killed:
        return Decision((KillWorkers(f"the job is over: {done.reason}"),), "the job is over")
    if workers.running:
        return wait("the job is over: the workers are being stopped")
    last = {
        "failed": "the job has failed",
        "other": f"the job is over: {done.reason}",
        "stopped": f"the job is stopped: {done.reason}",
        "finished": f"the job is done: {done.reason}",
    }
    return Decision((ExitAgent(exit_code_of(done)),), last[done.outcome])


def _outside(view: View, world: World, now_s: float, policy: JobPolicy) -> Decision:
    """Decides for a registration that has no place in the world.

    Args:
        view: What this agent sees.
        world: World of the view.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    workers = view.workers
    if (coming := come_in(view, world, now_s, policy)) is not None:
        return coming
    if workers.running and leaves(view, world) and not _is_over(view, now_s, policy):
        return wait("left: its workers come to the boundary, and end")
    if workers.running and not workers.killed:
        reason = f"generation {world.generation} goes on without this node"
        return Decision((KillWorkers(reason),), reason)
    if not (view.leaving or view.surplus):
        return spare_take_over(view, world, now_s, policy)
    needed = world.resume.tier == "ram" and any(
        source.node == view.me.node for source in world.resume.sources
    )
    read = {n for n, r in (view.reports or {}).items() if r.phase in READ}
    unread = any(node not in read for node in world.nodes)
    if needed and unread and _waited_s(view, view.outside_s, now_s) < policy.handover_s:
        return wait("serving this node's snapshots until the others have read them")
    if view.surplus and not view.leaving:
        reason = f"left: there are {policy.max_nodes} nodes, and {policy.spares} wait (--spares)"
        return Decision((ExitAgent(ExitCode.LEFT),), reason)
    return Decision((ExitAgent(ExitCode.LEFT),), "left: the others have what this node held")


def _is_over(view: View, now_s: float, policy: JobPolicy) -> bool:
    """Returns whether workers that have left the others inside their loops have had their time to
    end.

    Args:
        view: What this agent sees.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, of which `stop_s` counts.
    """
    outside_s = view.outside_s if view.outside_s is not None else now_s
    late = now_s - max(view.workers.switched_s, outside_s) >= policy.stop_s
    return late or (view.notice is not None and now_s >= exit_deadline_s(view.notice))


def _training(view: View, world: World, now_s: float, policy: JobPolicy) -> Decision:
    """Decides while no round is open.

    Args:
        view: What this agent sees.
        world: World of the view, which names this registration.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    workers = view.workers
    if workers.failed:
        reason = _first_words(workers.failure)
        hung = workers.failure is not None and workers.failure.blame == "hung"
        final = workers.failure is not None and workers.failure.final
        in_doubt = hung and not workers.frozen_s  # H6
        kind: Literal["hang", "failure"] = "hang" if in_doubt else "failure"
        alarm = Alarm(node=view.me.node, kind=kind, reason=reason, final=final)
        return Decision((RaiseAlarm(alarm),), reason)
    late = overdue(workers, policy)
    if workers.examination == "none" and (why := late or suspended(workers, policy)) is not None:
        suspended_s = None if late is not None else suspension_limit_s(policy)
        dump = DumpStacks(step_limit_s(workers, policy), suspended_s)
        return Decision((dump,), f"{why}: the workers are examined")
    if workers.switched != "no":
        return after_switch(view, world, now_s, policy)
    nobody_waits = world.resume.tier != "ram"
    phase = view.my_report.phase if view.my_report is not None else None
    if late is not None and workers.stalled is not None:
        stalled = _report(view, "stalled", f"{late}: the workers here wait for others")
        if stalled.actions:
            return stalled
    elif (workers.restored or (workers.plain and nobody_waits)) and phase in (None, "stalled"):
        return _report(view, "restored", f"training, generation {world.generation}")
    elif phase == "restored" and possible(world, policy):
        why = leave_reason(view) if view.leaving else f"training, generation {world.generation}"
        changed = _report(view, "restored", why)
        if changed.actions:
            return changed
    if is_leader(view):
        later = is_about_to_propose(view, world, now_s, policy)
        decision = propose(view, world, now_s, policy)
        decision = decision or lead(view, world, now_s, policy, may_propose=later)
        if decision is not None and (decision.actions or not view.leaving):
            return decision  # while a leader that leaves waits for others' ends, it still leaves
    if workers.finished:
        return _report(view, "finished", "every worker here has finished")
    if (planned := follow(view, world, now_s, policy)) is not None:
        return planned
    if view.leaving:
        planned = await_change(view, world, now_s, policy)
        return planned or begin_drain(view, now_s, policy)
    if workers.restored or workers.plain:
        return wait(f"training, generation {world.generation}")
    return wait(f"generation {world.generation}: the workers are starting")


def _first_words(failure: Failure | None) -> str:
    if failure is None:
        return "a worker ended"
    if failure.blame == "peer":
        return f"rank {failure.rank} lost a peer"
    return f"rank {failure.rank}: {failure.message}"


def _report(view: View, phase: Phase, reason: str) -> Decision:
    report = Report(
        incarnation=view.me.incarnation,
        phase=phase,
        store_port=view.me.store_port,
        leaving=view.leaving,
        leave_reason=view.notice.reason if view.notice is not None else "",
        holdings=view.holdings if phase == "stopped" else (),
        failure=view.workers.failure
        if phase == "stopped"
        else view.workers.stalled
        if phase == "stalled"
        else None,
        final_step=view.workers.step if phase in ("finished", "stopped") else None,
        end_reason=view.workers.end_reason if phase == "finished" else "",
        ran=_has_run(view, phase),
        switched=_switched(view),
    )
    return wait(reason) if view.my_report == report else Decision((PutReport(report),), reason)


def _switched(view: View) -> str:
    """Returns the token of the generation that this node's workers have entered, though `world`
    does not name it; empty: they have entered none."""
    workers = view.workers
    return workers.prepared.token if workers.prepared and workers.switched == "entered" else ""


def _has_run(view: View, phase: Phase) -> bool:
    """Returns whether a plain script has been seen to run here in this generation."""
    reported = view.my_report is not None and view.my_report.ran
    return view.workers.plain and (reported or phase == "restored")


def _round(view: View, world: World, now_s: float, policy: JobPolicy) -> Decision:
    """Decides while a regroup round is open: by an alarm, or because workers left at a boundary.

    Args:
        view: What this agent sees.
        world: World of the view, which names this registration.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times, with operators' changes.
    """
    workers, opened_s = view.workers, view.round_s or now_s
    if view.alarm is None and now_s - opened_s >= policy.alive_s:
        alarm = Alarm(node=view.me.node, kind="silence", reason="not every node has answered")
        return Decision((RaiseAlarm(alarm),), "asking who is alive")
    if workers.running or workers.sealing:
        return _stopping(view, now_s, policy)
    stopped = _report(view, "stopped", "stopped, and said what memory holds")
    if stopped.actions:
        return stopped
    decision = wait("stopped; waiting for the next generation")
    if _time_is_up(view, now_s, policy):
        text = "left: its time is up, and what the round waits for did not come"
        if view.saving and view.saved_held is not None:
            text = f"left: its time is up; step {view.saved_held[1]}, held in memory, is not saved"
        return Decision((ExitAgent(ExitCode.LEFT),), text)
    if view.leaving and not view.control.stop and _nobody_goes_on(view, world, now_s, policy):
        if others_may_save(view, now_s, policy):
            return wait("leaving; first the others are to say what they hold")
        reason = "left: too few nodes remain to go on at once"
        decision = Decision((ExitAgent(ExitCode.LEFT),), reason)
    elif is_leader(view) and view.members is not None:
        decision = close_round(view, world, now_s, policy)
    going = any(isinstance(action, (WriteWorld, WriteDone)) for action in decision.actions)
    return decision if going else save_held(view, world, now_s, policy) or decision


def _stopping(view: View, now_s: float, policy: JobPolicy) -> Decision:
    """Decides while workers run and a round is open.

    An alarm that only asks which nodes are alive does not disturb workers on the way to a boundary
    that all have agreed on, unless they cannot get there, such as a suspended one.

    Args:
        view: What this agent sees.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times; `stop_s` and `save_s` bound how long workers may take.
    """
    workers, alarm = view.workers, view.alarm
    if alarm is None:
        return wait("waiting for the workers to come to the boundary and save their state")
    actions = list(_report(view, "alive", "").actions)
    opened_s, stop_sent_s = view.round_s or now_s, workers.aborted_s
    hang = alarm.kind == "hang"
    hung = hang or (workers.failure is not None and workers.failure.blame == "hung")
    if hang and stop_sent_s is None:
        waited_s = now_s - (view.alarm_s if view.alarm_s is not None else now_s)
        if workers.examination == "none" and waited_s < EXAMINATION_GRACE_S / 2:
            actions.append(DumpStacks(step_limit_s(workers, policy)))
        if waited_s < (
            EXAMINATION_LIMIT_S if workers.examination == "open" else EXAMINATION_GRACE_S
        ):
            return Decision(tuple(actions), f"{alarm.reason}: the workers are examined")
    if _may_fail_alike(view, alarm, now_s):
        return Decision(tuple(actions), f"{alarm.reason}: the workers here may fail alike")
    frozen = workers.stopped_s >= STOPPED_S
    patient = alarm.kind == "silence" and now_s - opened_s < policy.stop_s and not frozen
    stop_s = stop_limit_s(view, now_s if stop_sent_s is None else stop_sent_s, policy)
    stop_s = min(stop_s, HANG_STOP_S) if hung else stop_s
    if stop_sent_s is None and not patient:
        actions.append(StopWorkers(alarm.reason))
        if hung:
            actions.append(KillUnresponsive())
    if stop_sent_s is not None and not workers.killed:
        if now_s - stop_sent_s >= policy.save_s:
            actions.append(KillWorkers(f"not saved within {policy.save_s:g} s"))
        elif workers.saving < workers.running and now_s - stop_sent_s >= stop_s:
            actions.append(KillWorkers(f"not stopped within {stop_s:.3g} s", spare_saving=True))
    if not frozen or workers.killed:
        return Decision(tuple(actions), f"stopping: {alarm.reason}")
    text = f"stopping: {alarm.reason}; a worker here is stopped by a signal, and is killed"
    return Decision((*actions, KillSuspended()), text)


def _may_fail_alike(view: View, alarm: Alarm, now_s: float) -> bool:
    """Returns whether this node's workers are given time to meet the error of another node's
    workers.

    Where no node has trained yet, bad input is mostly that of all nodes.

    Args:
        view: What this agent sees.
        alarm: Alarm of the open round; only a final failure gives the workers time.
        now_s: Present time, on the clock of the view's times.
    """
    fresh = view.world is not None and not view.world.trained and not view.workers.step
    asked = view.workers.aborted_s is not None
    alarm_s = view.alarm_s if view.alarm_s is not None else now_s
    return alarm.final and fresh and not asked and now_s - alarm_s < ALIKE_S


def _time_is_up(view: View, now_s: float, policy: JobPolicy) -> bool:
    """Returns whether a leaving node's deadline has passed in a round that waits for more than
    workers.

    Args:
        view: What this agent sees; without a notice there is no deadline.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times; a round older than `stop_s` waits for more than workers.
    """
    waits = view.saving or _waited_s(view, view.round_s, now_s) >= policy.stop_s
    return view.notice is not None and waits and now_s >= exit_deadline_s(view.notice)


def _nobody_goes_on(view: View, world: World, now_s: float, policy: JobPolicy) -> bool:
    """Returns whether a leaving node waits in vain for a world without it.

    Args:
        view: What this agent sees.
        world: World of the view, whose round is open.
        now_s: Present time, on the clock of the view's times.
        policy: Limits and times; the wait is short where fewer than MIN nodes remain and no other
            build takes over, or all leave.
    """
    waited_s = _waited_s(view, view.round_s, now_s)
    others = [member for member in world.members if member.node != view.me.node]
    few = len(others) < policy.min_nodes and not gives_way(view, world, others, policy)
    few |= _all_leave(view, world)
    return waited_s >= (2 * policy.alive_s if few else policy.handover_s)


def _waited_s(view: View, since_s: float | None, now_s: float) -> float:
    """Returns the seconds in which other nodes could have acted; time in which the store was away
    does not count.

    Args:
        view: What this agent sees of the store's outages.
        since_s: Time at which the wait began; None: it begins now.
        now_s: Present time, on the same clock.
    """
    return now_s - max(since_s or now_s, view.store.outage_end_s)


def _all_leave(view: View, world: World) -> bool:
    """Returns whether every node of the world leaves, and no other node waits for a place."""
    if view.members is None or any(not world.names(m) for m in view.members.values()):
        return False
    reports = [(view.reports or {}).get(member.node) for member in world.members]
    return all(report is not None and report.leaving for report in reports)
