"""Every rule of `decide`, one line each: what is seen, and what is done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticzero.errors import ExitCode
from elasticzero.ipc.assignment import Resume, Source
from elasticzero.ipc.messages import FLAG_GROW, FLAG_LEAVE, FLAG_STOP
from elasticzero.launcher.protocol.actions import (
    DumpStacks,
    ExitAgent,
    KillSuspended,
    KillUnresponsive,
    KillWorkers,
    PutReport,
    RaiseAlarm,
    RequestBoundaryStop,
    SaveHeldSnapshot,
    Start,
    StopWorkers,
    WriteDone,
    WriteWorld,
)
from elasticzero.launcher.protocol.decide import decide
from elasticzero.launcher.protocol.documents import (
    Alarm,
    Control,
    Done,
    Drain,
    Failure,
    FailureRecord,
    Holding,
    Member,
    NodeStrikes,
    Phase,
    Report,
    World,
)
from elasticzero.launcher.protocol.leader import is_leader
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import (
    DamagedCheckpoint,
    GroupOrder,
    GroupOutcome,
    GroupStage,
    StoreHealth,
    View,
    WorkerGroupState,
)

NOW = 100.0
POLICY = JobPolicy(min_nodes=2, max_nodes=3, save_timeout_s=60.0)


def member(name: str) -> Member:
    return Member(name, f"i-{name}", "10.0.0.1", 9400, 29500, 1)


A, B, C, D = (member(name) for name in "abcd")
FROM_C = (Source(rank=0, node="c", address="10.0.0.1:9400"),)
RAM = Resume(tier="ram", step=5, generation=2, sources=FROM_C)


def world(*members: Member, **changes: Any) -> World:
    plain = World(
        generation=3,
        token="t",
        members=members,
        strategy="ddp",
        resume=Resume(tier="storage", step=10),
        reason="test",
    )
    return replace(plain, **changes)


def named(*members: Member) -> dict[str, Member]:
    return {m.node: m for m in members}


def says(phase: Phase, of: Member, **fields: Any) -> Report:
    return Report(incarnation=of.incarnation, phase=phase, store_port=29500, **fields)


ALARM = Alarm(node="b", kind="failure", reason="it broke")
TRAINS = WorkerGroupState(
    generation=3, running=1, stage=GroupStage.RESTORED, stepped_s=99.0, step=20
)
LAPSE = [RaiseAlarm(Alarm(node="a", kind="lapse", reason="the lease of b lapsed"), lost="b")]
STOPPED = replace(TRAINS, running=0, aborted_s=99.6)
HEALTHY = StoreHealth(reachable=True, outage_end_s=0.0, confirmed_s=99.0)
HELD = (Holding(generation=3, step=20, world_size=1, ranks=(0,)),)
RESTORED = says("restored", A)

AT_REST = View(
    me=A,
    members=named(A, B),
    world=world(A, B),
    workers=TRAINS,
    my_report=RESTORED,
    reports={"a": RESTORED, "b": says("restored", B)},
    store=HEALTHY,
    token="new",
)
LAPSED = replace(
    AT_REST,
    members=named(A),
    missing_since_s={"b": 99.5},
    workers=replace(TRAINS, stepped_s=96.0),
)
ALONE = View(me=A, members=named(A), oldest=True, last_join_s=99.0, began_s=90.0, token="new")
ROUND = replace(AT_REST, alarm=ALARM, alarm_s=90.0, round_s=99.5)
MY_STOPPED = says("stopped", A, holdings=HELD, final_step=20)
ENDED = replace(
    ROUND,
    workers=STOPPED,
    holdings=HELD,
    my_report=MY_STOPPED,
    reports={"a": MY_STOPPED, "b": says("stopped", B)},
)
FAILED = Failure(rank=0, blame="user", message="ValueError: no")
SPARE = View(
    me=C,
    members=named(C, D),
    oldest=True,
    world=world(A, B),
    outside_s=90.0,
    missing_since_s={"a": 90.0, "b": 90.0},
    store=HEALTHY,
    token="new",
)
SILENT_ALARM = Alarm(node="b", kind="silence", reason="not every node has answered")
SILENT_B = replace(ENDED, reports={"a": MY_STOPPED, "b": says("restored", B)})

NOTHING_HELD = says("stopped", A, final_step=20)
STRANDED = replace(ENDED, members=named(A), reports={"a": MY_STOPPED}, round_s=95.0, alarm_s=95.0)
LEAVER = says("stopped", A, leaving=True, holdings=HELD, final_step=20)
STOP = Control(stop=True)
DRAINED = Control(drain=(Drain(node="c", incarnation="i-c"),))
BEGIN_ANEW = "stopped by an operator; there is no checkpoint, --restart begins anew"
NO_PLACE = "; there is no --checkpoint-dir, so the state of step 20 is lost"
GO_ON = "stopped by an operator; --restart goes on from the checkpoint of step"


def scaled(least: int, most: int) -> Control:
    return Control(nnodes=(least, most))


def stopped(step: int, reason: str) -> list[WriteDone]:
    return [WriteDone(Done(outcome="stopped", step=step, reason=reason))]


def v(base: View, **changes: Any) -> View:
    return replace(base, **changes)


def w(base: WorkerGroupState, **changes: Any) -> WorkerGroupState:
    return replace(base, **changes)


def blamed(**fields: Any) -> View:
    """The round's end with a failure of node b."""
    failure = replace(FAILED, **fields)
    return v(ENDED, reports={"a": MY_STOPPED, "b": says("stopped", B, failure=failure)})


SILENT = replace(TRAINS, silent_s=61.0)
HANG = Alarm(node="b", kind="hang", reason="rank 1: no step for 61.0 s")
HUNG = Failure(rank=0, blame="hung", message="no step for 61.0 s")
WAITS = Failure(rank=0, blame="peer", message="it waits")
STALLED = says("stalled", A, failure=WAITS)


