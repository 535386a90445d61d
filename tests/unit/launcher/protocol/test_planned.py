"""A node leaves inside the others' loops: each rule of `launcher/protocol/planned`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from elasticzero.errors import ExitCode
from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.messages import FLAG_LEAVE
from elasticzero.launcher.protocol.actions import (
    EnterWorld,
    ExitAgent,
    KillWorkers,
    PrepareWorkers,
    PutReport,
    RaiseAlarm,
    RequestBoundaryStop,
    Start,
    WithdrawPreparation,
    WriteProposal,
    WriteWorld,
)
from elasticzero.launcher.protocol.decide import decide, quiet_until_s
from elasticzero.launcher.protocol.documents import (
    Alarm,
    Ancestor,
    Control,
    Drain,
    Failure,
    Holding,
    Member,
    Phase,
    Proposal,
    Report,
    World,
    to_bytes,
)
from elasticzero.launcher.protocol.invariants import check_invariants
from elasticzero.launcher.protocol.planned.proposal import PLAN_S, PREPARE_S, possible
from elasticzero.launcher.protocol.planned.switch import WRITE_AFTER_S, world_after
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.resume import choose_resume
from elasticzero.launcher.protocol.view import (
    GroupStage,
    PreemptionNotice,
    StoreHealth,
    View,
    WorkerGroupState,
)
from elasticzero.launcher.store.decoding import document

NOW = 100.0
POLICY = JobPolicy(min_nodes=1, max_nodes=3)
A, B, C, D = (
    Member(name, f"i-{name}", "10.0.0.1", 9400, 29500 + i, 1, run=1)
    for i, name in enumerate("abcd")
)
NOTICE = PreemptionNotice(reason="SIGTERM", received_s=99.0)
WORLD = World(
    generation=3,
    token="t",
    members=(A, B, C),
    strategy="ddp",
    resume=Resume(tier="storage", step=10),
    reason="test",
    proofs=True,
    trained=2,
)
TRAINS = WorkerGroupState(
    generation=3, running=1, stage=GroupStage.RESTORED, stepped_s=99.9, step=20
)


def says(phase: Phase, of: Member, **fields: Any) -> Report:
    report = Report(incarnation=of.incarnation, phase=phase, store_port=30000 + of.store_port)
    return replace(report, **fields)


LEAVES = {"leaving": True, "leave_reason": "SIGTERM"}
REPORTS = {
    "a": says("restored", A),
    "b": says("restored", B),
    "c": says("restored", C, **LEAVES),
}
MINE = replace(REPORTS["a"], store_port=A.store_port)
VIEW = View(
    me=A,
    members={m.node: m for m in (A, B, C)},
    world=WORLD,
    world_s=0.0,
    workers=TRAINS,
    my_report=MINE,
    reports=REPORTS,
    store=StoreHealth(confirmed_s=99.9),
    token="new",
)
PROPOSAL = Proposal(
    generation=4,
    token="new",
    of="t",
    members=(A, replace(B, store_port=30000 + B.store_port)),
    leavers=("c",),
    reason="c leaves: SIGTERM",
)
DEAD = replace(PROPOSAL, withdrawn="rank 1 cannot be prepared")
PREPARED = replace(TRAINS, prepared=PROPOSAL)
FOLLOWS = replace(VIEW, proposal=PROPOSAL, proposal_s=99.0, workers=PREPARED)
OWN = replace(REPORTS["c"], store_port=C.store_port)
LEAVER = replace(
    VIEW,
    me=C,
    members=None,
    reports=None,
    leaving=True,
    notice=NOTICE,
    my_report=OWN,
    asked_s=99.5,
)
ENTERED = replace(PREPARED, switched="entered", switched_step=20, switched_s=99.9)
LEFT = replace(PREPARED, switched="left", switched_step=20, switched_s=99.9, running=0)


def actions_of(view: View, now_s: float = NOW, policy: JobPolicy = POLICY) -> list[Any]:
    return list(decide(view, now_s, policy).actions)


def test_a_leaver_says_so_and_waits_for_a_proposal() -> None:
    unsaid = replace(LEAVER, my_report=replace(OWN, leaving=False, leave_reason=""))
    (action,) = actions_of(unsaid)
    assert isinstance(action, PutReport)
    assert action.report.leaving and action.report.phase == "restored"
    assert actions_of(LEAVER) == []
    assert "waiting for a proposal" in decide(LEAVER, NOW, POLICY).reason


def test_the_leader_proposes_a_world_without_the_leaver() -> None:
    (action,) = actions_of(VIEW)
    assert action == WriteProposal(PROPOSAL)


def fewer(most: int) -> Control:
    """Returns what an operator asks who lowers MAX."""
    return Control(nnodes=(1, most), scaled=1)


STAY = {node: replace(r, leaving=False, leave_reason="") for node, r in REPORTS.items()}
FEWER = Proposal(
    generation=4,
    token="new",
    of="t",
    members=PROPOSAL.members,
    leavers=(),
    reason="c waits: 2 nodes at most",
)


def test_the_leader_proposes_a_world_of_fewer_nodes_where_max_is_lowered() -> None:
    """The last members give up their places, and their registrations stay."""
    view = replace(VIEW, reports=STAY, control=fewer(2))
    assert actions_of(view) == [WriteProposal(FEWER)]
    assert actions_of(replace(view, control=fewer(3))) == []
    assert actions_of(replace(view, control=Control()), policy=replace(POLICY, max_nodes=2)) == []
    waits = {m.node: m for m in (A, B, C, D)}
    assert actions_of(replace(view, members=waits)) == [WriteProposal(FEWER)]
    following = replace(view, proposal=FEWER, workers=replace(PREPARED, prepared=FEWER))
    entered = replace(ENTERED, prepared=FEWER)
    (action,) = actions_of(replace(following, workers=entered))
    assert isinstance(action, WriteWorld)
    assert (action.world.members, action.gone) == (FEWER.members, ())


def test_a_leave_and_a_lower_max_are_one_proposal() -> None:
    world = replace(WORLD, members=(A, B, D, C))
    reports = {**REPORTS, "d": replace(says("restored", D), store_port=30000 + D.store_port)}
    members = {m.node: m for m in (A, B, C, D)}
    view = replace(VIEW, world=world, reports=reports, members=members, control=fewer(2))
    (action,) = actions_of(view)
    assert isinstance(action, WriteProposal)
    assert (action.proposal.members, action.proposal.leavers) == (PROPOSAL.members, ("c",))
    assert action.proposal.reason == "c leaves: SIGTERM; d waits: 2 nodes at most"


def test_a_lower_max_stops_the_workers_where_none_can_be_proposed() -> None:
    view = replace(VIEW, reports=STAY, control=fewer(2))
    for changes in (
        {"proposal": replace(FEWER, withdrawn="no")},
        {"world": replace(WORLD, shard="node")},
    ):
        assert actions_of(replace(view, **changes)) == [RequestBoundaryStop(FLAG_LEAVE)]


def test_who_gives_up_its_place_prepares_and_waits_for_another() -> None:
    report = replace(STAY["c"], store_port=C.store_port)
    view = replace(LEAVER, leaving=False, notice=None, my_report=report, asked_s=None)
    view = replace(view, control=fewer(2), proposal=FEWER, proposal_s=99.9)
    assert actions_of(view) == [PrepareWorkers(FEWER)]
    assert "without c" in decide(view, NOW, POLICY).reason
    prepared = replace(view, workers=replace(TRAINS, prepared=FEWER))
    assert actions_of(prepared) == []
    left = replace(view, workers=replace(LEFT, prepared=FEWER))
    assert (actions_of(left), decide(left, NOW, POLICY).reason) == (
        [],
        "c gives up its place: the others have gone on without it",
    )
    after = replace(left, world=world_after(WORLD, FEWER, 20), outside_s=99.9, my_report=None)
    assert (actions_of(after), decide(after, NOW, POLICY).reason) == (
        [],
        "waiting for a place in the generation after 4",
    )


def test_who_is_to_leave_while_it_gives_up_its_place_waits_for_that() -> None:
    view = replace(LEAVER, control=fewer(2), proposal=FEWER, proposal_s=99.9)
    assert actions_of(replace(view, workers=replace(TRAINS, prepared=FEWER))) == []


FOUR = replace(WORLD, members=(A, B, C, D), strategy="zero2")
"""They hold each other's replicas in two pairs."""


