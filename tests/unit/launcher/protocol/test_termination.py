"""How a job ends: what memory holds is saved first (E4 and E5 of `termination`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticzero.errors import ExitCode
from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.protocol.actions import ExitAgent, SaveHeldSnapshot, WriteDone, WriteWorld
from elasticzero.launcher.protocol.decide import decide
from elasticzero.launcher.protocol.documents import NodeStrikes
from elasticzero.launcher.protocol.view import PreemptionNotice, View
from tests.unit.launcher.protocol.test_decide import (
    ENDED,
    FAILED,
    HELD,
    LEAVER,
    MY_STOPPED,
    NOTHING_HELD,
    NOW,
    POLICY,
    STOP,
    STRANDED,
    A,
    B,
    C,
    blamed,
    named,
    next_world,
    says,
    v,
    world,
)

EVICTED = replace(LEAVER, leave_reason="SIGTERM")
GIVEN_UP = v(
    blamed(), world=world(A, B, fruitless=3, resume=Resume(tier="storage", step=20)),
)  # fmt: skip
UNWRITTEN = blamed(
    blame="storage", step=20, message="the last checkpoint was not saved: it is full"
)
LACKING = v(
    UNWRITTEN, world=world(A, B, C), members=named(A, B, C), alarm_s=90.0, round_s=90.0,
    can_save=True, storage_step=10, holdings=(), my_report=NOTHING_HELD,
    reports={**(UNWRITTEN.reports or {}), "a": NOTHING_HELD},
)  # fmt: skip
"""No node that answers holds all of the last step, and node c does not answer."""
C_LEFT = replace(LEAVER, incarnation=C.incarnation, holdings=())

TABLE = [
    ("stopped: could not be saved yet", v(ENDED, control=STOP, can_save=True, saving=True, saved_held=(3, 20), saved_ranks=(0,), storage_step=15, round_s=50.0), []),
    ("useless to try again: save first", v(blamed(final=True), can_save=True, storage_step=10, round_s=98.0), [SaveHeldSnapshot(3, 20, 1, (0,))]),
    ("given up: save first", v(GIVEN_UP, can_save=True, storage_step=10, round_s=98.0), [SaveHeldSnapshot(3, 20, 1, (0,))]),
    ("given up: being saved", v(GIVEN_UP, can_save=True, storage_step=10, round_s=98.0, saving=True, saved_held=(3, 20), saved_ranks=(0,)), []),
    ("given up: saved", v(GIVEN_UP, can_save=True, storage_step=20), [WriteDone]),
    ("given up: not saved in time", v(GIVEN_UP, can_save=True, storage_step=10, round_s=30.0, saving=True, saved_held=(3, 20), saved_ranks=(0,)), [WriteDone]),
    ("the last checkpoint is not written: save it", v(UNWRITTEN, can_save=True, storage_step=10, round_s=98.0), [SaveHeldSnapshot(3, 20, 1, (0,))]),
    ("the last checkpoint is not written: no next world", v(UNWRITTEN, can_save=True, storage_step=10, round_s=98.0, saving=True, saved_held=(3, 20), saved_ranks=(0,)), []),
    ("the last checkpoint is written now: go on", v(UNWRITTEN, can_save=True, storage_step=20), [WriteWorld]),
    ("the last checkpoint is never written", v(UNWRITTEN, can_save=True, storage_step=10, round_s=30.0), [WriteDone]),
    ("a part of the last step is missing: the node may come back", LACKING, []),
    ("a part is missing: so it may though its lease has lapsed", v(LACKING, members=named(A, B)), []),
    ("a part is missing: the node came back", v(LACKING, reports={**(LACKING.reports or {}), "c": says("stopped", C, holdings=HELD)}, round_s=50.0), []),
    ("a part is missing: its workers stop", v(LACKING, reports={**(LACKING.reports or {}), "c": says("alive", C)}, round_s=50.0), []),
    ("a part is missing: its agent is gone", v(LACKING, refusing=frozenset({"c"})), [WriteDone]),
    ("a part is missing: its agent began anew", v(LACKING, members={**named(A, B), "c": replace(C, incarnation="anew")}), [WriteDone]),
    ("a part is missing: the node has left", v(LACKING, members=named(A, B), reports={**(LACKING.reports or {}), "c": C_LEFT}), [WriteDone]),
    ("a part is missing: the node did not come back in time", v(LACKING, alarm_s=30.0, round_s=30.0), [WriteDone]),
    ("a part is missing: there is no place to save it", v(LACKING, can_save=False), [WriteDone]),
    ("a node is away, and others hold the last step", v(LACKING, holdings=HELD, my_report=MY_STOPPED, reports=UNWRITTEN.reports), [SaveHeldSnapshot(3, 20, 1, (0,))]),
    ("another node's part is mine now", v(STRANDED, can_save=True, saving=True, saved_held=(3, 20), saved_ranks=()), [SaveHeldSnapshot(3, 20, 1, (0,))]),
    ("saving, and the time of the leaver is up", v(STRANDED, leaving=True, notice=PreemptionNotice(reason="SIGTERM", received_s=70.0, by_s=100.5), can_save=True, saving=True, saved_held=(3, 20), saved_ranks=(0,), my_report=EVICTED, reports={"a": EVICTED}), [ExitAgent(ExitCode.LEFT)]),
    ("saving, and the leaver has time", v(STRANDED, leaving=True, notice=PreemptionNotice(reason="SIGTERM", received_s=80.0, by_s=105.0), can_save=True, saving=True, saved_held=(3, 20), saved_ranks=(0,), my_report=EVICTED, reports={"a": EVICTED}), []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("view", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_rule(view: View, expected: list[object]) -> None:
    decision = decide(view, NOW, POLICY)
    assert decision.reason
    assert len(decision.actions) == len(expected), decision
    for action, expected_action in zip(decision.actions, expected, strict=True):
        assert (
            isinstance(action, expected_action)
            if isinstance(expected_action, type)
            else action == expected_action
        )


def test_the_leader_says_whom_it_waits_for_at_the_end() -> None:
    """Its agent stood still for 7 s as the last checkpoint failed, and the job ended at once: with
    the steps since the checkpoint before."""
    decision = decide(LACKING, NOW, POLICY)
    assert decision.reason == "waiting for c: memory lacks a part of step 20"
    back = says("stopped", C, holdings=HELD)
    decision = decide(v(LACKING, reports={**(LACKING.reports or {}), "c": back}), NOW, POLICY)
    assert decision.reason == "saving step 20 from memory before the job ends"


TORN = v(
    GIVEN_UP,
    reports={
        **(GIVEN_UP.reports or {}),
        "b": says("stopped", B, failure=replace(FAILED, step=25), final_step=25),
    },
)
"""The failure has torn the state of step 25, and the last snapshot is of step 20."""
LOST = "steps 11 to 20 are lost, the newest checkpoint is of step 10"


@pytest.mark.parametrize(
    ("view", "fate"),
    [
        (v(GIVEN_UP, storage_step=20), "; the checkpoint of step 20 has all that was done"),
        (
            v(TORN, storage_step=20),
            "; steps 21 to 25 are lost, the newest checkpoint is of step 20",
        ),
        (
            v(TORN, storage_step=10, round_s=30.0),
            "; step 20 could not be saved within 60 s (--save-timeout): steps 11 to 25 are lost, "
            "the newest checkpoint is of step 10",
        ),
        (
            v(GIVEN_UP, storage_step=10, round_s=30.0),
            f"; step 20 could not be saved within 60 s (--save-timeout): {LOST}",
        ),
        (
            v(UNWRITTEN, storage_step=10, round_s=30.0),
            f"; step 20 could not be saved within 60 s (--save-timeout): {LOST}",
        ),
        (
            v(UNWRITTEN, storage_step=10, holdings=(), my_report=NOTHING_HELD, reports={**(UNWRITTEN.reports or {}), "a": NOTHING_HELD}),
            f"; step 20 is not saved, and no node that is left holds all of it: {LOST}",
        ),
    ],
)  # fmt: skip
def test_the_end_of_a_job_says_what_became_of_its_state(view: View, fate: str) -> None:
    (action,) = decide(v(view, can_save=True), NOW, POLICY).actions
    assert isinstance(action, WriteDone) and action.done.outcome == "failed"
    assert action.done.reason.endswith(fate), action.done.reason


def test_storage_is_not_waited_for_where_nodes_are_too_few() -> None:
    """A job that waited for nodes said in turns that it did, and that it looked at storage."""
    decision = decide(v(STRANDED, storage_pending="looking"), NOW, POLICY)
    assert decision.reason == "1 of at least 2 nodes are left; state is kept"
    assert decide(v(ENDED, storage_pending="looking"), NOW, POLICY).reason == "looking"


def test_storage_that_fails_is_no_fault_of_a_node() -> None:
    """A node on which the last checkpoint failed was set aside, and the job was given up for it."""
    twice = (NodeStrikes(node="b", count=2),)
    struck = world(A, B, strikes=twice, fruitless=3, resume=Resume(tier="storage", step=20))
    following = next_world(v(UNWRITTEN, can_save=True, storage_step=20, world=struck, round_s=90.0))
    assert following.fruitless == 3
    assert following.strikes == twice
