"""Nodes that the next world does without, and failures that end the job at once: `decide` whole."""

from __future__ import annotations

from dataclasses import replace

from elasticzero.errors import ExitCode
from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.protocol.actions import ExitAgent, WriteDone
from elasticzero.launcher.protocol.decide import decide
from elasticzero.launcher.protocol.documents import Done, FailureRecord, NodeStrikes
from tests.unit.launcher.protocol.test_decide import (
    AT_REST,
    FAILED,
    NOW,
    POLICY,
    SILENT_B,
    SPARE,
    STOPPED,
    TRAINS,
    A,
    B,
    C,
    D,
    blamed,
    member,
    named,
    next_world,
    says,
    scaled,
    v,
    w,
    world,
)


def test_a_node_that_alone_keeps_failing_is_set_aside() -> None:
    twice = (NodeStrikes(node="b", count=2),)
    three = v(
        blamed(), world=world(A, B, C, strikes=twice), members=named(A, B, C),
        reports={**(blamed().reports or {}), "c": says("stopped", C)},
    )  # fmt: skip
    following = next_world(three)
    assert following.members == (A, C)
    assert following.strikes == (NodeStrikes(node="b", count=3),)
    assert following.reason.startswith("b is set aside: its workers failed time and again, where")
    few = next_world(v(blamed(), world=world(A, B, strikes=twice)))
    assert few.members == (A, B), "never where fewer than MIN would be left"


def test_only_as_many_nodes_set_aside_return_as_are_needed() -> None:
    row = tuple(
        NodeStrikes(node=node, count=count) for node, count in (("c", 4), ("d", 3), ("e", 5))
    )
    e = member("e")
    view = v(
        SILENT_B, world=world(A, B, strikes=row), members=named(A, C, D, e), round_s=98.0,
        struck_s={"c": 90.0, "d": 99.0, "e": 90.0},
    )  # fmt: skip
    following = next_world(view)
    assert following.members == (A, D), "the fewest strikes come first, and MIN is enough"
    needed = "d is needed, though set aside: its workers failed time and again"
    assert needed in following.reason
    assert next_world(v(view, control=scaled(3, 4))).members == (A, C, D)
    assert next_world(v(view, control=scaled(1, 4))).members == (A,)


def test_a_spare_takes_over_without_those_that_are_set_aside() -> None:
    aside = v(
        SPARE, world=world(A, B, strikes=(NodeStrikes(node="c", count=3),)), struck_s={"c": 90.0}
    )  # fmt: skip
    assert next_world(v(aside, control=scaled(1, 3))).members == (D,)
    assert next_world(aside).members == (C, D), "fewer than MIN would be left"


def test_a_failing_newcomer_is_set_aside_while_others_train() -> None:
    joined = v(
        blamed(), world=world(A, B, trained=1, fruitless=1, resume=Resume(tier="storage", step=20)),
        holdings=(), my_report=(report := says("stopped", A, final_step=0)), control=scaled(1, 2),
        workers=replace(STOPPED, step=0),
        reports={"a": report, "b": says("stopped", B, failure=FAILED)},
    )  # fmt: skip
    following = next_world(joined)
    assert (following.members, following.trained, following.fruitless) == ((A,), 1, 1)
    assert following.strikes == (NodeStrikes(node="b", count=3),) and not following.setbacks
    assert following.reason == "b is set aside: rank 0 failed where others did not (ValueError: no)"


def test_a_job_ended_by_bad_input_exits_with_64() -> None:
    for final, code in ((True, ExitCode.USAGE), (False, ExitCode.FAILED)):
        done = Done(outcome="failed", step=1, reason="x", failure=replace(FAILED, final=final))
        gone = v(AT_REST, done=done, workers=w(TRAINS, running=0))
        assert decide(gone, NOW, POLICY).actions == (ExitAgent(code),)


def test_the_same_exception_on_a_second_node_ends_the_job() -> None:
    before = FailureRecord(
        generation=2, node="a", rank=0, blame="user", step=20, message=FAILED.message
    )  # fmt: skip
    view = v(
        blamed(step=20), world=world(A, B, resume=Resume(tier="ram", step=20), setbacks=(before,))
    )  # fmt: skip
    (action,) = decide(view, NOW, POLICY).actions
    assert isinstance(action, WriteDone)
    assert "on different nodes: the script or its data, not a machine" in action.done.reason
    assert len(action.done.setbacks) == 2
