"""A node that leaves by a deadline: what it does when, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticzero.errors import ExitCode
from elasticzero.ipc.assignment import Resume, Source
from elasticzero.ipc.messages import FLAG_LEAVE
from elasticzero.launcher.protocol.actions import (
    Action,
    ExitAgent,
    KillWorkers,
    PutReport,
    RaiseAlarm,
    RequestBoundaryStop,
    SaveHeldSnapshot,
    StopWorkers,
    WriteDone,
    WriteWorld,
)
from elasticzero.launcher.protocol.decide import decide
from elasticzero.launcher.protocol.documents import (
    Alarm,
    Control,
    Drain,
    Failure,
    Holding,
    Member,
    Phase,
    Report,
    World,
)
from elasticzero.launcher.protocol.drain import boundary_deadline_s, merge_notices
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import (
    GroupOutcome,
    GroupStage,
    PreemptionNotice,
    StoreHealth,
    View,
    WorkerGroupState,
)

NOW = 100.0
POLICY = JobPolicy(min_nodes=1, max_nodes=3)
A, B = (Member(name, f"i-{name}", "10.0.0.1", 9400, 29500, 1) for name in "ab")
HELD = (Holding(generation=3, step=20, world_size=1, ranks=(0,)),)
AWS = "AWS spot interruption in 118 s"


def says(phase: Phase, of: Member, **fields: object) -> Report:
    return Report(incarnation=of.incarnation, phase=phase, store_port=29500, **fields)  # type: ignore[arg-type]


def by(deadline_s: float | None, received_s: float = 80.0) -> PreemptionNotice:
    """A notice; its margin is 5 s where it gave 20 s or more."""
    return PreemptionNotice(reason=AWS, received_s=received_s, by_s=deadline_s)


FAILURE = Failure(rank=0, blame="user", message="ValueError: no")
TRAINS = WorkerGroupState(
    generation=3, running=1, stage=GroupStage.RESTORED, stepped_s=99.0, step=20
)
STOPPING = replace(TRAINS, aborted_s=98.0)
GONE = replace(STOPPING, running=0)
ALONE = f"a leaves: {AWS}; etcd is still away"
TRAINING = View(
    me=A,
    members={"a": A, "b": B},
    world=World(
        generation=3,
        token="t",
        members=(A, B),
        strategy="ddp",
        resume=Resume(tier="storage", step=10),
        reason="test",
    ),
    leaving=True,
    notice=by(200.0),
    workers=TRAINS,
    my_report=says("restored", A),
    reports={"a": says("restored", A), "b": says("restored", B)},
    store=StoreHealth(reachable=True, outage_end_s=0.0, confirmed_s=99.0),
    token="new",
)
FALLEN = Alarm(
    node="a",
    kind="leave",
    reason=f"a leaves: {AWS}; no time to end the running step, so back to the newest snapshot",
)
ALIVE = says("alive", A, leaving=True, leave_reason=AWS)
ROUND = replace(TRAINING, alarm=FALLEN, alarm_s=97.9, round_s=97.9, workers=STOPPING)
ANSWERED = replace(ROUND, my_report=ALIVE)
AWAY = replace(TRAINING, store=replace(TRAINING.store, reachable=False))


def v(base: View, **changes: object) -> View:
    return replace(base, **changes)  # type: ignore[arg-type]


TABLE: list[tuple[str, View, list[object]]] = [
    # A8
    ("there is time", TRAINING, [RequestBoundaryStop(FLAG_LEAVE)]),
    ("no deadline", v(TRAINING, notice=by(None)), [RequestBoundaryStop(FLAG_LEAVE)]),
    ("a drain without a notice", v(TRAINING, notice=None), [RequestBoundaryStop(FLAG_LEAVE)]),
    ("asked: the boundary is waited for", v(TRAINING, workers=replace(TRAINS, requested=FLAG_LEAVE)), []),
    # A10
    ("still time to wait", v(TRAINING, notice=by(105.1)), [RequestBoundaryStop(FLAG_LEAVE)]),
    ("no time, not asked yet", v(TRAINING, notice=by(105.0)), [RaiseAlarm(FALLEN)]),
    ("no time, asked", v(TRAINING, notice=by(105.0), workers=replace(TRAINS, requested=FLAG_LEAVE)), [RaiseAlarm(FALLEN)]),
    ("past the deadline", v(TRAINING, notice=by(90.0)), [RaiseAlarm(FALLEN)]),
    ("no time, and a plain script", v(TRAINING, notice=by(105.0), workers=replace(TRAINS, stage=GroupStage.PLAIN)), [RaiseAlarm(FALLEN)]),
    ("no time, but the workers are leaving the loop", v(TRAINING, notice=by(105.0), workers=replace(TRAINS, saving=1, requested=FLAG_LEAVE)), []),
    ("a short notice has a short margin", v(TRAINING, notice=by(101.0, received_s=98.0)), [RequestBoundaryStop(FLAG_LEAVE)]),
    ("a short notice, nearly over", v(TRAINING, notice=by(100.5, received_s=97.5)), [RaiseAlarm(FALLEN)]),
    ("the round: answer and stop", v(ROUND, workers=TRAINS), [PutReport(ALIVE), StopWorkers(FALLEN.reason)]),
    ("stopping: there is time", v(ANSWERED, notice=by(103.0)), []),
    ("stopping: half the margin is over", v(ANSWERED, notice=by(102.4)), [KillWorkers("not stopped within 1.9 s", spare_saving=True)]),
    ("stopping: who saves is left alone", v(ANSWERED, notice=by(102.0), workers=replace(STOPPING, saving=1)), []),
    ("stopping: far from the deadline", v(ANSWERED, workers=replace(STOPPING, aborted_s=84.0)), [KillWorkers("not stopped within 15 s", spare_saving=True)]),
    ("stopping: long past the deadline, a moment is given", v(ANSWERED, notice=by(90.0), workers=replace(STOPPING, aborted_s=99.6)), []),
    # A11
    ("etcd is away", AWAY, []),
    ("etcd is away, there is time left", v(AWAY, notice=by(106.0)), []),
    ("etcd is away, the end is near", v(AWAY, notice=by(101.0)), [StopWorkers(ALONE)]),
    ("the same after a failure", v(AWAY, notice=by(101.0), workers=replace(TRAINS, failure=FAILURE)), [StopWorkers(ALONE)]),
    ("the workers stop", v(AWAY, notice=by(101.0), workers=replace(STOPPING, aborted_s=99.9)), []),
    ("the workers do not stop", v(AWAY, notice=by(101.0), workers=STOPPING), [KillWorkers(ALONE, spare_saving=True)]),
    ("they are gone", v(AWAY, notice=by(101.0), workers=GONE, holdings=HELD, can_save=True), [SaveHeldSnapshot(3, 20, 1, (0,))]),
    ("nothing is held whole", v(AWAY, notice=by(101.0), workers=GONE, can_save=True), [ExitAgent(ExitCode.LEFT)]),
    ("there is no directory", v(AWAY, notice=by(101.0), workers=GONE, holdings=HELD), [ExitAgent(ExitCode.LEFT)]),
    ("it is being saved", v(AWAY, notice=by(101.0), workers=GONE, holdings=HELD, can_save=True, saving=True), []),
    ("it is saved", v(AWAY, notice=by(101.0), workers=GONE, holdings=HELD, can_save=True, saved_held=(3, 20)), [ExitAgent(ExitCode.LEFT)]),
    ("another member may save it", v(AWAY, notice=by(104.0), me=B, workers=GONE, holdings=HELD, can_save=True), []),
    ("it may hold nothing", v(AWAY, notice=by(101.0), me=B, workers=GONE, holdings=HELD, can_save=True), [SaveHeldSnapshot(3, 20, 1, (0,))]),
    ("that one is gone", v(AWAY, notice=by(104.0), me=B, workers=GONE, holdings=HELD, can_save=True, missing_since_s={"a": 90.0}), [SaveHeldSnapshot(3, 20, 1, (0,))]),
    ("etcd is away, the time is up", v(AWAY, notice=by(100.0)), [ExitAgent(ExitCode.LEFT)]),
    ("etcd is away, no deadline", v(AWAY, notice=by(None)), []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("view", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_rule(view: View, expected: list[Action]) -> None:
    decision = decide(view, NOW, POLICY)
    assert list(decision.actions) == expected, decision
    assert decision.reason


def test_the_reason_is_told_while_the_boundary_is_waited_for() -> None:
    assert decide(TRAINING, NOW, POLICY).reason == f"a leaves: {AWS}"
    asked = v(TRAINING, workers=replace(TRAINS, requested=FLAG_LEAVE))
    assert decide(asked, NOW, POLICY).reason == f"a leaves: {AWS}: waiting for the next boundary"


SIGTERM = PreemptionNotice(reason="SIGTERM (25 s of grace)", received_s=50.0, by_s=75.0)
SPOT = PreemptionNotice(reason=AWS, received_s=10.0, by_s=130.0)
DRAIN = PreemptionNotice(reason="drained by an operator", received_s=5.0)


@pytest.mark.parametrize("stage", [GroupStage.PLAIN, GroupStage.ATTACHING_LATE])
@pytest.mark.parametrize(
    ("holder", "world_s", "is_awaited"),
    [("c", 90.0, True), ("b", 90.0, False), ("c", 39.0, False)],
    ids=["by another", "by a member", "by one whose time is over"],
)
def test_slow_workers_are_awaited_while_state_is_held_outside(
    stage: GroupStage, holder: str, world_s: float, is_awaited: bool
) -> None:
    """The node before has left with a part of the state, and serves it. An alarm took the job back
    to its last checkpoint, though each node had only been drained."""
    assert TRAINING.world is not None
    sources = tuple(
        Source(rank=rank, node=node, address="10.0.0.1:9400")
        for rank, node in enumerate(("a", holder))
    )
    world = replace(TRAINING.world, resume=Resume(tier="ram", step=20, sources=sources))
    workers = replace(TRAINS, stage=stage, stepped_s=0.0, step=0)
    view = v(TRAINING, world=world, world_s=world_s, workers=workers, my_report=None, reports={})
    decision = decide(view, NOW, POLICY)
    reason = f"a leaves: {AWS}"
    alarm = Alarm(node="a", kind="leave", reason=reason)
    assert decision.actions == (() if is_awaited else (RaiseAlarm(alarm),))
    assert not is_awaited or decision.reason == f"{reason}: the workers are starting"


def test_notices_merge_to_the_first_reason_and_earliest_deadline() -> None:
    assert merge_notices([]) is None
    assert merge_notices([SPOT]) == SPOT
    later = replace(SIGTERM, received_s=60.0, by_s=85.0)
    assert merge_notices([SIGTERM, later]) == SIGTERM, "SIGTERM twice"
    assert merge_notices([SIGTERM, SPOT]) == SIGTERM
    both = merge_notices([SPOT, SIGTERM, later])
    assert both == replace(SIGTERM, reason=f"{AWS}, then SIGTERM (25 s of grace)")
    assert merge_notices([DRAIN, SPOT]) == replace(
        SPOT, reason=f"drained by an operator, then {AWS}"
    )
    assert merge_notices([SPOT, DRAIN]) == SPOT


@pytest.mark.parametrize(
    ("notice_s", "margin_s"), [(120.0, 5.0), (25.0, 5.0), (20.0, 5.0), (4.0, 1.0), (0.0, 0.0)]
)
def test_the_margin_is_a_part_of_what_is_given(notice_s: float, margin_s: float) -> None:
    notice = PreemptionNotice(reason="r", received_s=NOW, by_s=NOW + notice_s)
    assert boundary_deadline_s(notice, POLICY) == NOW + notice_s - margin_s


def test_without_a_deadline_a_boundary_is_awaited_forever() -> None:
    assert boundary_deadline_s(DRAIN, POLICY) == boundary_deadline_s(None, POLICY) == float("inf")


def ended(alarm: Alarm | None, my_fields: dict[str, Any], theirs: dict[str, Any]) -> View:
    """The round's end, both stopped; b leads no more than a does."""
    my_report = says("stopped", A, holdings=HELD, final_step=20, **my_fields)
    return v(
        TRAINING,
        leaving=bool(my_fields.get("leaving")),
        notice=by(200.0) if my_fields.get("leaving") else None,
        alarm=alarm,
        alarm_s=90.0,
        round_s=99.8,
        workers=replace(TRAINS, running=0, failure=my_fields.get("failure")),
        holdings=HELD,
        my_report=my_report,
        reports={"a": my_report, "b": says("stopped", B, **theirs)},
    )


