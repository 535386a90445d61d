"""What the report says of a run, from made-up logs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from elasticzero.launcher.goodput import TIME_CLASSES
from elasticzero.ops.report.changes import change_of
from elasticzero.ops.report.html.sentences import headline
from tests.unit.ops.report.made_up import MadeUpJob, eventful


def test_a_run_with_a_fault_and_a_newcomer() -> None:
    summary = eventful().summary()
    assert (summary.outcome, summary.final_step, summary.total_steps) == ("finished", 100, 100)
    assert summary.nodes == ("a", "b", "c", "d")
    assert [(g.kind, g.label, g.steps_redone) for g in summary.generations] == [
        ("start", "start", 0),
        ("fault", "node lost", 4),
        ("joined", "node joined", 0),
    ]
    assert [(g.resume_step, g.reached) for g in summary.generations] == [
        (0, 34),
        (30, 50),
        (50, 100),
    ]
    [fault] = summary.faults
    assert (fault.generation, fault.lost, fault.steps_lost, fault.survived) == (1, ("c",), 4, True)
    assert fault.pause_s == pytest.approx(0.4 + 0.5 + 0.3 + 0.1)
    assert [(r.generation, r.steps_lost) for r in summary.recoveries] == [(2, 4), (3, 0)]
    assert summary.recoveries[0].seconds == pytest.approx(1.4)
    assert not summary.notes
    assert headline(summary) == (
        "Job j finished all 100 steps in 14.9 s on 2 to 3 nodes: goodput was 61.7%, it survived "
        "1 fault (1 × node lost), and 4 steps were done again."
    )


def test_all_classes_add_up_to_the_wall_time() -> None:
    job = eventful()
    summary = job.summary()
    assert sum(summary.seconds.values()) == pytest.approx(summary.wall_s)
    assert summary.wall_s == pytest.approx(job.now_s - job.logs["a"][1]["time"])
    assert summary.seconds["wasted"] == pytest.approx(0.4, rel=0.2)
    by_generation = sum(sum(g.seconds.values()) for g in summary.generations)
    before_s = sum(summary.before_first.values())
    assert before_s == pytest.approx(2.0)
    assert by_generation + before_s == pytest.approx(summary.wall_s, abs=1e-3)


@pytest.mark.parametrize("node", ["a", "b"])
def test_the_log_of_one_node_suffices_for_the_whole_job(node: str) -> None:
    whole, one = eventful().summary(), eventful().summary(node)
    for kind in TIME_CLASSES:
        assert one.seconds.get(kind, 0.0) == pytest.approx(whole.seconds.get(kind, 0.0), abs=0.05)
    assert one.generations == whole.generations
    assert [f.cause for f in one.faults] == ["c is lost"]
    assert "logs of 3 nodes are missing" in one.notes[0]
    assert {state for _, _, state in one.states["c"]} >= {"starting", "training"}


def test_a_node_that_was_lost_shows_its_own_end() -> None:
    summary = eventful().summary("c")
    assert (summary.outcome, summary.final_step) == ("unknown", 34)
    assert headline(summary).startswith(
        "The logs of job j end before the job did, after 34 of 100 steps and 5.7 s on 3 nodes: "
    )
    assert sum(summary.seconds.values()) == pytest.approx(summary.wall_s)


def test_states_of_a_node_follow_each_other() -> None:
    summary = eventful().summary()
    for spans in summary.states.values():
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))
    assert [state for _, _, state in summary.states["a"]] == [
        *("waiting", "starting", "training", "recovering"),
        *("starting", "training", "recovering", "starting", "training"),
    ]
    assert [state for _, _, state in summary.states["c"]] == ["waiting", "starting", "training"]
    assert [state for _, _, state in summary.states["d"]] == ["waiting", "starting", "training"]


@pytest.mark.parametrize(("code", "last"), [(75, "recovering"), (0, "waiting")])
def test_a_node_that_left_does_not_wait_for_a_place(code: int, last: str) -> None:
    job = MadeUpJob()
    job.register("a", "b")
    job.world("a", "b")
    job.train(20)
    job.round("leave", "b leaves", ["a", "b"])
    job.world("a", resume=20)
    seen = next(event for event in reversed(job.logs["a"]) if event["event"] == "world")
    job.logs["b"].append(seen)
    job.wait(1.0)
    job.note(["b"], "exit", code=code, outcome=None, reason="", end_reason="", seconds=None)
    assert [state for _, _, state in job.summary().states["b"]][-1] == last


def test_losses_of_steps_that_were_done_again_stand_apart() -> None:
    summary = eventful().summary()
    assert len(summary.losses) == 100
    assert [loss for _, loss in summary.wasted_losses] == pytest.approx([4.69, 4.68, 4.67, 4.66])


def test_clocks_that_differ_are_corrected() -> None:
    job = MadeUpJob(clocks_s={"b": 3600.0, "c": -0.3})
    job.register("a", "b", "c")
    job.world("a", "b", "c")
    job.train(20)
    job.round("failure", "rank 0 lost a peer", seen_by=("a", "b"))
    job.world("a", "b", resume=20, reason="c is lost")
    job.train(20)
    job.end()
    summary = job.summary()
    assert summary.wall_s < 10
    assert summary.notes == ("The clock of b is 1 h ahead; its times were corrected.",)
    assert max(end_s for _, end_s, _ in summary.states["b"]) <= summary.wall_s + 1e-6
    assert [step for _, step in summary.steps] == [float(step) for step in range(1, 41)]


def test_the_last_of_several_runs_counts() -> None:
    job = eventful()
    again = MadeUpJob(now_s=job.now_s + 100.0, total=5)
    again.register("a", "b")
    again.world("a", "b", resume=0, reason="2 nodes came together")
    again.train(5)
    again.end()
    for node, events in again.logs.items():
        job.logs[node] += events
    summary = job.summary()
    assert (summary.final_step, len(summary.generations)) == (5, 1)
    assert summary.nodes == ("a", "b")
    assert "hold 1 earlier run of this job" in summary.notes[-1]


def test_an_agent_that_came_back_belongs_to_the_same_run() -> None:
    job = MadeUpJob()
    job.register("a", "b")
    job.world("a", "b")
    job.train(10)
    job.note(["b"], "exit", code=75, outcome=None, reason="", end_reason="", seconds=None)
    job.round("boundary", "all stopped at a boundary", seen_by=("a",))
    job.world("a", resume=10, reason="b leaves: SIGTERM (25 s of grace)")
    job.train(10)
    job.register("b")
    job.round("boundary", "all stopped at a boundary", seen_by=("a",))
    job.world("a", "b", resume=20, reason="b joined")
    job.train(10)
    for nodes in ((), ("b",)):
        summary = job.summary(*nodes)
        assert summary.final_step == 30
        assert [g.kind for g in summary.generations][1:] in (["left", "joined"], ["planned"])
    assert not job.summary().faults


def test_a_job_that_failed_says_why() -> None:
    job = MadeUpJob()
    job.register("a", "b")
    job.world("a", "b")
    job.train(3)
    trace = {"traceback": "Traceback ...\nValueError: no", "final": True}
    job.note(["b"], "failed", rank=1, step=3, blame="user", message="ValueError: no", **trace)
    job.note(["a"], "failed", rank=0, step=3, blame="peer", message="lost a peer", traceback="x")
    job.round("failure", "rank 1 failed", seen_by=("a", "b"))
    job.end("failed", "rank 1 on b failed (ValueError: no)", code=70)
    summary = job.summary()
    [fault] = summary.faults
    assert (fault.survived, fault.label, fault.pause_s) == (False, "worker failed", None)
    assert fault.details == "Traceback ...\nValueError: no"
    assert headline(summary).startswith(
        "Job j failed after 3 of 100 steps and 1.7 s on 2 nodes (rank 1 on b failed (ValueError: "
        "no)); goodput was"
    )


def test_a_job_that_runs_has_no_end_yet() -> None:
    job = MadeUpJob(total=0)
    job.register("a")
    job.world("a")
    job.train(12)
    summary = job.summary(running=True)
    assert (summary.outcome, summary.final_step, summary.faults) == ("running", 12, ())
    assert summary.wall_s == pytest.approx(1.5)
    assert summary.seconds["productive"] == pytest.approx(12 * 0.09, abs=1e-3)
    job.round("hang", "rank 0 hung", seen_by=("a",))
    [fault] = job.summary(running=True).faults
    assert (fault.survived, fault.label) == (False, "not over yet")


def test_a_job_without_a_world_waits() -> None:
    job = MadeUpJob()
    job.register("a")
    job.note(["a"], "waiting", why="idle")
    job.wait(30.0)
    job.note(["a"], "reason", reason="1 of at least 2 nodes are here")
    summary = job.summary()
    assert (summary.generations, summary.goodput) == ((), None)
    assert summary.seconds == {"idle": pytest.approx(30.0)}


def test_slow_data_of_one_node_is_found() -> None:
    job = MadeUpJob()
    job.register("a", "b", "c")
    job.world("a", "b", "c")
    job.train(30, waits_s={"b": 0.05})
    slow = {times.node: times.is_slow for times in job.summary().step_times}
    assert slow == {"a": False, "b": True, "c": False}
    job.end()


def test_a_node_that_computes_longer_in_equal_steps_is_found() -> None:
    job = MadeUpJob()
    job.register("a", "b", "c")
    job.world("a", "b", "c")
    job.train(30, compute_s={"c": 0.1, "b": None})
    first, *others = job.summary().step_times
    assert (first.node, first.is_slow, first.compute_s) == ("c", True, 0.1)
    assert first.compute_ratio == pytest.approx(0.1 / 0.075)
    assert [times.is_slow for times in others] == [False, False]
    job.end()


def test_checkpoints_of_all_nodes_are_added_up() -> None:
    job = MadeUpJob()
    job.register("a", "b")
    job.world("a", "b")
    job.train(10)
    for node, seconds in (("a", 0.2), ("b", 0.5)):
        part = {"step": 10, "generation": 1, "seconds": seconds, "bytes": 1000, "notes": []}
        job.note([node], "saved", **part, committed=node == "b", error=None)
    failed = {"step": 20, "generation": 1, "seconds": 1.0, "bytes": 0, "notes": []}
    job.note(["a"], "saved", **failed, committed=False, error="disk full")
    summary = job.summary()
    [saved] = summary.checkpoints
    assert (saved.step, saved.bytes, saved.seconds, saved.nodes) == (10, 2000, 0.5, 2)
    assert [(i.kind, i.text) for i in summary.incidents] == [
        ("a checkpoint was not saved", "disk full")
    ]
    [alone] = job.summary("a").checkpoints
    assert not alone.committed


def test_events_that_lack_fields_are_passed_over() -> None:
    job = eventful()
    job.logs["a"][5:5] = [
        {"time": "late", "event": "step"},
        {"event": "step"},
        {"time": 1.0},
        {"time": float("nan"), "event": "step"},
        {"time": job.logs["a"][4]["time"], "event": "step", "step": "x", "generation": 1},
        {"time": job.logs["a"][4]["time"], "event": "world", "generation": 9, "members": None},
        {"time": job.logs["a"][4]["time"], "event": "melted", "why": "of a newer version"},
    ]
    summary = job.summary()
    assert summary.notes == ("6 lines could not be read, in the logs of a.",)
    assert summary.final_step == 100


@pytest.mark.parametrize(
    ("kind", "cause", "after", "change"),
    [
        ("failure", "c is lost", ("a",), ("fault", "node lost")),
        (
            "failure",
            "rank 1 on c failed (killed by SIGKILL)",
            ("a", "c"),
            ("fault", "worker killed"),
        ),
        ("failure", "rank 1 on c failed (ValueError: x)", ("a", "c"), ("fault", "worker failed")),
        ("hang", "rank 1 on c hung (no step for 61 s)", ("a", "c"), ("fault", "worker hung")),
        ("boundary", "c leaves: SIGTERM (25 s of grace)", ("a",), ("left", "node left")),
        ("grow", "d joined", ("a", "c", "d"), ("joined", "node joined")),
        ("leave", "c left; d joined", ("a", "d"), ("left", "node replaced")),
        ("boundary", "c is lost", ("a",), ("fault", "node lost")),
        (None, "rank 1 on c failed (x)", ("a", "c"), ("fault", "worker failed")),
        (None, "workers stopped", ("a", "c"), ("planned", "planned change")),
    ],
)
def test_changes_have_names(
    kind: str | None, cause: str, after: tuple[str, ...], change: tuple[str, str]
) -> None:
    assert change_of(kind, cause, ("a", "c"), after) == change