@pytest.mark.parametrize(
    ("leave", "held", "stepped_s", "proposed"),
    [
        ("d", 12, 99.9, True),
        ("bd", 12, 99.9, True),
        ("cd", 12, 99.9, False),
        ("d", 10, 99.9, False),
        ("d", None, 0.0, False),
        ("cd", None, 99.9, True),
    ],
    ids=[
        "one node",
        "one of each pair",
        "a pair",
        "nothing of this generation is held yet",
        "no step was made yet",
        "no snapshots are taken",
    ],
)
def test_a_divided_state_is_left_with_all_parts_of_a_snapshot(
    leave: str, held: int | None, stepped_s: float, proposed: bool
) -> None:
    """A worker that is killed before the next generation holds one would lose training else, where
    a stop hands over what the leavers have."""
    members = (A, B, C, D)
    reports = {m.node: says("restored", m, **(LEAVES if m.node in leave else {})) for m in members}
    view = replace(
        VIEW,
        world=FOUR,
        members={m.node: m for m in members},
        reports=reports,
        my_report=replace(reports["a"], store_port=A.store_port),
        workers=replace(TRAINS, held=held, stepped_s=stepped_s),
    )
    made = [action for action in actions_of(view) if isinstance(action, WriteProposal)]
    assert bool(made) == proposed