TABLE = [
    # A1
    ("done: stop workers", v(AT_REST, done=Done(outcome="finished", step=9, reason="r")), [KillWorkers]),
    ("done: exit 0", v(ENDED, done=Done(outcome="finished", step=9, reason="r")), [ExitAgent(ExitCode.DONE)]),
    ("failed: exit 70", v(ENDED, done=Done(outcome="failed", step=9, reason="r")), [ExitAgent(ExitCode.FAILED)]),
    ("done, killed already", v(AT_REST, done=Done(outcome="finished", step=9, reason="r"), workers=w(TRAINS, order=GroupOrder.KILL)), []),
    # L1
    ("too few", ALONE, []),
    ("MAX are there", v(ALONE, members=named(A, B, C)), [WriteWorld]),
    ("MIN are there, not settled", v(ALONE, members=named(A, B)), []),
    ("MIN are there and settled", v(ALONE, members=named(A, B), last_join_s=96.0), [WriteWorld]),
    ("not the oldest", v(ALONE, me=B, oldest=False, members=None), []),
    ("leaving before it began", v(ALONE, leaving=True), [ExitAgent(ExitCode.LEFT)]),
    ("nobody came in time", v(ALONE, began_s=-600.0), [ExitAgent(ExitCode.UNAVAILABLE)]),
    # A2
    ("a new world", v(AT_REST, workers=WorkerGroupState()), [Start(world(A, B), 0)]),
    ("a newer world", v(AT_REST, me=B, workers=w(TRAINS, generation=2)), [Start(world(A, B), 1)]),
    # A3
    ("left out", v(AT_REST, me=C), [KillWorkers]),
    ("left out, stopped", v(AT_REST, me=C, workers=STOPPED), []),
    ("another incarnation of mine", v(AT_REST, me=replace(A, incarnation="new"), workers=STOPPED), []),
    ("leaving, not needed", v(AT_REST, me=C, workers=STOPPED, leaving=True), [ExitAgent(ExitCode.LEFT)]),
    ("leaving, still read", v(AT_REST, me=C, workers=STOPPED, leaving=True, world=world(A, B, resume=RAM), reports={"a": RESTORED}, outside_s=99.0), []),
    ("leaving, read by all", v(AT_REST, me=C, workers=STOPPED, leaving=True, world=world(A, B, resume=RAM), outside_s=99.0), [ExitAgent(ExitCode.LEFT)]),
    ("leaving, read by nobody for long", v(AT_REST, me=C, workers=STOPPED, leaving=True, world=world(A, B, resume=RAM), reports={}, outside_s=30.0), [ExitAgent(ExitCode.LEFT)]),
    ("one too many", v(AT_REST, me=C, workers=STOPPED, surplus=True), [ExitAgent(ExitCode.LEFT)]),
    ("one too many, still read", v(AT_REST, me=C, workers=STOPPED, surplus=True, world=world(A, B, resume=RAM), reports={"a": RESTORED}, outside_s=99.0), []),
    # A3: the whole world is gone
    ("all gone: the oldest spare takes over", SPARE, [WriteWorld]),
    ("all gone, not the oldest", v(SPARE, oldest=False), []),
    ("all gone, but not for long", v(SPARE, missing_since_s={"a": 99.0, "b": 99.0}), []),
    ("one is left", v(SPARE, missing_since_s={"a": 90.0}), []),
    ("all gone, the store came back just now", v(SPARE, store=replace(HEALTHY, outage_end_s=97.0)), []),
    ("all gone, steps of before prove nothing", v(SPARE, workers=w(TRAINS, generation=2, running=0)), [WriteWorld]),
    ("all gone, too few spares", v(SPARE, members=named(C)), []),
    # A4
    ("a worker failed", v(AT_REST, workers=w(TRAINS, failure=FAILED)), [RaiseAlarm(Alarm(node="a", kind="failure", reason="rank 0: ValueError: no"))]),
    # A5
    ("alarm: answer and stop", ROUND, [PutReport, StopWorkers("it broke")]),
    ("alarm: answered, stopping", v(ROUND, my_report=says("alive", A), workers=w(TRAINS, aborted_s=99.6)), []),
    ("stuck past the deadline", v(ROUND, my_report=says("alive", A), workers=w(TRAINS, aborted_s=80.0)), [KillWorkers("not stopped within 15 s", spare_saving=True)]),
    ("stuck, killed already", v(ROUND, my_report=says("alive", A), workers=w(TRAINS, aborted_s=80.0, order=GroupOrder.KILL)), []),
    ("stuck, but one is saving", v(ROUND, my_report=says("alive", A), workers=w(TRAINS, saving=1, aborted_s=80.0)), []),
    ("saving for too long", v(ROUND, my_report=says("alive", A), workers=w(TRAINS, saving=1, aborted_s=-30.0)), [KillWorkers("not saved within 120 s")]),
    ("asked who is alive: nobody is disturbed", v(ROUND, alarm=SILENT_ALARM), [PutReport]),
    ("asked who is alive, long ago", v(ROUND, alarm=SILENT_ALARM, my_report=says("alive", A), round_s=80.0), [StopWorkers("not every node has answered")]),
    ("stopping, one seen stopped by a signal", v(ROUND, my_report=says("alive", A), workers=w(TRAINS, aborted_s=99.4, stopped_s=0.5)), [KillSuspended]),
    ("stopping, one seen stopped for a moment", v(ROUND, my_report=says("alive", A), workers=w(TRAINS, aborted_s=99.4, stopped_s=0.4)), []),
    ("stopped by a signal already: told, then killed", v(ROUND, my_report=says("alive", A), workers=w(TRAINS, stopped_s=9.0)), [StopWorkers, KillSuspended]),
    ("stopped by a signal while it saves", v(ROUND, my_report=says("alive", A), workers=w(TRAINS, saving=1, aborted_s=90.0, stopped_s=0.5)), [KillSuspended]),
    ("stopped by a signal, killed already", v(ROUND, my_report=says("alive", A), workers=w(TRAINS, aborted_s=80.0, stopped_s=0.5, order=GroupOrder.KILL)), []),
    ("asked who is alive, and one is stopped by a signal", v(ROUND, alarm=SILENT_ALARM, my_report=says("alive", A), workers=w(TRAINS, stopped_s=0.5)), [StopWorkers, KillSuspended]),
    ("training, one is stopped by a signal", v(AT_REST, workers=w(TRAINS, frozen_s=0.5, stopped_s=0.5)), []),
    ("boundary, one is stopped by a signal: first ask who is alive", v(AT_REST, round_s=99.9, workers=w(TRAINS, outcome=GroupOutcome.AT_BOUNDARY, stopped_s=0.5)), []),
    # A6
    ("stopped: report", v(ROUND, workers=STOPPED, holdings=HELD), [PutReport(MY_STOPPED)]),
    ("boundary: report", v(ROUND, alarm=None, round_s=99.9, workers=w(STOPPED, aborted_s=None), holdings=HELD), [PutReport(MY_STOPPED)]),
    ("boundary, still writing", v(AT_REST, round_s=99.9, workers=w(TRAINS, outcome=GroupOutcome.AT_BOUNDARY)), []),
    ("boundary, others silent", v(AT_REST, round_s=99.4, workers=w(TRAINS, outcome=GroupOutcome.AT_BOUNDARY)), [RaiseAlarm(Alarm(node="a", kind="silence", reason="not every node has answered"))]),
    ("storage does not answer: wait", v(ENDED, holdings=(), my_report=NOTHING_HELD, storage_pending="looking", reports={"a": NOTHING_HELD, "b": says("stopped", B)}), []),
    ("storage does not answer, and memory has it: wait a while", v(ENDED, storage_pending="looking"), []),
    ("storage does not answer, and memory has it: go on", v(ENDED, storage_pending="looking", round_s=80.0, alarm_s=80.0, members=named(A, B)), [WriteWorld]),
    ("storage does not answer a leader that came late: wait a while", v(ENDED, storage_pending="looking", round_s=80.0, alarm_s=80.0, storage_asked_s=95.0, members=named(A, B)), []),
    ("storage does not answer: no first world", v(ALONE, storage_pending="looking", members=named(A, B), last_join_s=90.0), []),
    ("stopped, not sealed: no report yet", v(ROUND, workers=w(STOPPED, sealing=True), my_report=says("alive", A)), []),
    ("nobody can go on: save what is held", v(STRANDED, can_save=True), [SaveHeldSnapshot(3, 20, 1, (0,))]),
    ("nobody can go on: told once", v(STRANDED, can_save=True, saving=True, saved_held=(3, 20), saved_ranks=(0,)), []),
    ("nobody can go on: nothing newer than storage", v(STRANDED, can_save=True, storage_step=20), []),
    ("nobody can go on: storage is newer", v(STRANDED, can_save=True, storage_step=30), []),
    ("nobody can go on, and no directory", STRANDED, []),
    ("leaving: stays until what is held is saved", v(STRANDED, leaving=True, can_save=True, saving=True, saved_held=(3, 20), saved_ranks=(0,), my_report=LEAVER, reports={"a": LEAVER}), []),
    ("leaving: others have not stopped yet", v(STRANDED, leaving=True, can_save=True, my_report=LEAVER, reports={"a": LEAVER, "b": says("alive", B)}), []),
    ("leaving: what others hold is not known", v(STRANDED, leaving=True, can_save=True, my_report=LEAVER, reports=None), []),
    ("leaving: others did not stop in time", v(STRANDED, leaving=True, can_save=True, my_report=LEAVER, reports={"a": LEAVER, "b": says("alive", B)}, round_s=-60.0, saved_held=(3, 20), saved_ranks=(0,)), [ExitAgent(ExitCode.LEFT)]),
    ("leaving: saved, and goes", v(STRANDED, leaving=True, can_save=True, saved_held=(3, 20), saved_ranks=(0,), my_report=LEAVER, reports={"a": LEAVER}), [ExitAgent(ExitCode.LEFT)]),
    ("leaving, too few remain", v(ENDED, leaving=True, round_s=98.0, my_report=says("stopped", A, leaving=True, holdings=HELD, final_step=20)), [ExitAgent(ExitCode.LEFT)]),
    # A7
    ("finished", v(AT_REST, workers=w(TRAINS, running=0, outcome=GroupOutcome.FINISHED)), [PutReport(says("finished", A, final_step=20))]),
    ("finished, and etcd is away", v(AT_REST, workers=w(TRAINS, running=0, outcome=GroupOutcome.FINISHED), my_report=says("finished", A, final_step=20), store=replace(HEALTHY, reachable=False, confirmed_s=NOW - 599.0)), []),
    ("finished, and etcd is away for good", v(AT_REST, workers=w(TRAINS, running=0, outcome=GroupOutcome.FINISHED), store=replace(HEALTHY, reachable=False, confirmed_s=NOW - 600.0)), [ExitAgent(ExitCode.UNAVAILABLE)]),
    ("training, and etcd is away for good", v(AT_REST, store=replace(HEALTHY, reachable=False, confirmed_s=NOW - 6000.0)), []),
    ("finished, said so", v(AT_REST, workers=w(TRAINS, running=0, outcome=GroupOutcome.FINISHED), my_report=says("finished", A, final_step=20)), []),
    # A8
    ("leave at a boundary", v(AT_REST, leaving=True, world=world(A, B, C)), [RequestBoundaryStop(FLAG_LEAVE)]),
    ("leave, though too few remain: memory is saved after", v(AT_REST, leaving=True), [RequestBoundaryStop(FLAG_LEAVE)]),
    ("asked already", v(AT_REST, leaving=True, workers=w(TRAINS, requested=FLAG_LEAVE)), []),
    ("leave, while the workers start", v(AT_REST, leaving=True, workers=w(TRAINS, stage=GroupStage.STARTING)), []),
    ("leave, one script starts slowly", v(AT_REST, leaving=True, workers=w(TRAINS, stage=GroupStage.ATTACHING_LATE)), [RaiseAlarm(Alarm(node="a", kind="leave", reason="a is leaving"))]),
    ("asked already, another node's script starts slowly", v(AT_REST, leaving=True, workers=w(TRAINS, stage=GroupStage.ATTACHED_LATE, requested=FLAG_LEAVE)), [RaiseAlarm(Alarm(node="a", kind="leave", reason="a is leaving"))]),
    ("leave, a plain script", v(AT_REST, leaving=True, workers=w(TRAINS, stage=GroupStage.PLAIN)), [RaiseAlarm(Alarm(node="a", kind="leave", reason="a is leaving"))]),
    ("a leader leaves, though it waits for a newcomer's boundary", v(AT_REST, leaving=True, members=named(A, B, C), last_join_s=90.0, workers=w(TRAINS, requested=FLAG_GROW)), [RequestBoundaryStop(FLAG_LEAVE)]),
    ("all leave: nobody is waited for", v(ENDED, leaving=True, world=world(A, B, C), members=named(A, B, C), round_s=98.0, my_report=LEAVER, reports={"a": LEAVER, "b": replace(LEAVER, incarnation="i-b"), "c": replace(LEAVER, incarnation="i-c")}), [ExitAgent(ExitCode.LEFT)]),
    ("all leave, but a spare goes on", v(ENDED, leaving=True, world=world(A, B, C), members=named(A, B, C, D), round_s=98.0, my_report=LEAVER, reports={"a": LEAVER, "b": replace(LEAVER, incarnation="i-b"), "c": replace(LEAVER, incarnation="i-c")}, control=scaled(1, 3)), [WriteWorld]),
    # A9
    ("restored: say so", v(AT_REST, my_report=None), [PutReport(RESTORED)]),
    ("at rest", AT_REST, []),
    ("a plain script, read by nobody", v(AT_REST, my_report=None, workers=w(TRAINS, stage=GroupStage.PLAIN)), [PutReport(replace(RESTORED, ran=True))]),
    ("perhaps a plain script, somebody waits", v(AT_REST, world=world(A, B, resume=RAM), my_report=None, workers=w(TRAINS, stage=GroupStage.PLAIN)), []),
    ("starting", v(AT_REST, my_report=None, workers=w(TRAINS, stage=GroupStage.ATTACHED)), []),
    # L2
    ("all finished", v(AT_REST, reports={"a": says("finished", A, final_step=30), "b": says("finished", B, final_step=30)}), [WriteDone(Done(outcome="finished", step=30, reason="finished after step 30"))]),
    ("the reports are not read yet", v(AT_REST, reports=None, members=named(A), missing_since_s={"b": 99.5}), []),
    ("all finished, by session.stop", v(AT_REST, reports={"a": says("finished", A, final_step=30, end_reason="enough"), "b": says("finished", B, final_step=30, end_reason="enough")}), [WriteDone(Done(outcome="finished", step=30, reason="finished after step 30: enough", end_reason="enough"))]),
    ("one has not finished", v(AT_REST, reports={"a": says("finished", A, final_step=30), "b": RESTORED}), []),
    # L3
    ("a lapsed lease", LAPSED, LAPSE),
    ("a step since", v(LAPSED, missing_since_s={"b": 95.0}), []),
    ("a step just before: it is cut off", v(LAPSED, workers=TRAINS), []),
    ("a step since, but the next is waited for", v(LAPSED, missing_since_s={"b": 90.0}, workers=w(TRAINS, stepped_s=94.0, silent_s=6.0)), LAPSE),
    ("a step since, and steps are long", v(LAPSED, missing_since_s={"b": 90.0}, workers=w(TRAINS, stepped_s=94.0, silent_s=6.0, longest_step_s=4.0)), []),
    ("a step since, and none is due", v(LAPSED, missing_since_s={"b": 75.0}, workers=w(TRAINS, stepped_s=76.0)), []),
    ("a step since, but none is due for long", v(LAPSED, missing_since_s={"b": 60.0}, workers=w(TRAINS, stepped_s=69.0)), LAPSE),
    ("a step since, and all here have finished", v(LAPSED, missing_since_s={"b": 90.0}, my_report=says("finished", A), workers=w(TRAINS, stepped_s=94.0, running=0, outcome=GroupOutcome.FINISHED)), LAPSE),
    ("the store came back just now", v(LAPSED, store=replace(HEALTHY, outage_end_s=96.0)), []),
    ("the store is away", v(LAPSED, store=replace(HEALTHY, reachable=False)), []),
    ("own lease not confirmed", v(LAPSED, store=replace(HEALTHY, confirmed_s=90.0)), []),
    ("it had finished", v(LAPSED, reports={"a": RESTORED, "b": says("finished", B)}), []),
    ("not the leader's part", v(LAPSED, me=B, my_report=says("restored", B)), []),
    # L4
    ("all stopped: next world", ENDED, [WriteWorld]),
    ("one silent, not long", v(SILENT_B, alarm_s=99.8, members=named(A, C)), []),
    ("one silent, whose host refuses connections", v(SILENT_B, alarm_s=99.8, members=named(A, C), refusing=frozenset("b")), [WriteWorld]),
    ("one silent, but nobody was asked", v(SILENT_B, alarm=None, alarm_s=None, round_s=99.6, members=named(A, C)), []),
    ("one still stopping", v(ENDED, reports={"a": MY_STOPPED, "b": says("alive", B)}, round_s=90.0), []),
    ("below MIN: wait", v(SILENT_B, round_s=98.0), []),
    ("MIN by a newcomer", v(SILENT_B, round_s=98.0, members=named(A, C)), [WriteWorld]),
    ("silence counts from the store's return", v(SILENT_B, round_s=98.0, members=named(A, C), store=replace(HEALTHY, outage_end_s=99.8)), []),
    ("not the leader", v(ENDED, me=B, my_report=says("stopped", B, holdings=HELD, final_step=20)), []),
    ("answered, then gone", v(ENDED, members=named(A, C), missing_since_s={"b": 95.0}, round_s=90.0), [WriteWorld]),
    ("peers fail and all are there: counted", v(blamed(blame="peer"), world=world(A, B, fruitless=3, resume=Resume(tier="storage", step=20))), [WriteDone]),
    ("a pause after several failures", v(blamed(), world=world(A, B, fruitless=2, resume=Resume(tier="storage", step=20))), []),
    ("useless to try again", blamed(final=True), [WriteDone]),
    ("useless to try again, on a node that leaves", v(blamed(), reports={"a": MY_STOPPED, "b": says("stopped", B, leaving=True, failure=replace(FAILED, final=True))}, control=scaled(1, 2)), [WriteWorld]),
    ("useless to try again, but MIN others are there", v(blamed(final=True), control=scaled(1, 2)), [WriteWorld]),
    ("a newcomer fails, MIN others are there", v(blamed(), world=world(A, B, trained=1, fruitless=3), control=scaled(1, 2)), [WriteWorld]),
    ("bad input of another, where none has trained", v(ROUND, workers=replace(TRAINS, step=0), alarm=replace(ALARM, final=True), alarm_s=99.5, my_report=says("alive", A)), []),
    ("bad input of another, some time later", v(ROUND, workers=replace(TRAINS, step=0), alarm=replace(ALARM, final=True), alarm_s=98.9, my_report=says("alive", A)), [StopWorkers("it broke")]),
    ("bad input of another, where others have trained", v(ROUND, world=world(A, B, trained=1), workers=replace(TRAINS, step=0), alarm=replace(ALARM, final=True), alarm_s=99.5, my_report=says("alive", A)), [StopWorkers("it broke")]),
    ("once more", blamed(), [WriteWorld]),
    ("given up", v(blamed(), world=world(A, B, fruitless=3, resume=Resume(tier="storage", step=20)), holdings=(), my_report=says("stopped", A, final_step=20)), [WriteDone]),
    # A4, A5, L8: hangs
    ("no step for the limit: look", v(AT_REST, workers=SILENT), [DumpStacks(60.0)]),
    ("below the limit", v(AT_REST, workers=w(SILENT, silent_s=59.0)), []),
    ("a long step is known", v(AT_REST, workers=w(SILENT, longest_step_s=7.0)), []),
    ("looking", v(AT_REST, workers=w(SILENT, examination="open")), []),
    ("one is to blame", v(AT_REST, workers=w(SILENT, examination="over", failure=HUNG)), [RaiseAlarm(Alarm(node="a", kind="hang", reason="rank 0: no step for 61.0 s"))]),
    ("all here wait: say so", v(AT_REST, workers=w(SILENT, examination="over", stalled=WAITS)), [PutReport(says("stalled", A, failure=WAITS))]),
    ("said already", v(AT_REST, workers=w(SILENT, examination="over", stalled=WAITS), my_report=STALLED), []),
    ("some here are busy: say nothing", v(AT_REST, workers=w(SILENT, examination="over")), []),
    ("a step was made after all", v(AT_REST, my_report=STALLED), [PutReport(RESTORED)]),
    ("others are not stalled", v(AT_REST, workers=w(SILENT, examination="over", stalled=WAITS), my_report=STALLED, reports={"a": STALLED, "b": says("restored", B)}), []),
    ("all wait for each other", v(AT_REST, workers=w(SILENT, examination="over", stalled=WAITS), my_report=STALLED, reports={"a": STALLED, "b": says("stalled", B, failure=replace(WAITS, rank=1))}), [RaiseAlarm(Alarm(node="a", kind="hang", reason="the ranks wait for each other; rank 0: it waits; rank 1: it waits"))]),
    ("those that do not wait have finished", v(AT_REST, workers=w(SILENT, examination="over", stalled=WAITS), my_report=STALLED, reports={"a": STALLED, "b": says("finished", B)}), [RaiseAlarm]),
    ("an alarm of a hang: answer, and look", v(ROUND, alarm=HANG, alarm_s=99.8), [PutReport, DumpStacks]),
    ("the others look too", v(ROUND, alarm=HANG, alarm_s=99.8, workers=w(TRAINS, examination="over"), my_report=says("alive", A)), []),
    ("all have looked", v(ROUND, alarm=HANG, alarm_s=98.9, workers=w(TRAINS, examination="over"), my_report=says("alive", A)), [StopWorkers, KillUnresponsive]),
    ("out of the loop since: no second look", v(ROUND, alarm=HANG, alarm_s=99.2, my_report=says("alive", A)), []),
    ("out of the loop since: stop", v(ROUND, alarm=HANG, alarm_s=98.9, my_report=says("alive", A)), [StopWorkers, KillUnresponsive]),
    ("a look that does not end", v(ROUND, alarm=HANG, alarm_s=89.0, workers=w(TRAINS, examination="open"), my_report=says("alive", A)), [StopWorkers, KillUnresponsive]),
    ("a hang: stopped by a signal, but first a look", v(ROUND, alarm=HANG, alarm_s=99.8, workers=w(TRAINS, examination="open", stopped_s=9.0), my_report=says("alive", A)), []),
    ("one hangs here, the alarm is of another failure", v(ROUND, my_report=says("alive", A), workers=w(TRAINS, failure=HUNG)), [StopWorkers, KillUnresponsive]),
    ("one hangs here, the alarm is of another failure: less patience", v(ROUND, my_report=says("alive", A), workers=w(TRAINS, failure=HUNG, aborted_s=94.0)), [KillWorkers]),
    ("after a hang less patience", v(ROUND, alarm=HANG, workers=w(TRAINS, aborted_s=94.0), my_report=says("alive", A)), [KillWorkers]),
    ("a deadlock counts as a failure", v(ENDED, alarm=HANG, world=world(A, B, fruitless=3, resume=Resume(tier="storage", step=20))), [WriteDone]),
    ("a deadlock, once more", v(ENDED, alarm=HANG), [WriteWorld]),
    # L6
    ("room for another", v(AT_REST, members=named(A, B, C), last_join_s=90.0), [RequestBoundaryStop(FLAG_GROW)]),
    ("it came just now", v(AT_REST, members=named(A, B, C), last_join_s=99.9), []),
    ("no room", v(AT_REST, world=world(A, B, C), members=named(A, B, C, D), last_join_s=90.0), []),
    ("while starting", v(AT_REST, members=named(A, B, C), last_join_s=90.0, my_report=None, workers=w(TRAINS, stage=GroupStage.ATTACHED)), []),
    ("it is set aside", v(AT_REST, world=world(A, B, strikes=(NodeStrikes(node="c", count=3),)), members=named(A, B, C), last_join_s=90.0, struck_s={"c": 80.0}), []),
    ("it was set aside for long enough", v(AT_REST, world=world(A, B, strikes=(NodeStrikes(node="c", count=3),)), members=named(A, B, C), last_join_s=90.0, struck_s={"c": 60.0}), [RequestBoundaryStop(FLAG_GROW)]),
    ("a member is cut off: its place comes first", v(AT_REST, members=named(A, C), last_join_s=90.0, missing_since_s={"b": 98.0}), []),
    ("room, but the store is away", v(AT_REST, members=named(A, B, C), last_join_s=90.0, store=replace(HEALTHY, reachable=False)), []),
    ("room by a greater MAX", v(AT_REST, world=world(A, B, C), members=named(A, B, C, D), last_join_s=90.0, control=scaled(1, 4)), [RequestBoundaryStop(FLAG_GROW)]),
    ("no room by a smaller MAX", v(AT_REST, members=named(A, B, C), last_join_s=90.0, control=scaled(1, 2)), []),
    ("more than MAX", v(AT_REST, world=world(A, B, C), members=named(A, B, C), control=scaled(1, 2)), [RequestBoundaryStop(FLAG_LEAVE)]),
    ("more than MAX, but the store is away", v(AT_REST, world=world(A, B, C), members=named(A, B, C), control=scaled(1, 2), store=replace(HEALTHY, reachable=False)), []),
    ("more than MAX, a plain script", v(AT_REST, world=world(A, B, C), members=named(A, B, C), control=scaled(1, 2), workers=w(TRAINS, stage=GroupStage.PLAIN)), [RaiseAlarm(Alarm(node="a", kind="leave", reason="scaled to at most 2 nodes"))]),
    ("more than MAX, while starting", v(AT_REST, world=world(A, B, C), members=named(A, B, C), control=scaled(1, 2), my_report=None, workers=w(TRAINS, stage=GroupStage.ATTACHED)), []),
    ("more than MAX, not the leader", v(AT_REST, me=B, world=world(A, B, C), my_report=says("restored", B), control=scaled(1, 2)), []),
    ("fewer than MIN, but training", v(AT_REST, control=scaled(3, 3)), []),
    ("MIN is raised: the first world waits", v(ALONE, members=named(A, B), last_join_s=90.0, control=scaled(3, 3)), []),
    ("MIN is lowered below MIN: go on", v(STRANDED, control=scaled(1, 1)), [WriteWorld]),
    # L10
    ("who waits is drained", v(AT_REST, members=named(A, B, C), last_join_s=90.0, control=DRAINED), []),
    ("drained before the first world", v(ALONE, members=named(A, C), last_join_s=90.0, control=DRAINED), []),
    ("all gone, and too few are not drained", v(SPARE, me=D, control=DRAINED), []),
    ("MIN by a newcomer who is drained", v(SILENT_B, round_s=98.0, members=named(A, C), control=DRAINED), []),
    # L7
    ("stop at a boundary", v(AT_REST, control=STOP), [RequestBoundaryStop(FLAG_STOP)]),
    ("stop, but the store is away", v(AT_REST, control=STOP, store=replace(HEALTHY, reachable=False)), []),
    ("stop, asked already", v(AT_REST, control=STOP, workers=w(TRAINS, requested=FLAG_STOP)), []),
    ("stop goes before growth", v(AT_REST, control=STOP, members=named(A, B, C), last_join_s=90.0), [RequestBoundaryStop(FLAG_STOP)]),
    ("stop, not the leader", v(AT_REST, me=B, my_report=says("restored", B), control=STOP), []),
    ("stop, a plain script", v(AT_REST, control=STOP, workers=w(TRAINS, stage=GroupStage.PLAIN)), [RaiseAlarm(Alarm(node="a", kind="stop", reason="an operator stops the job"))]),
    ("stop, not yet attached", v(AT_REST, control=STOP, my_report=None, workers=w(TRAINS, stage=GroupStage.STARTING)), []),
    ("stop, attached and restoring", v(AT_REST, control=STOP, my_report=None, workers=w(TRAINS, stage=GroupStage.ATTACHED)), [RequestBoundaryStop(FLAG_STOP)]),
    ("stop, and scripts start slowly", v(AT_REST, control=STOP, my_report=None, workers=w(TRAINS, stage=GroupStage.ATTACHED_LATE)), [RaiseAlarm(Alarm(node="a", kind="stop", reason="an operator stops the job"))]),
    ("stop, but it has finished", v(AT_REST, control=STOP, workers=w(TRAINS, running=0, outcome=GroupOutcome.FINISHED)), [PutReport]),
    ("stop before the first world", v(ALONE, control=STOP), stopped(0, BEGIN_ANEW)),
    ("stop before the first world, not the oldest", v(ALONE, control=STOP, oldest=False, members=None), []),
    ("stop before the first world, with a checkpoint", v(ALONE, control=STOP, storage_step=7), stopped(7, f"{GO_ON} 7")),
    ("stop before the first world, storage is slow", v(ALONE, control=STOP, storage_pending="looking"), []),
    ("stop when the whole world is gone", v(SPARE, control=STOP, storage_step=7), stopped(7, f"{GO_ON} 7")),
    ("stopped: save what is held, at once", v(ENDED, control=STOP, can_save=True, alarm=None, round_s=99.9), [SaveHeldSnapshot(3, 20, 1, (0,))]),
    ("stopped: being saved", v(ENDED, control=STOP, can_save=True, saving=True, saved_held=(3, 20), saved_ranks=(0,), round_s=50.0), []),
    ("stopped: saved, storage is looked at", v(ENDED, control=STOP, can_save=True, saved_held=(3, 20), saved_ranks=(0,), storage_pending="looking", round_s=80.0), []),
    ("stopped: saved", v(ENDED, control=STOP, can_save=True, saved_held=(3, 20), saved_ranks=(0,), storage_step=20), stopped(20, f"{GO_ON} 20")),
    ("stopped: could not be saved", v(ENDED, control=STOP, can_save=True, saving=True, saved_held=(3, 20), saved_ranks=(0,), storage_step=15, round_s=30.0), stopped(15, f"step 20 could not be saved; {GO_ON} 15")),
    ("stopped: no directory", v(ENDED, control=STOP), stopped(20, "stopped after step 20 by an operator; there is no --checkpoint-dir, so its state is not kept; --restart begins anew")),
    ("stop below MIN, saved already", v(STRANDED, control=STOP, can_save=True, saved_held=(3, 20), saved_ranks=(0,), storage_step=20), stopped(20, f"{GO_ON} 20")),
    ("stop below MIN, to be saved", v(STRANDED, control=STOP, can_save=True), [SaveHeldSnapshot(3, 20, 1, (0,))]),
    ("stop, and a leaving node is the leader", v(STRANDED, control=STOP, leaving=True, my_report=LEAVER, reports={"a": LEAVER}, can_save=True, saved_held=(3, 20), saved_ranks=(0,), storage_step=20), stopped(20, f"{GO_ON} 20")),
    ("stop, but trying again is useless anyway", v(blamed(final=True), control=STOP), [WriteDone(Done(outcome="failed", step=20, reason="rank 0 on b failed: ValueError: no" + NO_PLACE, failure=replace(FAILED, final=True)))]),
    ("stopped: exit 0", v(ENDED, done=Done(outcome="stopped", step=9, reason="r")), [ExitAgent(ExitCode.DONE)]),
    ("grow, a plain script", v(AT_REST, members=named(A, B, C), last_join_s=90.0, workers=w(TRAINS, stage=GroupStage.PLAIN)), [RaiseAlarm(Alarm(node="a", kind="grow", reason="c joins"))]),
]  # fmt: skip


