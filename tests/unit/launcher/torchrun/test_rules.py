"""Every rule of a torchrun rendezvous, one case each: what a node sees, and what it does."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.protocol.documents import Done, Member, World
from elasticzero.launcher.protocol.invariants import check_invariants
from elasticzero.launcher.protocol.view import StoreHealth
from elasticzero.launcher.torchrun.rules import (
    AssignPlace,
    Refusal,
    Refuse,
    Register,
    Reopen,
    RoundLimits,
    RoundView,
    WriteRound,
    decide,
    lost,
    newcomers,
)

NOW = 1000.0
LIMITS = RoundLimits(min_nodes=2, max_nodes=3)
WELL = StoreHealth(outage_end_s=1.0, confirmed_s=NOW)
FINISHED = Done(outcome="finished", step=0, reason="the workers of a finished")
FAILED = Done(outcome="failed", step=0, reason="a ended with ChildFailedError")


def member(node: str, incarnation: str = "1") -> Member:
    return Member(node, f"{node}{incarnation}", "10.0.0.1", 0, 29500, 1)


A, B, C, D = (member(name) for name in "abcd")
A2, B2, C2 = (member(name, "2") for name in "abc")


def world(*members: Member) -> World:
    return World(
        generation=3,
        token="t",
        members=members,
        strategy="torchrun",
        resume=Resume(tier="fresh"),
        reason="test",
    )


def view(me: Member, *members: Member, **changes: Any) -> RoundView:
    """A registered node that has asked for a second, of a store that is well."""
    plain = RoundView(
        me=me,
        etcd="etcd:2379",
        members={m.node: m for m in members},
        requested_s=NOW - 1,
        registered=True,
        newcomer=False,
        last_join_s=NOW - 1,
        store=WELL,
        token="new",
    )
    return replace(plain, **changes)


def asked(**ago: float) -> dict[str, float]:
    return {"requested_s": NOW - ago["s"]}


WAITS = [
    ("T1 no word of etcd yet", view(A, members=None)),
    ("T2 nodes of a closed run", view(A, B, done=FINISHED, newcomer=True, registered=False)),
    ("T5 full and well", view(D, A, B, C, D, world=world(A, B, C))),
    ("T5 as long as it takes", view(D, A, B, C, D, world=world(A, B, C), **asked(s=9e9))),
    ("T7 the others still train", view(A2, A2, B, world=world(A, B))),
    ("T7 a newcomer waits for them", view(C, A, B, C, world=world(A, B))),
    (
        "T8 etcd has come back",
        view(
            A2,
            A2,
            C,
            world=world(A, B),
            missing_since_s={"b": NOW - 1},
            store=StoreHealth(outage_end_s=NOW - 1, confirmed_s=NOW),
        ),
    ),
    (
        "T8 a newcomer gives the lost a TTL",
        view(C, C, D, world=world(A, B), missing_since_s={"a": NOW - 1, "b": NOW - 1}),
    ),
    ("T9 too few", view(A, A)),
    ("T10 the last came a second ago", view(A, A, B)),
    (
        "T10 a newcomer came just now",
        view(A2, A2, C, world=world(A), last_join_s=NOW - 0.1),
    ),
    ("T11 another is first", view(B, A, B, C)),
]


@pytest.mark.parametrize(("case", "seen"), WAITS, ids=[case for case, _ in WAITS])
def test_it_waits(case: str, seen: RoundView) -> None:
    turn = decide(seen, NOW, LIMITS)
    assert turn.action is None, case
    assert turn.reason
    assert turn.spare == case.startswith("T5")


REFUSED: list[tuple[str, Refusal, RoundView]] = [
    ("no etcd", "connection", view(A, members=None, **asked(s=60))),
    (
        "etcd went away",
        "connection",
        view(A, A, store=StoreHealth(reachable=False), **asked(s=600)),
    ),
    ("closed", "closed", view(A2, done=FINISHED, placed=True)),
    ("failed elsewhere", "closed", view(D, done=FAILED)),
    ("never needed", "over", view(D, done=FINISHED)),
    (
        "a closed run's nodes stay",
        "closed",
        view(A, B, done=FINISHED, newcomer=True, registered=False, **asked(s=7)),
    ),
    ("too few for too long", "timeout", view(A, A, **asked(s=600))),
    ("they do not leave", "timeout", view(A2, A2, B, world=world(A, B), **asked(s=600))),
]


@pytest.mark.parametrize(("case", "kind", "seen"), REFUSED, ids=[r[0] for r in REFUSED])
def test_it_is_refused(case: str, kind: Refusal, seen: RoundView) -> None:
    turn = decide(seen, NOW, LIMITS)
    assert turn.action == Refuse(kind), case
    assert "etcd:2379" in turn.reason


def test_a_node_that_does_not_ask_does_nothing() -> None:
    assert decide(view(A, A, B, requested_s=None), NOW, LIMITS).action is None


def test_t2_a_newcomer_reopens_a_run_without_nodes() -> None:
    """All nodes of that run have gone."""
    seen = view(A, done=FINISHED, newcomer=True, registered=False)
    assert decide(seen, NOW, LIMITS).action == Reopen()


def test_t3_an_asking_is_registered() -> None:
    assert decide(view(A, registered=False), NOW, LIMITS).action == Register()


def test_t4_a_place_is_taken_by_the_registration_that_it_names() -> None:
    seen = view(B, A, B, world=world(A, B))
    assert decide(seen, NOW, LIMITS).action == AssignPlace(world(A, B), 1)
    assert decide(replace(seen, me=B2), NOW, LIMITS).action is None


WRITTEN = [
    ("all came", None, view(A, A, B, C), (A, B, C)),
    ("some came", None, view(A, A, B, last_join_s=NOW - 30), (A, B)),
    ("more than MAX came", None, view(A, A, B, C, D), (A, B, C)),
    ("workers failed", world(A, B), view(A2, B2, A2), (A2, B2)),
    ("a newcomer", world(A, B), view(A2, C, B2, A2), (A2, B2, C)),
    (
        "the first is lost",
        world(A, B, C),
        view(B2, B2, C2, missing_since_s={"a": NOW}),
        (B2, C2),
    ),
    (
        "a spare is taken",
        world(A, B, C),
        view(B2, D, B2, C2, missing_since_s={"a": NOW}),
        (B2, C2, D),
    ),
    (
        "an abandoned run",
        world(A, B),
        view(C, C, D, missing_since_s={"a": NOW - 6, "b": NOW - 6}, last_join_s=NOW - 31),
        (C, D),
    ),
]


@pytest.mark.parametrize(("case", "before", "seen", "chosen"), WRITTEN, ids=[w[0] for w in WRITTEN])
def test_t11_the_first_of_the_next_world_writes_it(
    case: str, before: World | None, seen: RoundView, chosen: tuple[Member, ...]
) -> None:
    action = decide(replace(seen, world=before), NOW, LIMITS).action
    assert isinstance(action, WriteRound), case
    assert action.world.members == chosen
    assert action.world.token == "new"
    check_invariants(before, action.world)


LOST = [
    ("all is well", view(A, A, B, world=world(A, B)), []),
    ("one asks anew", view(A, A, B2, world=world(A, B)), ["b"]),
    ("one is gone", view(A, A, world=world(A, B), missing_since_s={"b": NOW}), ["b"]),
    ("the world went on", view(A, B, C, world=world(B2, C)), ["a"]),
    ("the world was taken away", view(A, A, B), ["a"]),
    ("finished elsewhere", view(A, A, world=world(A, B), done=FINISHED), []),
    ("failed elsewhere", view(A, A, world=world(A, B), done=FAILED), [FAILED.reason]),
]


@pytest.mark.parametrize(("case", "seen", "expected"), LOST, ids=[case for case, _, _ in LOST])
def test_what_ends_a_world(case: str, seen: RoundView, expected: list[str]) -> None:
    assert lost(replace(seen, requested_s=None), NOW, LIMITS) == expected, case


@pytest.mark.parametrize(
    "health",
    [
        StoreHealth(reachable=False, outage_end_s=1.0, confirmed_s=NOW),
        StoreHealth(outage_end_s=NOW - 4, confirmed_s=NOW),
        StoreHealth(outage_end_s=1.0, confirmed_s=NOW - 4),
    ],
    ids=["away", "back for less than a TTL", "own lease not confirmed"],
)
def test_while_etcd_is_not_well_nobody_is_lost(health: StoreHealth) -> None:
    seen = view(
        A, world=world(A, B), missing_since_s={"b": NOW - 99}, store=health, requested_s=None
    )
    assert lost(seen, NOW, LIMITS) == []


def test_newcomers_count_where_there_is_room() -> None:
    seen = view(A, A, B, C, D, world=world(A, B), requested_s=None)
    assert newcomers(seen, [], LIMITS) == ["c"]
    full = view(A, A, B, C, D, world=world(A, B, C), requested_s=None)
    assert newcomers(full, [], LIMITS) == []
    assert newcomers(full, ["b"], LIMITS) == ["d"]
    assert newcomers(replace(seen, done=FINISHED), [], LIMITS) == []


@pytest.mark.parametrize(
    "wrong",
    [{"min_nodes": 0}, {"min_nodes": 4}, {"lease_ttl_s": 1.0}, {"join_timeout_s": -1.0}],
    ids=str,
)
def test_limits_that_cannot_be_meant(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"nodes|lease_ttl|join_timeout"):
        RoundLimits(**{"min_nodes": 1, "max_nodes": 3, **wrong})


class Game:
    """Nodes that come, fail and vanish, and the store between them."""

    limits = RoundLimits(min_nodes=1, max_nodes=4, last_call_timeout_s=3.0)

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.alive: dict[str, Member] = {}
        self.registered: dict[str, Member] = {}
        self.asking: set[str] = set()
        self.world: World | None = None
        self.joined_s = self.missing_s = 0.0

    def strike(self, now_s: float) -> None:
        what, node = self.draw.choice(["come", "fail", "vanish"]), f"n{self.draw.randrange(6)}"
        if what == "vanish":
            self.asking.discard(node)
            self.alive.pop(node, None)
            self.registered.pop(node, None)
            self.missing_s = now_s
        elif (what == "come") != (node in self.alive):
            self.ask(node, now_s)

    def ask(self, node: str, now_s: float) -> None:
        self.alive[node] = member(node, f"-{now_s}")
        self.asking.add(node)

    def view(self, node: str, now_s: float) -> RoundView:
        placed = self.world.members if self.world is not None else ()
        gone = [m.node for m in placed if m.node not in self.registered]
        return RoundView(
            me=self.alive[node],
            etcd="etcd:2379",
            members=dict(self.registered),
            world=self.world,
            requested_s=now_s if node in self.asking else None,
            registered=self.registered.get(node) == self.alive[node],
            newcomer=False,
            last_join_s=self.joined_s,
            missing_since_s=dict.fromkeys(gone, self.missing_s),
            store=StoreHealth(outage_end_s=1.0, confirmed_s=now_s),
            token=str(now_s),
        )

    def turn(self, node: str, now_s: float) -> None:
        seen = self.view(node, now_s)
        if node not in self.asking:
            gone = lost(seen, now_s, self.limits)
            if gone or newcomers(seen, gone, self.limits):
                self.ask(node, now_s)
            return
        match decide(seen, now_s, self.limits).action:
            case Register():
                self.registered.pop(node, None)
                self.registered[node] = self.alive[node]
                self.joined_s = now_s
            case WriteRound(world=following):
                check_invariants(self.world, following)
                assert all(self.registered.get(m.node) == m for m in following.members)
                self.world = following
            case AssignPlace():
                self.asking.discard(node)
            case _:
                pass


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_all_who_live_come_to_one_world(seed: int) -> None:
    """Nodes come, fail, vanish and ask in any order; then, left alone, they agree."""
    game = Game(seed)
    for turn in range(300):
        if turn < 200 and game.draw.random() < 0.15:
            game.strike(NOW + turn)
        for node in game.draw.sample(sorted(game.alive), len(game.alive)):
            game.turn(node, NOW + turn)
    if game.alive:
        assert game.world is not None
        named = {m.node for m in game.world.members}
        assert len(named) == min(4, len(game.alive))
        assert named <= set(game.alive)
        assert all(game.world.names(game.alive[node]) for node in named)
        assert not game.asking & named
