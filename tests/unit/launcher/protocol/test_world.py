"""The next world's state and order: one line a rule."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticzero.ipc.assignment import Resume, Source
from elasticzero.ipc.failure import Blame
from elasticzero.launcher.observability.job_counts import interrupting
from elasticzero.launcher.protocol.documents import (
    Failure,
    Holding,
    Member,
    Report,
    World,
    to_bytes,
    world_from_bytes,
)
from elasticzero.launcher.protocol.failure_policy import root_cause
from elasticzero.launcher.protocol.invariants import check_invariants
from elasticzero.launcher.protocol.placement import (
    alike,
    mirroring_ranks,
    order_members,
    replica_sources,
)
from elasticzero.launcher.protocol.resume import choose_resume, describe_incomplete_snapshot
from elasticzero.launcher.store.decoding import document


def member(name: str, nproc: int = 1) -> Member:
    return Member(name, f"i-{name}", "10.0.0.1", 9400, 29500, nproc)


A, B, C, D = (member(name) for name in "abcd")


def world(*members: Member, generation: int = 3, resume: Resume | None = None) -> World:
    return World(
        generation=generation,
        token="t",
        members=members,
        strategy="zero1",
        resume=resume or Resume(tier="fresh"),
        reason="test",
    )


def holds(*holdings: tuple[int, int, int, tuple[int, ...]]) -> Report:
    """Each holding: generation, step, world size, ranks."""
    return Report(
        incarnation="i",
        phase="stopped",
        holdings=tuple(
            Holding(generation=g, step=s, world_size=w, ranks=r) for g, s, w, r in holdings
        ),
    )


def ram(step: int, generation: int, *sources: tuple[int, str]) -> Resume:
    return Resume(
        tier="ram",
        step=step,
        generation=generation,
        sources=tuple(Source(rank=r, node=n, address="10.0.0.1:9400") for r, n in sources),
    )


STORED = Resume(tier="storage", step=40)
FRESH = Resume(tier="fresh")
ORIGIN = ram(30, 2, (0, "a"))

RESUME_TABLE = [
    # (what, the world before, reports, newest checkpoint, the state chosen)
    ("nothing anywhere", None, {}, None, FRESH),
    ("a checkpoint is there", None, {}, 40, STORED),
    ("a checkpoint of step 0", None, {}, 0, Resume(tier="storage", step=0)),
    ("one complete copy", world(A, B), {"a": holds((3, 50, 1, (0,)))}, None, ram(50, 3, (0, "a"))),
    (
        "complete copies of two steps: the later",
        world(A, B),
        {"a": holds((3, 50, 1, (0,))), "b": holds((3, 51, 1, (0,)))},
        40,
        ram(51, 3, (0, "b")),
    ),
    (
        "complete copies of one step: both are sources",
        world(A, B),
        {"a": holds((3, 50, 1, (0,))), "b": holds((3, 50, 1, (0,)))},
        None,
        ram(50, 3, (0, "a"), (0, "b")),
    ),
    (
        "all shards",
        world(A, B),
        {"a": holds((3, 50, 2, (0,))), "b": holds((3, 50, 2, (1,)))},
        40,
        ram(50, 3, (0, "a"), (1, "b")),
    ),
    ("a shard is missing", world(A, B), {"a": holds((3, 50, 2, (0,)))}, 40, STORED),
    (
        "shards of two steps are not mixed",
        world(A, B),
        {"a": holds((3, 50, 2, (0,))), "b": holds((3, 51, 2, (1,)))},
        None,
        FRESH,
    ),
    (
        "shards of two generations are not mixed",
        world(A, B, resume=ORIGIN),
        {"a": holds((2, 30, 2, (0,))), "b": holds((3, 30, 2, (1,)))},
        None,
        FRESH,
    ),
    (
        "the state the generation came from",
        world(A, B, resume=ORIGIN),
        {"a": holds((2, 30, 1, (0,)))},
        20,
        ORIGIN,
    ),
    (
        "a former generation's other steps are off the lineage",
        world(A, B, resume=ORIGIN),
        {"a": holds((2, 31, 1, (0,)), (1, 30, 1, (0,)))},
        20,
        Resume(tier="storage", step=20),
    ),
    ("storage is later", world(A, B), {"a": holds((3, 39, 1, (0,)))}, 40, STORED),
    (
        "memory is as late, and nearer",
        world(A, B),
        {"a": holds((3, 40, 1, (0,)))},
        40,
        ram(40, 3, (0, "a")),
    ),
]


@pytest.mark.parametrize(
    ("before", "reports", "stored", "chosen"),
    [row[1:] for row in RESUME_TABLE],
    ids=[row[0] for row in RESUME_TABLE],
)
def test_choose_resume(
    before: World, reports: dict[str, Report], stored: int | None, chosen: Resume
) -> None:
    assert choose_resume(before, reports, stored) == chosen


def test_a_state_that_a_node_has_brought_counts_where_nobody_of_the_last_world_is_there() -> None:
    brings = replace(C, brought_step=45, brought_shards=2)
    brought = ram(45, 0, (0, "c"), (1, "c"))
    for before in (None, world(A, B, resume=ORIGIN)):
        assert choose_resume(before, {}, None, (B, brings)) == brought
        assert choose_resume(before, {}, 40, (brings,)) == brought
        assert choose_resume(before, {}, 46, (brings,)) == brought, "steps of islands differ"
        assert choose_resume(before, {}, None, (B, C)) == FRESH
    began = world(C, resume=brought)
    again = {"c": holds((0, 45, 2, (0, 1)))}
    assert choose_resume(began, again, None) == brought, "and on, as its generation's first state"


def test_a_world_does_not_say_what_its_members_have_brought() -> None:
    brings = replace(C, brought_step=45, brought_shards=2)
    (read,) = world_from_bytes(to_bytes(world(brings))).members
    assert (read.brought_step, read.brought_shards) == (0, 0)
    registered: Member = document(Member, to_bytes(brings))
    assert (registered.brought_step, registered.brought_shards) == (45, 2)
    assert b"brought" not in to_bytes(C)


LINE_UP_TABLE = [
    ("stay in order", world(A, B, C), [], [C, A], 4, [A, C]),
    ("new ones come last", world(B, C), [A], [C, B], 4, [B, C, A]),
    ("no room beyond MAX", world(A, B), [C, D], [A, B], 3, [A, B, C]),
    ("the first world", None, [C, A], [], 4, [C, A]),
]


@pytest.mark.parametrize(
    ("before", "joiners", "staying", "most", "expected"),
    [row[1:] for row in LINE_UP_TABLE],
    ids=[row[0] for row in LINE_UP_TABLE],
)
def test_line_up(
    before: World | None,
    joiners: list[Member],
    staying: list[Member],
    most: int,
    expected: list[Member],
) -> None:
    assert list(order_members(before, joiners, staying, most)) == expected


def test_ranks_follow_the_order_and_the_workers_of_each_node() -> None:
    w = world(member("a", 2), member("b", 1), member("c", 4))
    assert (w.world_size, [w.first_rank(i) for i in range(3)]) == (7, [0, 2, 3])


def test_the_root_cause_is_a_lost_peer_only_without_another() -> None:
    def failed(rank: int, blame: Blame) -> Report:
        failure = Failure(rank=rank, blame=blame, message="x")
        return Report(incarnation="i", phase="stopped", failure=failure)

    reports = {"a": failed(0, "peer"), "b": failed(1, "killed"), "c": failed(2, "user")}
    assert root_cause(reports) == ("c", reports["c"].failure)
    del reports["c"]
    assert root_cause(reports) == ("b", reports["b"].failure)
    assert root_cause({"a": holds()}) is None


def test_a_stored_world_takes_about_60_bytes_a_member() -> None:
    """It is the same when it is read."""
    members = tuple(
        Member(f"node-{i}", f"{i:08x}", "10.1.2.3", 9400, 40000 + i, 8) for i in range(100)
    )
    w = world(*members, resume=ram(7, 2, (0, "node-1"), (1, "node-2")))
    data = to_bytes(w)
    assert world_from_bytes(data) == w
    assert len(data) < 100 * 70


def test_a_world_that_is_read_makes_few_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent of a thousand reads every world, and looks at its own place in it."""
    members = [Member(f"n{i}", f"{i:08x}", "10.1.2.3", 9400, 40000 + i, 8) for i in range(1000)]
    sources = [(rank, f"n{rank}") for rank in range(1000)]
    data = to_bytes(world(*members, resume=ram(7, 2, *sources)))
    made: list[type] = []
    for kind in (Member, Source):
        create = kind.__init__

        def note(self: Any, *values: Any, create: Any = create, **named: Any) -> None:
            made.append(type(self))
            create(self, *values, **named)

        monkeypatch.setattr(kind, "__init__", note)
    read = document(World, data)
    before = replace(read, members=members)
    assert not interrupting(before, read)
    assert read.find("n7", "00000007") == 7
    assert (read.world_size, list(read.ranks(1))) == (8000, list(range(8, 16)))
    assert list(read.nodes) == [f"n{i}" for i in range(1000)]
    assert len(made) <= 1, "the member of which the ranks were asked for"