LEAVES: dict[str, Any] = {"leaving": True, "leave_reason": AWS}


def next_world(view: View) -> World:
    (action,) = decide(view, NOW, POLICY).actions
    assert isinstance(action, WriteWorld)
    return action.world


def test_the_world_says_why_a_node_left() -> None:
    assert next_world(ended(None, {}, LEAVES)).reason == f"b leaves: {AWS}"
    assert next_world(ended(None, LEAVES, {})).reason == f"a leaves: {AWS}", "the leader itself"
    assert next_world(ended(None, {}, {"leaving": True})).reason == "b left"


def test_a_member_that_is_drained_in_a_round_has_no_place_but_is_a_source() -> None:
    """It answered before it was drained, and was cut off from etcd then: the others gave it a place
    in the next world, which it left at once."""
    view, empty = ended(None, {}, {"holdings": HELD}), says("stopped", A, final_step=20)
    reports = {**(view.reports or {}), "a": empty}
    view = replace(view, holdings=(), my_report=empty, reports=reports)
    drained = replace(view, control=Control(drain=(Drain(node="b", incarnation="i-b"),)))
    following = next_world(drained)
    assert ([m.node for m in following.members], following.reason) == (["a"], "b left")
    assert [source.node for source in following.resume.sources] == ["b"]
    before = replace(view, control=Control(drain=(Drain(node="b", incarnation="i-0"),)))
    assert [m.node for m in next_world(before).members] == ["a", "b"]


