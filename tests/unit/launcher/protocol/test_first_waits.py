"""The sentence in which a node says what it waits for while it sees no world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticzero.launcher.protocol.decide import decide
from elasticzero.launcher.protocol.documents import Member
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import View

A, B = (Member(name, f"i-{name}", "10.0.0.1", 9400, 29500, 1) for name in "ab")
POLICY = JobPolicy(min_nodes=2, max_nodes=3, save_timeout_s=60.0)
ALONE = View(me=A, members={"a": A}, oldest=True, last_join_s=99.0, began_s=90.0, token="new")
WAITS: list[tuple[str, dict[str, Any], str]] = [
    (
        "etcd has not answered",
        {"members": None, "world_unread": True},
        "waiting for etcd to say how far the job has come",
    ),
    (
        "not the oldest",
        {"me": B, "oldest": False, "members": None},
        "waiting for the oldest node to write the first world",
    ),
    ("too few", {}, "1 of at least 2 nodes are here"),
    ("not settled", {"members": {"a": A, "b": B}}, "2 nodes are here; waiting 3 s for more"),
]
"""What a node without a world sees, and what it says."""


@pytest.mark.parametrize(
    ("changes", "reason"), [row[1:] for row in WAITS], ids=[row[0] for row in WAITS]
)
def test_node_without_a_world_says_what_it_waits_for(changes: dict[str, Any], reason: str) -> None:
    """A newcomer of a running job reads from etcd that there is a world before it claims that
    there is none."""
    assert decide(replace(ALONE, **changes), 100.0, POLICY).reason == reason


def test_node_that_waits_alone_is_counted_as_one() -> None:
    alone = decide(ALONE, 100.0, replace(POLICY, min_nodes=1))
    assert alone.reason == "1 node is here; waiting 3 s for more"
