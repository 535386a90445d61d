"""Which nodes of several releases make a world: BD1 to BD5."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticzero.ipc.messages import FLAG_GROW
from elasticzero.launcher.protocol.actions import RequestBoundaryStop, WriteProposal, WriteWorld
from elasticzero.launcher.protocol.decide import decide
from elasticzero.launcher.protocol.documents import (
    Member,
    World,
    to_bytes,
    world_from_bytes,
)
from elasticzero.launcher.protocol.placement import (
    Build,
    build_of,
    choose_build,
    fits,
    of_build,
    slight_difference,
    unlike,
    version_line,
)
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import View
from tests.unit.launcher.protocol import test_planned as planned
from tests.unit.launcher.protocol.test_decide import (
    ALONE,
    AT_REST,
    ENDED,
    HELD,
    NOW,
    POLICY,
    SPARE,
    A,
    B,
    C,
    D,
    named,
    says,
    world,
)

CPU = "2.13.0+cpu"
OLD, NEW = ("0.2.0", CPU), ("0.3.1", CPU)
BUILDS = (OLD, NEW, ("0.2.4", "2.14.1+cpu"), ("0.3.0", "2.13.0+cu130"), ("1.0.0", "2.15.0+cu130"))


def of(versions: tuple[str, str], member: Member) -> Member:
    """The same as a node registers it that has these versions of ElasticZero and torch."""
    return replace(member, release=versions[0], torch=versions[1])


def build(versions: tuple[str, str]) -> Build:
    stated = build_of(of(versions, A))
    assert stated is not None
    return stated


def written(view: View, policy: JobPolicy) -> World:
    """The world that the leader writes, as every agent reads it."""
    [action] = decide(view, NOW, policy).actions
    assert isinstance(action, WriteWorld)
    return world_from_bytes(to_bytes(action.world))


def trains(*members: Member) -> World:
    """A world of these registrations, as every agent reads it."""
    first = members[0]
    stated = world(*members, release=first.release, torch=first.torch)
    return world_from_bytes(to_bytes(stated))


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (OLD, ("0.2.9", "2.13.4+cpu"), True),
        (OLD, ("0.2.0rc1", CPU), True),
        (OLD, NEW, False),
        (OLD, ("1.2.0", CPU), False),
        (OLD, ("0.2.0", "2.14.0+cpu"), False),
        (OLD, ("0.2.0", "2.13.0+cu130"), False),
        (OLD, ("0.2.0", "2.13.0"), False),
        (("0.2.0", "2.15.0a0+git123"), ("0.2.0", "2.15.0+git123"), True),
        (OLD, ("", ""), True),
        (OLD, ("0.3.0", ""), True),
        (OLD, ("9" * 5000 + ".1", "odd"), True),
    ],
)
def test_minor_versions_and_builds_must_be_alike(
    one: tuple[str, str], other: tuple[str, str], alike: bool
) -> None:
    """BD1: what states no versions, or none that can be read, fits."""
    assert fits(of(one, A), build_of(of(other, B))) is alike
    assert fits(of(other, A), build_of(of(one, B))) is alike


def test_both_nodes_say_the_same_sentence() -> None:
    a, c = of(OLD, A), of(NEW, C)
    text = (
        "c has ElasticZero 0.3.1, and a has ElasticZero 0.2.0; upgrade the other nodes to "
        "ElasticZero 0.3.1, and the job goes over once most nodes have it, or install ElasticZero "
        "0.2.0 on c"
    )
    assert unlike(c, a) == text
    assert version_line(c, trains(a, B)) == f"c is set aside: {text}"
    waits = replace(SPARE, me=c, world=trains(a, B), members=None, oldest=False)
    assert decide(waits, NOW, POLICY).reason == f"set aside: {text}", "the node that is set aside"
    cuda = of(("0.2.0", "2.13.0+cu130"), C)
    assert unlike(cuda, a) == (
        "c has torch 2.13.0+cu130, and a has torch 2.13.0+cpu; install torch 2.13.0+cpu on c, or "
        "torch 2.13.0+cu130 on the other nodes"
    )


def test_a_smaller_difference_is_one_line() -> None:
    later = of(("0.2.1", CPU), B)
    assert version_line(later, trains(of(OLD, A), later)) == (
        "b has ElasticZero 0.2.1, and a has ElasticZero 0.2.0: they train together, and results "
        "may depend on the node"
    )
    assert not slight_difference(of(OLD, B), of(OLD, A))
    assert not slight_difference(B, of(OLD, A)), "it states none"


def test_the_release_before_reads_a_world_with_versions() -> None:
    """Its rows of members are as they were; what is new is a field that it does not look at."""
    plain = json.loads(to_bytes(world(A, B)))
    stated = to_bytes(world(of(OLD, A), of(OLD, B), release=OLD[0], torch=OLD[1]))
    assert json.loads(stated) == plain | {"release": OLD[0], "torch": OLD[1]}
    assert {(m.release, m.torch) for m in world_from_bytes(stated).members} == {OLD}
    assert json.loads(to_bytes(of(OLD, A))).keys() - json.loads(to_bytes(A)).keys() == {
        "release",
        "torch",
    }


@pytest.mark.parametrize(
    ("versions", "grows"), [(OLD, True), (("0.2.7", CPU), True), (NEW, False), (("", ""), True)]
)
def test_no_generation_ends_for_a_node_of_another_build(
    versions: tuple[str, str], grows: bool
) -> None:
    """BD2: it waits, and training goes on."""
    members = [of(OLD, A), of(OLD, B), of(versions, C)]
    view = replace(
        AT_REST, me=members[0], world=trains(*members[:2]), members=named(*members), last_join_s=90
    )
    assert (decide(view, NOW, POLICY).actions == (RequestBoundaryStop(FLAG_GROW),)) is grows


@pytest.mark.parametrize(
    ("trained", "waiting", "leaves", "least", "expected"),
    [
        (OLD, (NEW, NEW), False, 1, "ab"),
        (OLD, (NEW, NEW), True, 1, "cd"),
        (OLD, (OLD, NEW), True, 1, "ac"),
        (OLD, (NEW, NEW), True, 2, "cd"),
        (OLD, (("", ""), NEW), True, 1, "ac"),
        (OLD, (("", ""), ("", "")), True, 1, "acd"),
        (NEW, (OLD, OLD), True, 1, "a"),
        (NEW, (OLD, OLD), True, 2, "cd"),
        (OLD, (("0.2.0", "2.13.0+cu130"),) * 2, True, 1, "a"),
    ],
)
def test_a_round_takes_the_newer_build_once_more_nodes_have_it(
    trained: tuple[str, str],
    waiting: tuple[tuple[str, str], tuple[str, str]],
    leaves: bool,
    least: int,
    expected: str,
) -> None:
    """BD2 to BD4: a and b train; c and d wait, and b leaves or stays."""
    registered = [of(trained, A), of(trained, B), of(waiting[0], C), of(waiting[1], D)]
    reports = {**(ENDED.reports or {}), "b": says("stopped", B, leaving=leaves)}
    view = replace(
        ENDED,
        me=registered[0],
        world=trains(*registered[:2]),
        members=named(*registered),
        reports=reports,
    )
    policy = replace(POLICY, min_nodes=least, max_nodes=4)
    assert "".join(written(view, policy).nodes) == expected


def test_members_that_give_way_are_named_with_what_to_do() -> None:
    registered = [of(OLD, A), of(OLD, B), of(NEW, C), of(NEW, D)]
    policy = replace(POLICY, min_nodes=1, max_nodes=4)
    reports = {**(ENDED.reports or {}), "b": says("stopped", B, leaving=True)}
    view = replace(
        ENDED,
        me=registered[0],
        world=trains(*registered[:2]),
        members=named(*registered),
        reports=reports,
    )
    following = written(view, policy)
    assert following.nodes == ("c", "d")
    assert (following.release, following.torch) == NEW
    assert (
        "a is set aside: a has ElasticZero 0.2.0, and c has ElasticZero 0.3.1" in following.reason
    )
    assert following.resume == written(replace(view, members=named(*registered[:1])), policy).resume


@pytest.mark.parametrize("view", [ALONE, SPARE], ids=["the first", "all others are gone"])
def test_a_new_world_has_one_build(view: View) -> None:
    first, second = (A, B) if view is ALONE else (C, D)
    settled = replace(view, me=of(OLD, first), last_join_s=0.0)
    policy = replace(POLICY, min_nodes=1)
    for versions, nodes in ((OLD, {first.node, second.node}), (NEW, {second.node})):
        members = named(of(OLD, first), of(versions, second))
        assert set(written(replace(settled, members=members), policy).nodes) == nodes


def test_too_few_of_one_build_wait_and_say_so() -> None:
    """BD5."""
    members = [of(OLD, A), of(("0.2.0", "2.13.0+cu130"), B)]
    view = replace(ALONE, me=members[0], members=named(*members), last_join_s=0.0)
    decision = decide(view, NOW, replace(POLICY, min_nodes=2))
    assert not decision.actions
    assert decision.reason.startswith("1 of at least 2 nodes are here; b has torch 2.13.0+cu130")


MEMBERS = st.lists(st.sampled_from((*BUILDS, ("", ""))), min_size=1, max_size=12)


@given(MEMBERS, st.sampled_from((None, *BUILDS)), st.integers(1, 6), st.integers(0, 6))
def test_a_build_that_suffices_is_always_taken(
    versions: list[tuple[str, str]], present: tuple[str, str] | None, least: int, beyond: int
) -> None:
    """The invariant, beside a dumb alternative: try all builds."""
    members = [of(v, replace(A, node=f"n{i}")) for i, v in enumerate(versions)]
    trained = build(present) if present is not None else None
    chosen = choose_build(members, trained, least, least + beyond)
    nodes = of_build(members, chosen)
    stated = {b for m in nodes if (b := build_of(m)) is not None}
    assert len(stated) <= 1, "BD1"
    sizes = {build(v): len(of_build(members, build(v))) for v in BUILDS}
    sizes = {b: min(size, least + beyond) for b, size in sizes.items() if size}
    able = {b: size for b, size in sizes.items() if size >= least}
    there = {b for m in members if (b := build_of(m)) is not None}
    if able.keys() & there:
        assert len(nodes) >= least, "BD4"
    if trained in able and trained in there and chosen != trained:
        assert trained is not None and chosen is not None
        assert chosen.follows(trained) and able[chosen] > able[trained], "BD2 and BD3"
    assert choose_build(members, chosen, least, least + beyond) == chosen, "it rests"


@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(("upgrade", "die", "come")), st.integers(0, 7))),
    st.booleans(),
)
def test_a_fleet_that_is_upgraded_never_waits_without_need(
    count: int, least: int, first_come: bool, events: list[tuple[str, int]], back: bool
) -> None:
    """Nodes are replaced one by one, in any order, and die meanwhile. At each moment the job trains
    if MIN nodes of either release are there; at the end it trains with the last release, and has
    gone over to it once, unless nodes died."""
    before, after = (NEW, OLD) if back else (OLD, NEW)
    nodes = {f"n{i}": before for i in range(count)}
    present: Build | None = build(before) if count >= least else None
    changes = [("upgrade", i) for i in range(count)]
    switches = deaths = 0
    for kind, index in [*events, *changes]:
        name = f"n{index}"
        if kind == "die":
            deaths += nodes.pop(name, None) is not None
        elif kind == "come":
            nodes.setdefault(name, after)
        elif nodes.get(name) != after:
            if first_come:
                nodes[f"{name}-new"] = after
                present, switches = _settled(nodes, present, least, switches)
            nodes.pop(name, None)
            present, switches = _settled(nodes, present, least, switches)
            if not first_come:
                nodes[name] = after
        present, switches = _settled(nodes, present, least, switches)
    remaining = sum(versions == after for versions in nodes.values())
    assert set(nodes.values()) <= {after} or events, "all are upgraded"
    if remaining >= least and set(nodes.values()) == {after}:
        assert present == build(after), "the whole fleet trains with the new release"
    if not deaths and not back:
        assert switches <= 1, "it goes over once"


def _settled(
    nodes: dict[str, tuple[str, str]], present: Build | None, least: int, switches: int
) -> tuple[Build | None, int]:
    """The build of the world that is written next; the last one where too few nodes are there."""
    members = [of(versions, replace(A, node=name)) for name, versions in nodes.items()]
    chosen = choose_build(members, present, least, 16)
    sizes = [sum(v == w for w in nodes.values()) for v in (OLD, NEW)]
    if max(sizes) >= least:
        assert len(of_build(members, chosen)) >= least, "the job trains"
    changed = present is not None and chosen is not None and chosen != present
    return chosen if chosen is not None else present, switches + changed


@pytest.mark.parametrize(("newer", "proposes"), [(2, True), (3, False)])
def test_a_leave_inside_the_loops_makes_way_for_a_newer_build(newer: int, proposes: bool) -> None:
    """PL2: without a round nodes could go over to it only once two old ranks are left."""
    members = [of(OLD, member) for member in (planned.A, planned.B, planned.C)]
    members += [of(NEW, replace(planned.D, node=f"new-{i}")) for i in range(newer)]
    stated = replace(planned.WORLD, release=OLD[0], torch=OLD[1])
    view = replace(planned.VIEW, me=members[0], world=stated, members=named(*members))
    actions = decide(view, NOW, planned.POLICY).actions
    assert any(isinstance(action, WriteProposal) for action in actions) is proposes


def test_a_leader_that_leaves_writes_the_world_of_those_that_wait() -> None:
    """The last node of the old release hands its state to the waiting ones of the new, however long
    its workers have taken to stop."""
    me, waits = of(OLD, A), of(NEW, B)
    report = says("stopped", A, leaving=True, holdings=HELD, final_step=20)
    view = replace(
        ENDED,
        me=me,
        world=trains(me),
        members=named(me, waits),
        reports={"a": report},
        my_report=report,
        leaving=True,
        round_s=NOW - 30.0,
    )
    following = written(view, replace(POLICY, min_nodes=1))
    assert (following.nodes, following.resume.tier) == (("b",), "ram")