DAMAGE = DamagedCheckpoint(20, "/c/step-000000000020/rank-00000: bytes 0 to 8 differ")
BAD = {"storage_step": 10, "damage": DAMAGE}
FOUND = blamed(blame="checkpoint", bad_step=20)
NOTHING_HELD = says("stopped", A, final_step=20)
FOUND = v(
    FOUND, holdings=(), my_report=NOTHING_HELD, reports={**(FOUND.reports or {}), "a": NOTHING_HELD}
)
L5 = [
    # what is seen; what is done; what is done with --strict-checkpoint
    ("at the start", v(ALONE, members=named(A, B, C), **BAD), WriteWorld, WriteDone),
    ("nothing older is good", v(ALONE, members=named(A, B, C), damage=DAMAGE), WriteDone, WriteDone),
    ("found by the workers", v(FOUND, **BAD), WriteWorld, WriteDone),
    ("memory is as far", v(ENDED, **BAD), WriteWorld, WriteWorld),
    ("the whole world is gone", v(SPARE, **BAD), WriteWorld, WriteDone),
]  # fmt: skip


@pytest.mark.parametrize(
    ("view", "usually", "strictly"), [row[1:] for row in L5], ids=[row[0] for row in L5]
)
def test_a_damaged_checkpoint(view: View, usually: type, strictly: type) -> None:
    for strict, expected in ((False, usually), (True, strictly)):
        decision = decide(view, NOW, replace(POLICY, strict_checkpoint=strict))
        (action,) = decision.actions
        assert isinstance(action, expected), decision
        if isinstance(action, WriteDone):
            assert action.done.outcome == "failed" and action.done.reason == decision.reason
            assert decision.reason.startswith(
                f"the checkpoint of step 20 is damaged: {DAMAGE.reason}; "
            )
            continue
        assert isinstance(action, WriteWorld)
        if action.world.resume.step < 20:
            assert action.world.resume.step == 10
            assert (
                "step 20 is damaged" in decision.reason or "rank 0 on b failed" in decision.reason
            )
            skipped = action.world.skipped
            assert skipped is not None and skipped.step == 20
            assert skipped.message in decision.reason and skipped.message not in skipped.cause
            assert decision.reason.startswith(skipped.cause)
        else:
            assert action.world.skipped is None


