"""Nodes come into a generation inside the others' loops: the rules of `planned/joining.py`, and
those of `planned/proposal.py` about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticzero.ipc.messages import FLAG_GROW
from elasticzero.launcher.protocol.actions import (
    EnterWorld,
    KillWorkers,
    PrepareWorkers,
    PutReport,
    RequestBoundaryStop,
    WriteProposal,
    WriteWorld,
)
from elasticzero.launcher.protocol.decide import decide, quiet_until_s
from elasticzero.launcher.protocol.documents import (
    Alarm,
    Control,
    Drain,
    Failure,
    NodeStrikes,
    Proposal,
)
from elasticzero.launcher.protocol.planned.proposal import COME_S, PLAN_S, PREPARE_S, coming_in
from elasticzero.launcher.protocol.planned.switch import WRITE_AFTER_S, world_after
from elasticzero.launcher.protocol.view import GroupOrder, View, WorkerGroupState
from tests.unit.launcher.protocol.test_planned import (
    MINE,
    NOTICE,
    NOW,
    POLICY,
    REPORTS,
    TRAINS,
    VIEW,
    WORLD,
    A,
    B,
    C,
    D,
    actions_of,
    says,
)

FOUR = replace(POLICY, max_nodes=4)
EVERYONE = {m.node: m for m in (A, B, C, D)}
STAY = {**REPORTS, "c": says("restored", C)}
WAITED = replace(VIEW, members=EVERYONE, reports=STAY, last_join_s=0.0)
PORT_B, PORT_C = (replace(m, store_port=30000 + m.store_port) for m in (B, C))
JOIN = Proposal(
    generation=4, token="new", of="t", members=(A, PORT_B, PORT_C, D), leavers=(), reason="d joins"
)
READY = replace(JOIN, ready=True)
PROPOSED = replace(WAITED, proposal=JOIN, proposal_s=99.0)
SPARE = replace(
    VIEW,
    me=D,
    members=None,
    reports=None,
    outside_s=90.0,
    my_report=None,
    workers=WorkerGroupState(),
    proposal=JOIN,
    proposal_s=99.0,
)
STARTED = WorkerGroupState(generation=3, running=1, prepared=JOIN)
WAITS = replace(STARTED, awaits=True)
SAID = says("ready", D, store_port=0)


def of_spare(workers: WorkerGroupState, **changes: Any) -> View:
    return replace(SPARE, workers=workers, **changes)


def test_a_node_that_waits_is_proposed_as_the_last_member() -> None:
    (action,) = actions_of(WAITED, policy=FOUR)
    assert action == WriteProposal(JOIN)
    assert coming_in(WORLD, JOIN) == [D]


def test_no_more_nodes_are_proposed_than_there_is_room_for() -> None:
    last = replace(D, node="e", incarnation="i-e")
    (action,) = actions_of(replace(WAITED, members={**EVERYONE, "e": last}), policy=FOUR)
    assert action == WriteProposal(JOIN)


@pytest.mark.parametrize(
    "changes",
    [
        {"world": replace(WORLD, shard="node")},
        {"proposal": replace(JOIN, withdrawn="no"), "proposal_s": 99.0},
        {"world": replace(WORLD, strikes=(NodeStrikes(node="b", count=3, why="it fails"),))},
    ],
    ids=["rows of ranks", "a second time", "with a member that is to be set aside"],
)
def test_nodes_come_in_by_a_stop_where_they_cannot_inside(changes: dict[str, Any]) -> None:
    struck: dict[str, Any] = {"struck_s": {"b": 99.9}} if "strikes" in str(changes) else {}
    assert actions_of(replace(WAITED, **changes, **struck), policy=FOUR) == [
        RequestBoundaryStop(FLAG_GROW)
    ]


def test_a_new_world_waits_a_while_with_a_stop_until_it_can_propose() -> None:
    """One of its members has not said yet that it trains."""
    early = replace(WAITED, reports={"a": STAY["a"]}, world_s=NOW - PLAN_S / 2)
    assert actions_of(early, policy=FOUR) == []
    decision_at = NOW + PLAN_S / 2
    late = replace(early, world_s=NOW - 2 * PLAN_S)
    assert actions_of(late, policy=FOUR) == [RequestBoundaryStop(FLAG_GROW)]

    members = {m.node: m for m in (A, B, C)}
    settled = replace(early, members=members)
    assert quiet_until_s(settled, decide(settled, NOW, FOUR), NOW, FOUR) <= decision_at


def test_a_node_that_comes_in_starts_its_workers_and_says_when_they_wait() -> None:
    assert actions_of(SPARE, policy=FOUR) == [PrepareWorkers(JOIN)]
    assert actions_of(of_spare(STARTED), policy=FOUR) == []
    assert actions_of(of_spare(WAITS), policy=FOUR) == [PutReport(SAID)]
    assert actions_of(of_spare(WAITS, my_report=SAID), policy=FOUR) == []


def test_workers_of_a_generation_before_are_ended_first() -> None:
    """What they have failed by is no reason to withdraw."""
    failed = Failure(rank=0, blame="user", message="of yesterday")
    old = WorkerGroupState(generation=2, running=1, failure=failed)
    (action,) = actions_of(of_spare(old), policy=FOUR)
    assert isinstance(action, KillWorkers)
    ended = replace(old, running=0, order=GroupOrder.KILL)
    assert actions_of(of_spare(ended), policy=FOUR) == [PrepareWorkers(JOIN)]


def test_the_workers_that_train_prepare_once_all_that_come_in_are_ready() -> None:
    assert actions_of(PROPOSED, policy=FOUR) == []
    ready = replace(PROPOSED, reports={**STAY, "d": SAID})
    assert actions_of(ready, policy=FOUR) == [WriteProposal(READY)]
    told = replace(PROPOSED, proposal=READY)
    assert actions_of(told, policy=FOUR) == [PrepareWorkers(READY)]


def test_a_report_of_another_registration_does_not_count() -> None:
    other = replace(SAID, incarnation="i-other")
    assert actions_of(replace(PROPOSED, reports={**STAY, "d": other}), policy=FOUR) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"members": {m.node: m for m in (A, B, C)}}, "d is not registered"),
        ({"members": {**EVERYONE, "d": replace(D, incarnation="i-2")}}, "d is not registered"),
        ({"control": Control(nnodes=(1, 3))}, "there is room for 3 nodes alone"),
        ({"proposal_s": NOW - COME_S}, "d was not ready within 300 s"),
        ({"proposal": READY, "proposal_s": NOW - PREPARE_S}, "not all workers were prepared"),
        ({"control": Control(stop=True)}, "an operator stops the job"),
        (
            {
                "leaving": True,
                "notice": NOTICE,
                "my_report": replace(MINE, leaving=True, leave_reason="SIGTERM"),
            },
            "a is to leave too",
        ),
    ],
)
def test_a_member_withdraws_what_cannot_be(changes: dict[str, Any], why: str) -> None:
    (action,) = actions_of(replace(PROPOSED, **changes), policy=FOUR)
    assert isinstance(action, WriteProposal)
    assert why in action.proposal.withdrawn


def test_a_node_that_is_long_not_ready_does_not_keep_others_waiting() -> None:
    others = {**EVERYONE, "e": replace(D, node="e", incarnation="i-e")}
    five = replace(POLICY, max_nodes=5)
    waits = replace(PROPOSED, members=others, proposal_s=NOW - PREPARE_S)
    (action,) = actions_of(waits, policy=five)
    assert isinstance(action, WriteProposal)
    assert action.proposal.withdrawn == "d was not ready within 10 s"
    assert actions_of(waits, policy=FOUR) == []  # there is no room for them


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"workers": replace(STARTED, failure=Failure(rank=3, blame="user", message="bad"))},
            "d cannot come in: bad",
        ),
        ({"leaving": True, "notice": NOTICE}, "d is to leave"),
        ({"control": Control(stop=True)}, "an operator stops the job"),
    ],
)
def test_a_node_that_cannot_come_in_withdraws(changes: dict[str, Any], why: str) -> None:
    workers = changes.pop("workers", STARTED)
    (action,) = actions_of(of_spare(workers, **changes), policy=FOUR)
    assert isinstance(action, WriteProposal)
    assert action.proposal.withdrawn == why


def test_a_node_without_changes_inside_withdraws() -> None:
    (action,) = actions_of(SPARE, policy=replace(FOUR, changes_inside="off"))
    assert isinstance(action, WriteProposal)
    assert action.proposal.withdrawn == "d does not take part in one"


def test_workers_wait_for_a_while_though_the_proposal_is_withdrawn() -> None:
    """The others may have promised each other to go over before they knew."""
    dead = replace(READY, withdrawn="no")
    waits = of_spare(WAITS, proposal=dead, my_report=SAID)
    assert actions_of(waits, policy=FOUR) == []
    (action,) = actions_of(replace(waits, proposal_s=NOW - COME_S), policy=FOUR)
    assert isinstance(action, KillWorkers)
    failed = replace(WAITS, failure=Failure(rank=3, blame="user", message="bad"))
    (action,) = actions_of(replace(waits, workers=failed), policy=FOUR)
    assert isinstance(action, KillWorkers)


def test_a_round_ends_workers_that_were_to_come_in() -> None:
    alarm = Alarm(node="a", kind="failure", reason="rank 0 failed")
    (action,) = actions_of(of_spare(WAITS, alarm=alarm), policy=FOUR)
    assert isinstance(action, KillWorkers)


def test_workers_that_wait_are_ended_where_nobody_is_left_who_could_go_over() -> None:
    """The oldest node that waits writes the next world, and else waited for the others for good."""
    lost = dict.fromkeys("abc", 60.0)
    view = replace(SPARE, members={"d": D}, missing_since_s=lost, oldest=True, my_report=SAID)
    for proposal in (READY, replace(READY, withdrawn="no")):
        waits = replace(view, proposal=proposal, workers=replace(WAITS, prepared=READY))
        (ended,) = actions_of(waits, policy=FOUR)
        assert isinstance(ended, KillWorkers)
        after = replace(waits, workers=WorkerGroupState(prepared=READY))
        (action,) = actions_of(replace(after, storage_step=7), policy=replace(FOUR, min_nodes=1))
        assert isinstance(action, WriteWorld) and action.world.nodes == ["d"]
    one_left = replace(view, missing_since_s={"a": 60.0, "b": 60.0}, workers=WAITS)
    assert actions_of(one_left, policy=FOUR) == []


def test_a_node_that_has_come_in_records_the_world_if_no_other_does() -> None:
    entered = replace(WAITS, switched="entered", switched_step=20, switched_s=NOW - 0.1)
    assert actions_of(of_spare(entered, my_report=SAID), policy=FOUR) == []
    late = replace(entered, switched_s=NOW - 3 * WRITE_AFTER_S)
    (action,) = actions_of(of_spare(late, my_report=SAID), policy=FOUR)
    assert isinstance(action, WriteWorld)
    assert action.world == world_after(WORLD, JOIN, 20, NOW - 0.0)
    assert action.world.trained == 3  # not the node that came in


def test_the_world_is_entered_by_the_workers_that_wait_for_it() -> None:
    """They learn of the boundary from rank 0, perhaps after their agent."""
    following = world_after(WORLD, JOIN, 20)
    view = of_spare(WAITS, world=following, proposal=None, my_report=None)
    assert actions_of(view, policy=FOUR) == [EnterWorld(following)]


def test_a_drained_node_is_not_proposed() -> None:
    drained = Control(drain=(Drain(node="d", incarnation=D.incarnation),))
    assert actions_of(replace(WAITED, control=drained), policy=FOUR) == []


def test_the_view_of_these_tests_is_one_that_trains() -> None:
    assert actions_of(replace(WAITED, members={m.node: m for m in (A, B, C)}), policy=FOUR) == []
    assert MINE.phase == "restored" and TRAINS.restored
