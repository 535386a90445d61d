"""When workers count as hung, and who is to blame: one line a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.messages import Located
from elasticzero.launcher.protocol.actions import (
    Action,
    DumpStacks,
    KillSuspended,
    KillUnresponsive,
    RaiseAlarm,
    StopWorkers,
)
from elasticzero.launcher.protocol.decide import decide
from elasticzero.launcher.protocol.documents import Alarm, Member, Report, World
from elasticzero.launcher.protocol.hang_rules import (
    LOOK_S,
    SUSPENDED,
    SUSPENDED_S,
    StalledWorker,
    blame,
    deadlock,
    left_alone,
    overdue,
    suspended,
    suspension_after,
)
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import GroupOrder, GroupStage, View, WorkerGroupState
from tests.unit.launcher.protocol.test_decide import (
    AT_REST,
    HUNG,
    NOW,
    POLICY,
    ROUND,
    SILENT,
    TRAINS,
    A,
    says,
    v,
    w,
)

AUTO = JobPolicy(min_nodes=1, max_nodes=2)
GIVEN = JobPolicy(min_nodes=1, max_nodes=2, hang_timeout_s=3.0)
LONG = JobPolicy(min_nodes=1, max_nodes=2, hang_timeout_s=4000.0)
NEVER = JobPolicy(min_nodes=1, max_nodes=2, hang_timeout_s=0.0)
AT = Located(place="train.py:7 in loss", waits=False)
WAITS = Located(place="train.py:9", waits=True)


@pytest.mark.parametrize(
    ("policy", "seen", "why"),
    [
        (AUTO, {"silent_s": 59.0}, None),
        (AUTO, {"silent_s": 61.0}, "no step for 60 s"),
        (AUTO, {"silent_s": 61.0, "longest_step_s": 10.0}, None),
        (AUTO, {"silent_s": 101.0, "longest_step_s": 10.0}, "no step for 100 s"),
        (GIVEN, {"silent_s": 3.1, "longest_step_s": 10.0}, "no step for 3 s"),
        (GIVEN, {"before_step_s": 1700.0}, None),
        (GIVEN, {"before_step_s": 1801.0}, "no first step for 1800 s"),
        (LONG, {"before_step_s": 1801.0}, None),
        (LONG, {"before_step_s": 4001.0}, "no first step for 4000 s"),
        (NEVER, {"silent_s": 1e9, "before_step_s": 1e9}, None),
    ],
)
def test_when_a_look_is_due(policy: JobPolicy, seen: dict[str, Any], why: str | None) -> None:
    assert overdue(WorkerGroupState(running=1, **seen), policy) == why


@pytest.mark.parametrize(
    ("policy", "seen", "limit_s"),
    [
        (AUTO, {"frozen_s": 1.9}, None),
        (AUTO, {"frozen_s": 2.0}, 2),
        (AUTO, {"frozen_s": 2.0, "longest_step_s": 300.0}, 2),
        (AUTO, {"silent_s": 59.0, "before_step_s": 1700.0}, None),
        (GIVEN, {"frozen_s": 2.9}, None),
        (GIVEN, {"frozen_s": 3.1}, 3),
        (LONG, {"frozen_s": 3900.0}, None),
        (NEVER, {"frozen_s": 1e9}, None),
    ],
)
def test_how_long_a_worker_may_be_suspended(
    policy: JobPolicy, seen: dict[str, Any], limit_s: int | None
) -> None:
    why = None if limit_s is None else f"a worker is stopped by a signal for {limit_s} s"
    assert suspended(WorkerGroupState(running=1, **seen), policy) == why


def decided(base: View, seen: dict[str, Any]) -> list[Action]:
    return list(decide(v(base, workers=w(TRAINS, **seen)), NOW, POLICY).actions)


@pytest.mark.parametrize(
    ("seen", "actions"),
    [
        ({"frozen_s": 2.0, "silent_s": 2.1}, [DumpStacks(60.0, 2.0)]),
        ({"frozen_s": 1.9, "silent_s": 2.1}, []),
        ({"frozen_s": 2.0, "silent_s": 60.0}, [DumpStacks(60.0)]),
        ({"frozen_s": 2.0, "examination": "open"}, []),
        ({"frozen_s": 2.0, "stage": GroupStage.STARTING}, [DumpStacks(60.0, 2.0)]),
        ({"frozen_s": 2.0, "stage": GroupStage.PLAIN}, [DumpStacks(60.0, 2.0)]),
        ({"frozen_s": 2.0, "order": GroupOrder.STOP_AT_BOUNDARY}, [DumpStacks(60.0, 2.0)]),
    ],
)
def test_what_is_done_about_a_suspended_worker(seen: dict[str, Any], actions: list[Action]) -> None:
    assert decided(AT_REST, seen) == actions


def test_a_suspended_worker_is_not_examined_in_a_round() -> None:
    base = v(ROUND, my_report=says("alive", A))
    actions = decided(base, {"frozen_s": 2.0, "stopped_s": 2.0})
    assert actions == [StopWorkers("it broke"), KillSuspended()]


EVERY_S = 0.25
"""Seconds from a look to the next, as an agent looks while its workers train."""


@pytest.mark.parametrize(
    ("states", "cpu_times", "seconds"),
    [
        ("TTTTTTTTT", [7] * 9, 2.0),
        ("T", [7], 0.0),
        ("SSSSSSSSS", [7] * 9, None),  # sleeps, or waits for a lock, a child, the network, a GPU
        ("RRRRRRRRR", range(9), None),  # computes, compiles
        ("DDDDDDDDD", [7] * 9, None),  # swaps, or reads a file
        ("ttttttttt", [7] * 9, None),  # a debugger holds it
        ("TTTTTTTTt", [7] * 9, None),
        ("ZZZ", [7] * 3, None),
        ("", [], None),  # it is gone
        ("TTTTSTTTT", [7] * 9, 0.75),  # it was resumed
        ("TTTTTTTTT", range(9), 0.0),  # a program suspends it again and again
        ("TTTTTTTTT", [7, 7, 7, 7, 8, 8, 8, 8, 8], 1.0),  # resumed between two looks
    ],
)
def test_what_looks_show_of_a_suspension(
    states: str, cpu_times: Sequence[int], seconds: float | None
) -> None:
    suspension = None
    for number, (state, cpu_time) in enumerate(zip(states, cpu_times, strict=True)):
        suspension = suspension_after(suspension, state, cpu_time, 50.0 + EVERY_S * number)
    assert (None if suspension is None else suspension.seconds) == seconds


def test_an_agent_that_did_not_run_blames_no_worker_for_that_time() -> None:
    """A batch system suspends all processes of a node, and resumes the agent before the worker."""
    suspension = None
    for at_s in (50.0, 50.25, 3650.0):
        suspension = suspension_after(suspension, SUSPENDED, 7, at_s)
    assert suspension is not None
    assert (suspension.since_s, suspension.looked_s) == (50.0, 3650.0)
    assert suspension.seconds == EVERY_S + LOOK_S < SUSPENDED_S


@pytest.mark.parametrize(
    ("fields", "guilty", "message"),
    [
        ({"state": "T"}, "hung", "no step for 4.0 s after step 8; it is stopped by a signal"),
        ({"state": "T", "overdue": False}, "hung", "it is stopped by a signal (SIGSTOP)"),
        ({"state": "S", "wait": "hrtimer_nanosleep"}, "hung", "(state S in hrtimer_nanosleep)"),
        ({"state": "R"}, "hung", "something holds Python's lock, or the kernel does not let"),
        ({"state": "R", "located": AT}, "hung", "it is at train.py:7 in loss"),
        (
            {"state": "S", "located": WAITS},
            "peer",
            "it seems to wait for other ranks, at train",
        ),
        ({"state": "R", "located": AT, "overdue": False}, "peer", "it is at train.py:7 in loss"),
        ({"state": "S", "overdue": False}, "peer", "it does not answer"),
        ({"state": "T", "step": 0}, "hung", "no step for 4.0 s before its first step"),
    ],
)
def test_who_is_to_blame(fields: dict[str, object], guilty: str, message: str) -> None:
    stalled_fields = {"rank": 3, "step": 8, "silent_s": 4.0, "overdue": True} | fields
    failure = blame(StalledWorker(**stalled_fields))  # type: ignore[arg-type]
    assert (failure.rank, failure.blame) == (3, guilty)
    assert message in failure.message


def test_the_alarm_of_a_suspended_worker_asks_nobody_to_examine_workers() -> None:
    for frozen_s, kind in ((0.0, "hang"), (5.1, "failure")):
        workers = w(SILENT, examination="over", failure=HUNG, frozen_s=frozen_s)
        [action] = decide(v(AT_REST, workers=workers), NOW, POLICY).actions
        assert isinstance(action, RaiseAlarm)
        assert action.alarm.kind == kind


def test_the_node_of_a_suspended_worker_kills_it_at_once() -> None:
    alarm = Alarm(node="a", kind="failure", reason="rank 0: no step for 5.0 s")
    workers = w(SILENT, examination="over", failure=HUNG, frozen_s=5.1)
    view = v(ROUND, alarm=alarm, alarm_s=99.9, my_report=says("alive", A), workers=workers)
    stop, kill = decide(view, NOW, POLICY).actions
    assert (stop, kill) == (StopWorkers(alarm.reason), KillUnresponsive())


def test_a_rank_that_left_its_loop_alone_is_to_blame_for_good() -> None:
    left = Located(place="train.py:9, having left its loop at train.py:7", waits=True, left=True)
    stalled_fields = {"silent_s": 4.0, "overdue": True, "state": "S"}
    astray = blame(StalledWorker(rank=2, step=8, located=left, **stalled_fields))  # type: ignore[arg-type]
    waits = blame(StalledWorker(rank=0, step=8, located=WAITS, **stalled_fields))  # type: ignore[arg-type]
    assert (astray.blame, astray.final, waits.final) == ("peer", True, False)
    reports = [
        Report(incarnation="1", phase="stalled", failure=failure) for failure in (waits, astray)
    ]
    alarm = deadlock("a", reports)
    assert alarm is not None and alarm.left == 2
    assert alarm.reason.startswith("the ranks wait for each other; rank 2: "), alarm.reason
    members = tuple(
        Member(node=node, incarnation="1", host="h", http_port=1, store_port=1, nproc=2)
        for node in "ab"
    )
    resume = Resume(tier="fresh")
    world = World(
        generation=1, token="t", members=members, strategy="ddp", resume=resume, reason=""
    )
    blamed = left_alone(world, alarm)
    assert blamed is not None and blamed[0] == "b"
    assert (blamed[1].rank, blamed[1].blame, blamed[1].final) == (2, "user", True)
    assert left_alone(world, deadlock("a", reports[:1])) is None