@pytest.mark.parametrize(
    ("view", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_rule(view: View, expected: list[object]) -> None:
    decision = decide(view, NOW, POLICY)
    assert decision.reason
    assert len(decision.actions) == len(expected), decision
    for action, expected_action in zip(decision.actions, expected, strict=True):
        if isinstance(expected_action, type):
            assert isinstance(action, expected_action)
        else:
            assert action == expected_action


def written(view: View) -> WriteWorld:
    (action,) = decide(view, NOW, POLICY).actions
    assert isinstance(action, WriteWorld)
    return action


def next_world(view: View) -> World:
    return written(view).world


def test_the_next_world_names_the_lost_and_resumes_from_memory() -> None:
    three = v(
        ENDED,
        world=world(A, B, C),
        members=named(A, B, C),
        round_s=98.0,
        reports={"a": MY_STOPPED, "c": says("stopped", C)},
    )
    assert written(three).gone == ("b",), "the registration of a lost node must not make it a spare"
    following = next_world(three)
    assert [m.node for m in following.members] == ["a", "c"]
    assert (following.generation, following.resume.tier, following.resume.step) == (4, "ram", 20)
    assert following.reason == "b is lost"


def test_a_leaving_node_has_no_place_but_is_a_source() -> None:
    leaver = says("stopped", B, leaving=True, holdings=HELD)
    view = v(
        ENDED, members=named(A, B, C), holdings=(), my_report=says("stopped", A, final_step=20),
        reports={"a": says("stopped", A, final_step=20), "b": leaver},
    )  # fmt: skip
    following = next_world(view)
    assert [m.node for m in following.members] == ["a", "c"]
    assert [s.node for s in following.resume.sources] == ["b"]
    assert following.reason == "b left; c joined"


def test_the_restarted_agent_of_a_lost_node_joins_as_a_new_one() -> None:
    again = replace(B, incarnation="new")
    view = v(SILENT_B, round_s=98.0, members={"a": A, "b": again})
    assert next_world(view).members == (A, again)
    assert written(view).gone == ()


def test_the_next_world_uses_the_port_that_the_report_offers() -> None:
    fresh = replace(MY_STOPPED, store_port=31000)
    me = replace(A, store_port=31000)
    view = v(ENDED, me=me, my_report=fresh, reports={"a": fresh, "b": says("stopped", B)})
    assert next_world(view).members[0].store_port == 31000


@pytest.mark.parametrize(
    ("view", "leads"),
    [
        (AT_REST, True),
        (v(AT_REST, me=B), False),
        (v(AT_REST, me=B, members=named(B), missing_since_s={"a": 99.0}), True),
        (v(AT_REST, me=B, members=None), False),
        (v(ROUND, me=B, reports={"b": says("alive", B)}), True),
        (v(ROUND, me=B, reports={"a": says("alive", A), "b": says("alive", B)}), False),
        (
            v(
                ROUND,
                me=B,
                reports={"a": says("stopped", A), "b": says("stopped", B)},
                members=named(B),
                missing_since_s={"a": 99.0},
            ),
            True,
        ),
        (v(ROUND, me=B, reports={"a": says("restored", A), "b": says("alive", B)}), True),
        (ALONE, True),
        (v(ALONE, oldest=False), False),
    ],
)
def test_the_leader_is_the_first_member_that_is_alive(view: View, leads: bool) -> None:
    assert is_leader(view) is leads


def test_failures_without_progress_count_until_progress() -> None:
    """Progress sets the count back."""
    origin = Resume(tier="storage", step=20)
    stuck = v(blamed(), round_s=90.0, world=world(A, B, fruitless=1, resume=origin))
    assert next_world(stuck).fruitless == 2
    assert next_world(v(stuck, world=world(A, B, fruitless=1))).fruitless == 0
    lost = v(stuck, reports={"a": MY_STOPPED, "b": says("stopped", B)})
    assert next_world(lost).fruitless == 1


def test_a_smaller_max_parks_last_nodes_and_keeps_their_state() -> None:
    reports = {m.node: says("stopped", m) for m in (A, C)} | {
        "b": says("stopped", B, holdings=HELD)
    }
    view = v(
        ENDED, world=world(A, C, B), members=named(A, B, C, D), reports=reports,
        control=scaled(1, 2),
    )  # fmt: skip
    following = next_world(view)
    assert following.members == (A, C)
    assert [source.node for source in following.resume.sources] == ["b"]
    assert following.reason == "b waits: 2 nodes at most"
    assert written(view).gone == ("b",), "it registers anew, as a spare"


def test_a_failed_job_names_the_step_and_each_first_error() -> None:
    stuck = Resume(tier="storage", step=20)
    before = tuple(
        FailureRecord(
            generation=g, node="b", rank=0, blame="user", step=20, message="ValueError: no"
        )
        for g in (1, 2)
    )
    view = v(blamed(), world=world(A, B, fruitless=3, resume=stuck, setbacks=before))
    (action,) = decide(view, NOW, POLICY).actions
    assert isinstance(action, WriteDone)
    assert [s.generation for s in action.done.setbacks] == [1, 2, 3]
    assert action.done.reason == (
        "rank 0 on b failed: ValueError: no; 4 times in a row without progress past step 20; "
        f"3 generations in a row failed alike, on b alone: the script or its data, or that machine{NO_PLACE}"
    )


def test_a_node_that_came_anew_is_not_taken_for_what_it_was() -> None:
    again = replace(B, incarnation="i-again")
    view = v(ENDED, members=named(A, again), alarm_s=99.0)
    (action,) = decide(view, NOW, POLICY).actions
    assert isinstance(action, WriteWorld)
    assert [m.incarnation for m in action.world.members] == ["i-a", "i-again"]


@pytest.mark.parametrize(
    ("missing_s", "stays"), [(97.0, True), (90.0, False)], ids=["for less than a TTL", "for long"]
)
def test_a_slow_answer_brings_nobody_back_who_was_missing_before(
    missing_s: float, stays: bool
) -> None:
    """A member answered, and has no registration since; then the store was away for a moment."""
    slow = replace(HEALTHY, outage_end_s=99.0)
    reports = {"a": MY_STOPPED, "b": says("stopped", B)}
    view = v(
        ENDED, round_s=85.0, alarm_s=85.0, members=named(A), reports=reports, store=slow,
        missing_since_s={"b": missing_s},
    )  # fmt: skip
    following = next_world(view) if stays else next_world(v(view, members=named(A, C)))
    assert following.names(B) == stays
