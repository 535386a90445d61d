"""What a decision costs in a large job: work for each node at most, and never for each pair.

A leader of a thousand decides whenever one of them has come or has answered. Work for each pair of
nodes took 50 ms each time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from elasticzero.ipc.assignment import Resume, Source
from elasticzero.launcher.protocol.actions import WriteWorld
from elasticzero.launcher.protocol.decide import decide
from elasticzero.launcher.protocol.documents import Failure, Holding, Member, Report
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import View
from tests.unit.launcher.protocol.test_decide import (
    ALONE,
    AT_REST,
    ENDED,
    NOW,
    POLICY,
    SILENT_B,
    SPARE,
    A,
    C,
    named,
    says,
    v,
    world,
)

NODES = 300
DOUBLED = 2.5
"""Most that twice the nodes may cost. Work for each pair costs four times as much."""


class Name(str):
    """A node's name that Python code compares, so that comparisons can be counted."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True


def nodes(count: int) -> list[Member]:
    others = (f"n{index}" for index in range(1, count))
    return [A, *(Member(Name(n), Name(f"i-{n}"), "10.0.0.1", 9400, 29500, 1) for n in others)]


def answers(members: list[Member], **fields: Any) -> dict[str, Report]:
    """Reports with names of their own: two equal names are compared, unlike one with itself."""
    held = (Holding(generation=3, step=20, world_size=1, ranks=(0,)),)
    return {
        Name(m.node): says("stopped", m, holdings=held, final_step=20, **fields) for m in members
    }


def forming(count: int) -> View:
    return replace(ALONE, members=named(*nodes(count)))


def training(count: int) -> View:
    members = nodes(count)
    reports = {m.node: says("restored", m) for m in members}
    return replace(AT_REST, members=named(*members), world=world(*members), reports=reports)


def in_round(count: int, **fields: Any) -> View:
    members = nodes(count)
    reports = answers(members, **fields)
    return v(
        ENDED, world=world(*members), members=named(*members), reports=reports,
        my_report=reports["a"], round_s=98.0,
    )  # fmt: skip


def unanswered(count: int) -> View:
    view = in_round(count)
    reports = dict(list((view.reports or {}).items())[:-3])
    return replace(view, reports=reports, alarm_s=NOW)


def late(count: int) -> View:
    view = in_round(count)
    reports = {
        node: replace(report, phase="alive") if int(node[1:] or 0) % 2 else report
        for node, report in (view.reports or {}).items()
    }
    return replace(view, reports=reports, round_s=NOW - 10.0, alarm_s=NOW - 10.0)


def lost(count: int) -> View:
    view = in_round(count)
    members = dict(list((view.members or {}).items())[: count // 2])
    reports = dict(list((view.reports or {}).items())[: count // 2])
    silent = {m.node: 90.0 for m in nodes(count)[count // 2 :]}
    return replace(view, members=members, reports=reports, missing_since_s=silent)


def newcomers_fail(count: int) -> View:
    failure = Failure(rank=0, blame="user", message="ValueError: no")
    view = in_round(count, failure=failure)
    reports = {n: replace(r, final_step=0) for n, r in (view.reports or {}).items()}
    assert view.world is not None
    workers = replace(view.workers, failure=failure, step=0)
    return replace(
        view, reports=reports, my_report=reports["a"], workers=workers,
        world=replace(view.world, trained=count // 2),
    )  # fmt: skip


def leaves_last(count: int) -> View:
    """A node without a place, whose snapshot the others still read."""
    members = nodes(count)
    source = Source(rank=0, node="c", address="10.0.0.1:9400")
    resume = Resume(tier="ram", step=5, generation=2, sources=(source,))
    return replace(
        SPARE, world=world(*members, resume=resume), leaving=True, outside_s=NOW - 1.0,
        reports={Name(m.node): says("restored", m) for m in members},
    )  # fmt: skip


def takes_over(count: int) -> View:
    gone = [Member(f"g{index}", "i", "10.0.0.1", 1, 2, 1) for index in range(count)]
    return replace(
        SPARE, world=world(*gone), missing_since_s={m.node: 90.0 for m in gone},
        members=named(SPARE.me, *nodes(count)),
    )  # fmt: skip


def policy_of(count: int, **changes: Any) -> JobPolicy:
    limits = JobPolicy(min_nodes=1, max_nodes=count, stop_s=1.0, save_s=1.0)
    return replace(limits, **changes)


VIEWS: Mapping[str, Callable[[int], View]] = {
    "not all are here": forming,
    "all are here": forming,
    "they train": training,
    "a round waits": unanswered,
    "a round ends": in_round,
    "half are late": late,
    "half are lost": lost,
    "new nodes fail": newcomers_fail,
    "a node leaves": leaves_last,
    "a spare takes over": takes_over,
}


def calls_of(case: str, count: int) -> int:
    """Returns the number of calls that one decision makes."""
    view, calls = VIEWS[case](count), 0
    policy = policy_of(count, min_nodes=count + 1 if case == "not all are here" else 1)

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        decide(view, NOW, policy)
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("case", VIEWS)
def test_a_decision_works_for_each_node_and_not_each_pair(case: str) -> None:
    calls_of(case, NODES)  # what is computed once
    once, twice = calls_of(case, NODES), calls_of(case, 2 * NODES)
    assert twice < DOUBLED * once, (once, twice)


@pytest.mark.parametrize(
    ("asked_s", "answered_s", "waits"),
    [(1.0, 0.05, True), (1.0, 0.15, False), (1.0, None, False), (2.1, 0.05, False)],
)
def test_a_silent_node_is_waited_for_while_others_answer(
    asked_s: float, answered_s: float | None, waits: bool
) -> None:
    """Seconds since the nodes were asked, and since the last answer came."""
    view = v(
        SILENT_B, alarm_s=NOW - asked_s, members=named(A, C),
        answered_s=None if answered_s is None else NOW - answered_s,
    )  # fmt: skip
    actions = decide(view, NOW, POLICY).actions
    assert [type(action) for action in actions] == ([] if waits else [WriteWorld])