def test_a_world_of_one_rank_is_proposed_and_others_can_come_into_it() -> None:
    world = replace(WORLD, members=(B, C))
    view = replace(VIEW, me=B, world=world, members={"b": B, "c": C})
    reports = {**REPORTS, "b": replace(REPORTS["b"], store_port=B.store_port)}
    view = replace(view, my_report=reports["b"], reports=reports)
    (action,) = actions_of(view)
    assert isinstance(action, WriteProposal)
    assert action.proposal.members == (B,)
    alone = world_after(world, action.proposal, 20)
    assert possible(alone, POLICY)


def test_a_node_that_leaves_is_replaced_after_it_has_left() -> None:
    """The others go on without it first, and then with the node that waits."""
    members = {m.node: m for m in (A, B, C, D)}
    (action,) = actions_of(replace(VIEW, members=members))
    assert isinstance(action, WriteProposal)
    assert [member.node for member in action.proposal.members] == ["a", "b"]


def test_a_leader_that_leaves_proposes_too() -> None:
    """The first member that stays has said which port it has bound."""
    view = replace(LEAVER, me=A, members=VIEW.members, my_report=None)
    reports = {"a": says("restored", A, **LEAVES), "b": REPORTS["b"], "c": says("restored", C)}
    report = replace(reports["a"], store_port=A.store_port)
    (action,) = actions_of(replace(view, my_report=report, reports=reports))
    assert isinstance(action, WriteProposal)
    assert [(m.node, m.store_port) for m in action.proposal.members] == [
        ("b", 30000 + B.store_port),
        ("c", 30000 + C.store_port),
    ]
    assert action.proposal.leavers == ("a",)