def test_every_way_to_make_a_world_gives_its_members_places() -> None:
    made = world(A, B)
    for w in (made, world_from_bytes(to_bytes(made)), replace(world(B), members=(A, B))):
        assert [w.find(m.node, m.incarnation) for m in (A, B)] == [0, 1]
        assert w.find(A.node, "another") is None
        assert not w.names(C)


def test_invariants_catch_a_reordered_world() -> None:
    before, after = world(A, B, generation=3), world(B, A, generation=4)
    with pytest.raises(AssertionError, match="keep their order"):
        check_invariants(before, after)
    with pytest.raises(AssertionError, match="generations only grow"):
        check_invariants(before, world(A, B, generation=5))
    with pytest.raises(AssertionError, match="one place"):
        check_invariants(None, world(A, A, generation=1))


@pytest.mark.parametrize("count", range(1, 40))
def test_every_node_replicates_one_other_and_is_replicated(count: int) -> None:
    sources = replica_sources([""] * count)
    if count == 1:
        assert sources == ()
        return
    assert sorted(sources) == list(range(count))
    assert all(other != index for index, other in enumerate(sources))
    fatal = {frozenset((index, other)) for index, other in enumerate(sources)}
    assert len(fatal) <= count // 2 + 2, "few pairs of nodes can lose a shard"


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=40))
def test_a_pair_lies_in_two_zones_where_it_can(zones: list[str]) -> None:
    sources = replica_sources(zones)
    count = len(zones)
    assert sorted(sources) == list(range(count))
    assert all(other != index for index, other in enumerate(sources))
    fatal = {frozenset((index, other)) for index, other in enumerate(sources)}
    assert len(fatal) <= count // 2 + 2
    alike = sum(zones[index] == zones[other] for index, other in enumerate(sources))
    most = max(zones.count(zone) for zone in zones)
    if most <= count // 2:
        assert alike <= count % 2 * 2, "a ring of three may have two of one zone"


