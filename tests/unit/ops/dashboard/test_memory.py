"""When an agent asks the leader for the history of the job: not while the others stand still."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.protocol.documents import Member
from elasticzero.launcher.protocol.view import GroupStage, View
from elasticzero.launcher.secrets import Secret
from elasticzero.ops.dashboard import memory as module
from elasticzero.ops.dashboard.memory import JobMemory
from tests.unit.launcher.observability.test_job_status import FOLLOWER, WORLD, A, C

ACCESS = AgentAccess(Secret("the token of the job"))
STARTING, TRAINS = (
    replace(FOLLOWER, workers=replace(FOLLOWER.workers, stepped_s=at_s)) for at_s in (0.0, 7.0)
)
RESTORED, PLAIN = (
    replace(FOLLOWER, workers=replace(FOLLOWER.workers, stage=stage))
    for stage in (GroupStage.RESTORED, GroupStage.PLAIN)
)
OUTSIDE = replace(TRAINS, me=C)
FIRST = replace(TRAINS, world=replace(WORLD, generation=1))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[Member]]:
    """The members that were asked, each time."""
    times = list[list[Member]]()

    def query(members: Iterable[Member], access: AgentAccess) -> dict[str, Any] | None:
        times.append([*members])
        return None

    monkeypatch.setattr(module, "query_leader", query)
    monkeypatch.setattr(module, "TRIES", 1)
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    return times


@pytest.mark.parametrize(
    ("views", "count"),
    [
        ((STARTING,), 0),
        ((OUTSIDE, STARTING, RESTORED), 0),
        ((STARTING, RESTORED, TRAINS), 1),
        ((PLAIN,), 1),
        ((TRAINS, TRAINS, STARTING, TRAINS), 1),
        ((FIRST, STARTING, TRAINS), 0),
        ((replace(STARTING, world=FIRST.world), TRAINS), 0),
        ((OUTSIDE,), 0),
    ],
)
def test_the_leader_is_asked_once_the_workers_of_a_newcomer_train(
    views: tuple[View, ...], count: int, asked: list[list[Member]]
) -> None:
    memory = JobMemory("b")
    for view in views:
        memory.turn(view, lambda: {"goodput": 1.0}, ACCESS)
    memory.close()
    assert asked == [[A]] * count