@pytest.mark.parametrize(
    "changes",
    [
        {"world": replace(WORLD, proofs=False)},
        {"world": replace(WORLD, shard="node")},
        {"world": replace(WORLD, redundancy="mirror")},
        {"reports": {**REPORTS, "b": says("stalled", B)}},
        {"reports": {**REPORTS, "b": says("finished", B)}},
        {"reports": {node: REPORTS[node] for node in "ac"}},
        {"missing_since_s": {"b": 99.9}},
        {"members": {m.node: replace(m, run=0) for m in (A, B, C)}},
        {"control": Control(drain=(Drain(node="b", incarnation=B.incarnation),))},
        {"control": Control(stop=True)},
        {"store": StoreHealth(reachable=False)},
        {"remnants": True},
        {"proposal": DEAD, "proposal_s": 99.0},
        {"workers": replace(TRAINS, stage=GroupStage.ATTACHED)},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_no_proposal_is_made_where_a_stop_is_needed(changes: dict[str, Any]) -> None:
    made = actions_of(replace(VIEW, **changes))
    assert not [action for action in made if isinstance(action, WriteProposal)]


def test_no_proposal_is_made_with_fewer_than_min_nodes() -> None:
    made = actions_of(VIEW, policy=replace(POLICY, min_nodes=3))
    assert not [action for action in made if isinstance(action, WriteProposal)]


def test_no_proposal_is_made_where_the_node_has_it_switched_off() -> None:
    made = actions_of(VIEW, policy=replace(POLICY, changes_inside="off"))
    assert not [action for action in made if isinstance(action, WriteProposal)]


def test_each_agent_has_its_workers_prepare_once() -> None:
    for me in (A, B, C):
        view = replace(VIEW, me=me, proposal=PROPOSAL, proposal_s=99.9, my_report=None)
        report = replace(REPORTS[me.node], store_port=me.store_port)
        view = replace(view, my_report=report, leaving=me is C, notice=NOTICE if me is C else None)
        assert actions_of(view) == [PrepareWorkers(PROPOSAL)]
        assert actions_of(replace(view, workers=PREPARED)) == []


def test_workers_that_start_are_not_told_to_prepare() -> None:
    view = replace(FOLLOWS, workers=replace(TRAINS, stage=GroupStage.ATTACHED), my_report=None)
    assert not [a for a in actions_of(view) if isinstance(a, PrepareWorkers)]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"workers": replace(PREPARED, refused="rank 0 cannot: no")}, "rank 0 cannot: no"),
        ({"control": Control(stop=True)}, "stops the job"),
        ({"leaving": True, "notice": NOTICE, "asked_s": NOW}, "a is to leave too"),
        ({"missing_since_s": {"b": 99.9}}, "b is not registered"),
        ({"reports": {**REPORTS, "b": says("restored", B, **LEAVES)}}, "b is to leave too"),
        ({"reports": {**REPORTS, "b": says("finished", B)}}, "does not train"),
        ({"proposal_s": NOW - PREPARE_S}, "not all workers were prepared"),
    ],
)
def test_who_finds_a_reason_withdraws_a_proposal(changes: dict[str, Any], why: str) -> None:
    view = replace(FOLLOWS, **changes)
    if view.leaving:
        view = replace(view, my_report=replace(MINE, leaving=True, leave_reason="SIGTERM"))
    (action,) = actions_of(view)
    assert isinstance(action, WriteProposal)
    assert why in action.proposal.withdrawn
    assert replace(action.proposal, withdrawn="") == PROPOSAL


def test_a_leaver_withdraws_where_its_deadline_comes_near() -> None:
    view = replace(LEAVER, proposal=PROPOSAL, proposal_s=99.0, workers=PREPARED)
    near = replace(NOTICE, by_s=105.0)
    assert actions_of(replace(view, notice=replace(NOTICE, by_s=1000.0))) == []
    (action,) = actions_of(replace(view, notice=near), 102.0)
    assert isinstance(action, WriteProposal)
    assert "too little time" in action.proposal.withdrawn


def test_workers_forget_a_dead_proposal_and_the_leaver_asks_for_a_stop() -> None:
    assert actions_of(replace(FOLLOWS, proposal=DEAD)) == [WithdrawPreparation(DEAD.withdrawn)]
    lost = replace(FOLLOWS, proposal=None, proposal_s=None, reports={**REPORTS, "c": REPORTS["b"]})
    assert actions_of(lost) == [WithdrawPreparation("the proposal is gone")]
    workers = replace(PREPARED, withdrawn=True)
    view = replace(LEAVER, proposal=DEAD, proposal_s=99.0, workers=workers)
    assert actions_of(view) == [RequestBoundaryStop(FLAG_LEAVE)]


def test_a_leaver_that_sees_that_too_few_would_stay_does_not_wait() -> None:
    """Where all nodes are told to leave at once, nobody proposes anything."""
    reports = {node: replace(report, leaving=True) for node, report in REPORTS.items()}
    everyone = replace(LEAVER, reports=reports)
    assert actions_of(everyone) == [RequestBoundaryStop(FLAG_LEAVE)]
    assert actions_of(replace(everyone, reports={**reports, "b": REPORTS["b"]})) == []


def test_a_leaver_without_a_proposal_asks_for_a_stop() -> None:
    assert actions_of(LEAVER, 99.5 + PLAN_S - 0.01) == []
    assert actions_of(LEAVER, 99.5 + PLAN_S) == [RequestBoundaryStop(FLAG_LEAVE)]
    hurried = replace(LEAVER, notice=replace(NOTICE, by_s=NOTICE.received_s + 4.0))
    assert actions_of(hurried, 99.8) == [RequestBoundaryStop(FLAG_LEAVE)]


