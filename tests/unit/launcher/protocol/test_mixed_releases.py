"""Whether the nodes of a world prove the job's secret, while some may be of the release before."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elasticzero.launcher.protocol.actions import WriteWorld
from elasticzero.launcher.protocol.decide import decide
from elasticzero.launcher.protocol.documents import (
    UNSTATED,
    Member,
    World,
    to_bytes,
    world_from_bytes,
)
from elasticzero.launcher.protocol.view import View
from tests.unit.launcher.protocol.test_decide import (
    ALONE,
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


def of_run(run: int, *members: Member) -> list[Member]:
    """The same as they are registered by nodes of this run; UNSTATED: of the release before."""
    return [replace(member, run=run) for member in members]


def world_of(view: View) -> World:
    """The world that the leader writes, as every agent reads it."""
    [action] = decide(view, NOW, POLICY).actions
    assert isinstance(action, WriteWorld)
    return world_from_bytes(to_bytes(replace(action.world, run=1)))


@pytest.mark.parametrize("view", [ALONE, SPARE], ids=["the first", "all others are gone"])
def test_a_new_world_proves_where_all_of_its_members_state_a_run(view: View) -> None:
    pair = (A, B) if view is ALONE else (C, D)
    settled = replace(view, last_join_s=0.0)
    for runs, proofs in (((1, 1), True), ((1, UNSTATED), False), ((UNSTATED, UNSTATED), False)):
        members = [replace(m, run=run) for m, run in zip(pair, runs, strict=True)]
        written = world_of(replace(settled, me=members[0], members=named(*members)))
        assert written.proofs is proofs
        assert {member.run for member in written.members} == {1 if proofs else UNSTATED}


def test_the_world_after_the_last_old_node_proves() -> None:
    """The members of the world before have no run there, for one of them stated none."""
    members = of_run(1, A, B)
    reports = {node: replace(report, run=1) for node, report in (ENDED.reports or {}).items()}
    for registered, proofs in ((members, True), ([members[0], B], False)):
        view = replace(ENDED, me=members[0], members=named(*registered), reports=reports)
        assert world_of(view).proofs is proofs


def test_a_node_that_leaves_with_a_part_of_the_state_counts_too() -> None:
    """The others read its snapshot once it is not a member any more."""
    members = of_run(1, A, B, C)
    answers = {node: replace(report, run=1) for node, report in (ENDED.reports or {}).items()}
    for run, proofs in ((1, True), (UNSTATED, False)):
        leaves = says("stopped", B, holdings=HELD, leaving=True, run=run)
        view = replace(
            ENDED, me=members[0], members=named(*members), reports={**answers, "b": leaves}
        )
        written = world_of(view)
        assert [member.node for member in written.members] == ["a", "c"]
        assert {source.node for source in written.resume.sources} == {"a", "b"}
        assert written.proofs is proofs


def test_a_world_states_its_run_for_all_of_its_members() -> None:
    plain = world(A, B)
    assert b"proofs" not in to_bytes(plain)
    proves = replace(plain, proofs=True, run=4)
    before = json.loads(to_bytes(replace(plain, run=4)))
    assert json.loads(to_bytes(proves)) == before | {"proofs": True}, "the release before reads it"
    assert [member.run for member in world_from_bytes(to_bytes(proves)).members] == [4, 4]
    assert [member.run for member in world_from_bytes(to_bytes(plain)).members] == [0, 0]