def test_without_zones_neighbours_are_a_pair() -> None:
    assert replica_sources(["", "", "", ""]) == (1, 0, 3, 2)
    assert replica_sources(["a", "a", "b", "b"]) == (2, 3, 0, 1)


def test_zones_are_stored_where_nodes_say_theirs() -> None:
    plain = world(A, B)
    assert b"zone" not in to_bytes(plain)
    assert world_from_bytes(to_bytes(plain)) == plain
    zoned = replace(plain, members=(replace(A, zone="x"), replace(B, zone="y")))
    assert world_from_bytes(to_bytes(zoned)).members == zoned.members
    before = json.loads(to_bytes(plain))
    assert json.loads(to_bytes(zoned)) == before | {"zones": ["x", "y"]}, "other releases read it"
    partly = replace(plain, members=(replace(A, zone="x"), B))
    assert to_bytes(partly) == to_bytes(plain), "one may be of a release without zones"
    assert b"zone" not in to_bytes(A) and b"zone" in to_bytes(replace(A, zone="x"))


@pytest.mark.parametrize("workers", [(1,), (1, 1), (2, 1, 3), (1, 4, 2, 2), (3, 1, 1, 2, 1)])
def test_a_rank_is_mirrored_where_its_replica_is(workers: tuple[int, ...]) -> None:
    plain = world(*(member(f"n{index}", count) for index, count in enumerate(workers)))
    assert mirroring_ranks(plain) == {}
    keepers = mirroring_ranks(replace(plain, redundancy="mirror"))
    if len(workers) == 1:
        assert keepers == {}
        return
    assert sorted(keepers) == list(range(plain.world_size))
    for index in range(len(workers)):
        source = replica_sources([""] * len(workers))[index]
        loads = [list(keepers.values()).count(rank) for rank in plain.ranks(index)]
        assert sum(loads) == workers[source] and max(loads) - min(loads) <= 1
        assert {keepers[rank] for rank in plain.ranks(source)} <= set(plain.ranks(index))