@pytest.mark.parametrize(
    "changes",
    [
        {"world": replace(WORLD, proofs=False)},
        {"workers": replace(TRAINS, refused="no")},
        {"proposal": DEAD, "proposal_s": 99.0},
    ],
)
def test_a_leaver_that_cannot_go_so_asks_for_a_stop_at_once(changes: dict[str, Any]) -> None:
    assert actions_of(replace(LEAVER, **changes)) == [RequestBoundaryStop(FLAG_LEAVE)]


def test_no_other_change_is_asked_for_while_a_proposal_stands() -> None:
    view = replace(FOLLOWS, members={m.node: m for m in (A, B, C, D)}, last_join_s=90.0)
    assert actions_of(view, policy=replace(POLICY, max_nodes=4)) == []


def test_the_first_member_records_the_world_and_others_later() -> None:
    view = replace(FOLLOWS, workers=ENTERED)
    (action,) = actions_of(view)
    assert isinstance(action, WriteWorld)
    following = action.world
    assert (following.generation, following.token) == (4, "new")
    assert following.resume == Resume(tier="live", step=20)
    assert following.members == PROPOSAL.members
    assert action.gone == ("c",)
    assert following.ancestors == (Ancestor(generation=3, first=10, last=20),)
    check_invariants(WORLD, following)
    second = replace(view, me=B)
    assert actions_of(second) == []
    (late,) = actions_of(second, 99.9 + WRITE_AFTER_S)
    assert late == action


def test_the_release_before_can_read_such_a_world() -> None:
    """A node of it that comes would leave otherwise, because the word for the tier is new."""
    following = world_after(WORLD, PROPOSAL, 20)
    stored = json.loads(to_bytes(following))
    assert (stored["resume"]["tier"], stored["resume"]["step"]) == ("ram", 20)
    assert stored["resume"]["sources"] == []
    assert document(World, to_bytes(following)) == following
    assert "inside" not in json.loads(to_bytes(WORLD))


def test_nobody_records_the_world_while_etcd_is_away() -> None:
    view = replace(FOLLOWS, workers=ENTERED, store=StoreHealth(reachable=False))
    assert actions_of(view) == []


def test_a_failure_after_the_switch_is_an_alarm_of_the_world_before() -> None:
    failed = Failure(rank=0, blame="user", message="ValueError: no")
    (action,) = actions_of(replace(FOLLOWS, workers=replace(ENTERED, failure=failed)))
    assert isinstance(action, RaiseAlarm)


def test_a_world_that_the_workers_have_entered_is_entered_and_not_started() -> None:
    following = world_after(WORLD, PROPOSAL, 20)
    for workers in (ENTERED, PREPARED, replace(PREPARED, withdrawn=True)):
        view = replace(FOLLOWS, world=following, workers=workers, proposal=None)
        assert actions_of(view) == [EnterWorld(following)]


def test_a_node_without_those_workers_ends_that_world() -> None:
    following = world_after(WORLD, PROPOSAL, 20)
    view = replace(VIEW, world=following, my_report=None)
    (action,) = actions_of(view)
    assert isinstance(action, RaiseAlarm)
    alarm = Alarm(node="a", kind="failure", reason="no workers")
    assert actions_of(replace(view, alarm=alarm)) == []
    other = replace(following, token="another", resume=Resume(tier="storage", step=10))
    (start,) = actions_of(replace(view, world=other, workers=ENTERED))
    assert isinstance(start, Start)


def test_a_leaver_waits_for_that_world_and_exits() -> None:
    view = replace(LEAVER, proposal=PROPOSAL, proposal_s=99.0, workers=LEFT)
    assert actions_of(view) == []
    outside = replace(view, world=world_after(WORLD, PROPOSAL, 20), outside_s=NOW)
    assert actions_of(outside) == [ExitAgent(ExitCode.LEFT)]
    for workers in (replace(LEFT, running=1), PREPARED):
        ending = replace(outside, workers=workers)
        assert actions_of(ending) == [], "others may come to the boundary through its workers"
        (action,) = actions_of(ending, NOW + POLICY.stop_s)
        assert isinstance(action, KillWorkers)


