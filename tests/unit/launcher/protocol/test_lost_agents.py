"""What is decided of an agent that is suspended while its workers train on, or lost before it has
saved what memory holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticzero.ipc.assignment import Source
from elasticzero.launcher.protocol.actions import Action, RaiseAlarm, SaveHeldSnapshot
from elasticzero.launcher.protocol.decide import decide
from elasticzero.launcher.protocol.documents import Alarm
from elasticzero.launcher.protocol.view import View
from tests.unit.launcher.protocol.test_decide import (
    ENDED,
    HEALTHY,
    HELD,
    LAPSED,
    MY_STOPPED,
    NOW,
    POLICY,
    RAM,
    RESTORED,
    STRANDED,
    TRAINS,
    A,
    B,
    named,
    says,
    world,
)

REASON = "the lease of b lapsed, and its agent does not answer"
GIVEN_UP = [RaiseAlarm(Alarm(node="a", kind="lapse", reason=REASON), lost="b")]
SUSPENDED = replace(
    LAPSED,
    missing_since_s={"b": 94.0},
    unanswered_since_s={"b": 94.5},
    workers=replace(TRAINS, held=18, held_s=93.0),
)
"""The lease of b has lapsed for longer than a TTL; steps are made, and none of them is held."""
FROM_B, FROM_C = (Source(rank=0, node=node, address="10.0.0.1:9400") for node in "bc")
STOPPED_B = says("stopped", B, holdings=HELD, final_step=20)
BOTH_HOLD = replace(
    STRANDED,
    me=B,
    members=named(A, B),
    can_save=True,
    my_report=STOPPED_B,
    reports={"a": MY_STOPPED, "b": STOPPED_B},
)
"""Too few nodes are left, and the first of two that hold the state is to save it."""
SAVES = [SaveHeldSnapshot(3, 20, 1, (0,))]


def held(step: int | None, at_s: float) -> dict[str, Any]:
    return {"workers": replace(TRAINS, held=step, held_s=at_s)}


def begun_from(*sources: Source) -> dict[str, Any]:
    """A generation that began from memory, and of which no snapshot is held yet."""
    return {"world": world(A, B, resume=replace(RAM, sources=sources)), **held(5, 93.0)}


@pytest.mark.parametrize(
    ("changes", "is_given_up"),
    [
        pytest.param({}, True, id="suspended, and nothing is held"),
        pytest.param({"unanswered_since_s": {}}, False, id="it answers"),
        pytest.param({"unanswered_since_s": {"c": 94.0}}, False, id="another one does not"),
        pytest.param({"unanswered_since_s": {"b": 95.5}}, False, id="silent for less than a TTL"),
        pytest.param({"missing_since_s": {"b": 95.5}}, False, id="lapsed for less than a TTL"),
        pytest.param(held(18, 80.0), False, id="the newest snapshot was old already"),
        pytest.param(
            {"missing_since_s": {"b": 80.0}, **held(18, 61.0)}, True, id="and as long has passed"
        ),
        pytest.param(held(18, 96.0), False, id="a snapshot is held since"),
        pytest.param(held(None, 0.0), False, id="snapshots decide nothing"),
        pytest.param(held(10, 93.0), True, id="none is held, and a checkpoint was read"),
        pytest.param(begun_from(FROM_B), False, id="it alone has a part of the start"),
        pytest.param(begun_from(FROM_B, FROM_C), True, id="another one has that part too"),
        pytest.param(
            {"store": replace(HEALTHY, confirmed_s=90.0)}, False, id="the own lease is not sure"
        ),
        pytest.param(
            {"reports": {"a": RESTORED, "b": says("finished", B)}}, False, id="it had finished"
        ),
    ],
)
def test_when_a_suspended_agent_is_given_up(changes: dict[str, Any], is_given_up: bool) -> None:
    """NOW is 100 s, and a TTL 5 s."""
    decision = decide(replace(SUSPENDED, **changes), NOW, POLICY)
    assert list(decision.actions) == (GIVEN_UP if is_given_up else [])


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        pytest.param(BOTH_HOLD, [], id="another one saves"),
        pytest.param(
            replace(BOTH_HOLD, members=named(B), missing_since_s={"a": 90.0}),
            SAVES,
            id="it is lost",
        ),
        pytest.param(
            replace(BOTH_HOLD, members=named(B, replace(A, incarnation="i-2"))),
            SAVES,
            id="it has come anew",
        ),
    ],
)
def test_who_saves_what_memory_holds(view: View, expected: list[Action]) -> None:
    assert list(decide(view, NOW, POLICY).actions) == expected


def test_an_answer_is_that_of_the_registration_that_the_world_names() -> None:
    other = says("stopped", replace(B, incarnation="i-9"))
    view = replace(ENDED, reports={"a": MY_STOPPED, "b": other}, alarm_s=NOW - 0.2)
    assert not decide(view, NOW, POLICY).actions
