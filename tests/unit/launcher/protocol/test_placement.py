"""Which nodes a world of equal nodes takes, and what the others say."""

from __future__ import annotations

from dataclasses import replace

from elasticzero.launcher.protocol.decide import decide
from tests.unit.launcher.protocol.test_decide import (
    ALONE,
    AT_REST,
    ENDED,
    NOW,
    POLICY,
    SPARE,
    A,
    B,
    C,
    named,
    next_world,
    v,
    world,
)


def test_a_node_with_another_number_of_workers_waits_outside() -> None:
    odd = replace(C, nproc=3)
    rows = world(A, B, shard="node")
    room = v(AT_REST, world=rows, members=named(A, B, odd), last_join_s=90.0)
    assert decide(room, NOW, POLICY).actions == ()
    assert decide(v(room, world=world(A, B)), NOW, POLICY).actions
    ended = v(ENDED, world=rows, members=named(A, B, odd))
    assert [m.node for m in next_world(ended).members] == ["a", "b"]
    assert next_world(ended).shard == "node"
    outside = v(SPARE, me=odd, world=rows, missing_since_s={}, members=named(A, B, odd))
    assert decide(outside, NOW, POLICY).reason == (
        "set aside: c has 3 workers, and a has 1; --shard node needs the same --nproc-per-node on "
        "all nodes"
    )
    alone = v(ALONE, members=named(A, odd), last_join_s=90.0)
    decision = decide(alone, NOW, replace(POLICY, shard="node"))
    assert decision.actions == ()
    assert decision.reason.startswith("1 of at least 2 nodes are here; c has 3 workers, and a has")
    assert decide(alone, NOW, POLICY).actions