def test_who_is_left_alone_ends_the_world_before() -> None:
    """Both nodes that went on were lost before either wrote the world: nobody else would."""
    workers = replace(LEFT, stepped_s=90.0, silent_s=10.0)
    left = replace(LEAVER, proposal=PROPOSAL, proposal_s=90.0, workers=workers, members={"c": C})
    alone = replace(left, missing_since_s={"a": 97.0, "b": 97.5}, asked_s=None)
    (action,) = actions_of(alone)
    assert isinstance(action, RaiseAlarm)
    assert (action.alarm.kind, action.alarm.node, action.lost) == ("lapse", "c", "a")
    assert actions_of(replace(alone, missing_since_s={"a": 97.0})) == []
    away = StoreHealth(confirmed_s=99.9, outage_end_s=99.0)
    assert actions_of(replace(alone, store=away)) == [], "leases prove nothing yet"


def test_a_leaver_exits_in_time_though_nobody_records_the_world() -> None:
    near = replace(NOTICE, by_s=110.0)
    view = replace(LEAVER, proposal=PROPOSAL, proposal_s=99.0, workers=LEFT, notice=near)
    assert actions_of(view) == []
    assert actions_of(view, 109.5) == [ExitAgent(ExitCode.LEFT)]
    away = replace(view, store=StoreHealth(reachable=False))
    assert actions_of(away, 109.5) == [ExitAgent(ExitCode.LEFT)]


def test_snapshots_before_and_after_the_switch_count() -> None:
    """Rule 1 of `resume`: what is on the lineage, and nothing else."""

    def best(world: World, generation: int, step: int, switched: str = "") -> Resume:
        holding = Holding(generation=generation, step=step, world_size=1, ranks=(0,))
        report = says("stopped", A, holdings=(holding,), switched=switched)
        return choose_resume(world, {"a": report}, 5)

    following = world_after(WORLD, PROPOSAL, 20)
    assert best(WORLD, 4, 22, "new").step == 22
    assert best(WORLD, 4, 22).tier == "storage"
    assert best(following, 3, 18).step == 18
    assert best(following, 3, 21).tier == "storage"
    assert best(following, 2, 9).tier == "storage"
    origin = replace(WORLD, resume=Resume(tier="ram", step=9, generation=2))
    assert best(world_after(origin, PROPOSAL, 20), 2, 9).step == 9
    assert best(world_after(following, replace(PROPOSAL, generation=5), 30), 3, 18).step == 18


def test_a_round_after_the_switch_leaves_its_number_out() -> None:
    stopped = replace(TRAINS, running=0, aborted_s=99.0)
    holding = Holding(generation=4, step=22, world_size=1, ranks=(0,))
    report = says("stopped", A, switched="new", holdings=(holding,), final_step=22)
    report = replace(report, store_port=A.store_port)
    reports = {"a": report, "b": says("stopped", B, switched="new", final_step=22)}
    view = replace(
        VIEW,
        alarm=Alarm(node="b", kind="failure", reason="it broke"),
        alarm_s=90.0,
        round_s=90.0,
        workers=replace(stopped, prepared=PROPOSAL, switched="entered", step=22),
        holdings=(holding,),
        my_report=report,
        reports={**reports, "c": says("stopped", C, **LEAVES, final_step=20)},
        token="newer",
    )
    (action,) = actions_of(view)
    assert isinstance(action, WriteWorld)
    assert (action.world.generation, action.world.entered) == (5, 4)
    assert (action.world.resume.generation, action.world.resume.step) == (4, 22)
    check_invariants(WORLD, action.world)
    with pytest.raises(AssertionError, match="that was entered follows"):
        check_invariants(WORLD, replace(action.world, entered=3))


def test_an_agent_looks_often_while_a_proposal_stands() -> None:
    decision = decide(FOLLOWS, NOW, POLICY)
    assert quiet_until_s(FOLLOWS, decision, NOW, POLICY) == NOW
    quiet = replace(FOLLOWS, proposal=DEAD, workers=replace(PREPARED, withdrawn=True))
    decision = decide(quiet, NOW, POLICY)
    assert quiet_until_s(quiet, decision, NOW, POLICY) > NOW
