"""Whether the nodes of a world prove the job's secret, while some may be of the release before."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elasticzero.ipc.messages import FLAG_GROW
from elasticzero.launcher.agent.assignments import snapshot_role
from elasticzero.launcher.protocol.actions import RequestBoundaryStop, WriteWorld
from elasticzero.launcher.protocol.decide import decide
from elasticzero.launcher.protocol.documents import (
    UNSTATED,
    Member,
    World,
    to_bytes,
    world_from_bytes,
)
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.secrets import Secret
from elasticzero.security.proofs import run_secret
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

TOKEN = Secret("the-job's-own-password")


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


@pytest.mark.parametrize(
    ("run", "other", "grows"),
    [(1, UNSTATED, True), (1, 1, True), (2, UNSTATED, False), (2, 2, True)],
)
def test_from_the_second_run_on_no_old_node_is_taken(run: int, other: int, grows: bool) -> None:
    """L12: it could not derive the secret of the run, so that every generation with it would
    fail."""
    members = [*of_run(run, A, B), *of_run(other, C)]
    view = replace(AT_REST, me=members[0], members=named(*members), last_join_s=90.0)
    expected = (RequestBoundaryStop(FLAG_GROW),) if grows else ()
    assert decide(view, NOW, POLICY).actions == expected


def test_a_world_states_its_run_for_all_of_its_members() -> None:
    plain = world(A, B)
    assert b"proofs" not in to_bytes(plain)
    proves = replace(plain, proofs=True, run=4)
    before = json.loads(to_bytes(replace(plain, run=4)))
    assert json.loads(to_bytes(proves)) == before | {"proofs": True}, "the release before reads it"
    assert [member.run for member in world_from_bytes(to_bytes(proves)).members] == [4, 4]
    assert [member.run for member in world_from_bytes(to_bytes(plain)).members] == [0, 0]


@pytest.mark.parametrize("run", [UNSTATED, 1, 2, 3])
def test_workers_and_replicas_get_the_secret_of_the_run(run: int) -> None:
    """The job's token itself stays with the agent from the second run on."""
    role = snapshot_role(world(A, B, run=run, proofs=run > 1), 0, TOKEN)
    assert role.password == run_secret(TOKEN.reveal, run)
    assert (role.password == TOKEN.reveal) == (run < 2)
    assert role.proofs == (run > 1)