def test_the_world_says_that_there_was_no_time() -> None:
    assert next_world(ended(FALLEN, LEAVES, {})).reason == FALLEN.reason


def failed(blame: str) -> dict[str, object]:
    return {"failure": Failure(rank=1, blame=blame, message="it broke")}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("my_fields", "theirs", "counted"),
    [
        ({}, {**LEAVES, **failed("killed")}, 0),  # what the machine's end did to its workers
        ({}, {**LEAVES, **failed("user")}, 0),
        ({**LEAVES}, failed("peer"), 0),  # what the others saw of it
        ({**failed("peer")}, LEAVES, 0),
        ({**LEAVES}, failed("user"), 1),  # no fault of the machine that goes
        ({}, failed("peer"), 1),
    ],
)
def test_leaving_is_no_failure(
    my_fields: dict[str, object], theirs: dict[str, object], counted: int
) -> None:
    view = ended(FALLEN, my_fields, theirs)
    assert view.world is not None
    stuck = v(view, world=replace(view.world, resume=Resume(tier="storage", step=20)))
    assert next_world(stuck).fruitless == counted


def test_leaving_ends_no_job_that_is_out_of_restarts() -> None:
    view = ended(FALLEN, {}, {**LEAVES, **failed("killed")})
    assert view.world is not None
    stuck = replace(view.world, fruitless=3, resume=Resume(tier="storage", step=20))
    (action,) = decide(v(view, world=stuck, round_s=60.0), NOW, POLICY).actions
    assert isinstance(action, WriteWorld) and not isinstance(action, WriteDone)


def test_why_a_script_ended_training_is_reported() -> None:
    ended = replace(
        TRAINS, running=0, outcome=GroupOutcome.FINISHED, end_reason="the validation loss rises"
    )
    (put,) = decide(v(TRAINING, workers=ended), NOW, POLICY).actions
    assert isinstance(put, PutReport)
    assert (put.report.phase, put.report.end_reason) == ("finished", "the validation loss rises")