def test_a_snapshot_that_lost_its_holders_is_named() -> None:
    before = world(A, B, C)
    reports = {"a": holds((3, 57, 3, (0,))), "b": holds((3, 57, 3, (1, 0)), (3, 58, 3, (1,)))}
    storage = Resume(tier="storage", step=50)
    assert describe_incomplete_snapshot(before, reports, storage) == (
        "; no node is left that holds the part of rank 2 of the snapshot of step 57"
    )
    assert describe_incomplete_snapshot(before, reports, ram(57, 3, (0, "a"))) == ""
    assert describe_incomplete_snapshot(before, {}, storage) == ""
    assert describe_incomplete_snapshot(before, reports, Resume(tier="storage", step=60)) == ""


def test_a_starting_snapshot_whose_holders_are_lost_is_named() -> None:
    before = replace(world(A, B, C), resume=ram(57, 2, (0, "a"), (1, "b"), (2, "d")))
    reports = {"a": holds((2, 57, 3, (0,))), "b": holds((2, 57, 3, (1,)))}
    assert describe_incomplete_snapshot(before, reports, Resume(tier="storage", step=50)) == (
        "; no node is left that holds the part of rank 2 of the snapshot of step 57"
    )


TWO = [member("a", 2), member("b", 2)]
ODD = member("c", 3)


@pytest.mark.parametrize(
    ("members", "workers", "alike_members"),
    [
        pytest.param([*TWO, ODD], None, TWO, id="as many as the first has"),
        pytest.param([ODD, *TWO], None, [ODD], id="whoever is first"),
        pytest.param([ODD, *TWO], 2, TWO, id="as many as the world's"),
        pytest.param([ODD], 2, [], id="none"),
        pytest.param([], None, [], id="nobody"),
    ],
)
def test_nodes_that_hold_everything_have_as_many_workers(
    members: list[Member], workers: int | None, alike_members: list[Member]
) -> None:
    assert alike(members, "node", workers) == alike_members
    assert alike(members, "world", workers) == members


def test_shards_of_one_node_are_a_whole_snapshot_from_any_nodes() -> None:
    of_node = replace(world(*TWO), shard="node")
    reports = {"a": holds((3, 58, 2, (0, 1)), (3, 59, 2, (0,))), "b": holds((3, 58, 2, (1, 0)))}
    resume = choose_resume(of_node, reports, 50)
    sources = [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert (resume.tier, resume.step) == ("ram", 58)
    assert [(source.rank, source.node) for source in resume.sources] == sources
    reports["b"] = holds((3, 58, 2, (1, 0)), (3, 59, 2, (1,)))
    assert choose_resume(of_node, reports, 50).step == 59
    assert world_from_bytes(to_bytes(of_node)) == of_node
    assert b"shard" not in to_bytes(world(*TWO))


def test_a_node_s_own_state_counts_where_ranks_differ_and_nothing_else_does() -> None:
    lost = Failure(rank=4, blame="environment", message="differs", step=57, verified=50, odd=True)
    reports = {"a": holds((3, 57, 2, (0, 1))), "b": replace(holds(), failure=lost)}
    three = replace(world(*TWO, member("d", 2)), shard="node")
    assert choose_resume(three, reports, None).step == 57
    assert choose_resume(three, reports, 45).step == 45
    divided = {**reports, "a": holds((3, 57, 6, (0, 1, 2, 3, 4, 5)))}
    assert choose_resume(replace(three, shard="world"), divided, None).tier == "fresh"


@pytest.mark.parametrize(("verified", "stored"), [(50, 60), (50, 45), (0, 10), (0, 0)])
def test_a_checkpoint_counts_where_ranks_differ(verified: int, stored: int) -> None:
    """Its ranks were equal. One that an older generation had completed late was passed over for
    being newer, and one of step 0, as an import makes it, for nothing: the job began anew."""
    lost = Failure(rank=1, blame="environment", message="differs", step=57, verified=verified)
    reports = {"a": holds((3, 55, 2, (0,))), "b": replace(holds(), failure=lost)}
    chosen = choose_resume(world(A, B), reports, stored)
    assert chosen == Resume(tier="storage", step=stored)
    assert choose_resume(world(A, B), reports, None) == FRESH
