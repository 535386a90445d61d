"""What an agent says to a person, and in which form."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticzero.errors import StoreUnavailable
from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import (
    Captured,
    DataChanged,
    Logged,
    MemoryShort,
    NetworkTaken,
    ResidualLost,
    Restored,
    SharesChanged,
    SnapshotHeld,
    SnapshotInterval,
    Stepped,
    Stopping,
    Switched,
)
from elasticzero.launcher.agent.config import AgentOptions
from elasticzero.launcher.agent.console import AgentConsole
from elasticzero.launcher.agent.reporter import AgentReporter
from elasticzero.launcher.observability import console, logging_setup
from elasticzero.launcher.observability.event_log import EventLog
from elasticzero.launcher.observability.events import EVENTS
from elasticzero.launcher.observability.metrics import Metrics
from elasticzero.launcher.protocol.documents import Control, Done, Failure, Member, World
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import View, WorkerGroupState
from elasticzero.launcher.snapshots.save_events import SaveFailed, SaveFinished
from elasticzero.launcher.workers.console_output import ConsoleOutput
from elasticzero.launcher.workers.forking.requests import Launch
from elasticzero.launcher.workers.group import WorkerGroup
from elasticzero.launcher.workers.process import Worker
from elasticzero.serialization import field_values


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("elasticzero")
    before, propagates, level = list(logger.handlers), logger.propagate, logger.level
    logging_setup.set_up("n")
    yield logger
    logger.handlers[:], logger.propagate = before, propagates
    logger.setLevel(level)


def test_warnings_are_said_like_everything_else(capsys: pytest.CaptureFixture[str]) -> None:
    """`lease … is lost` came without time and node, from Python's last resort."""
    logging_setup.set_up("a")
    logging.getLogger("elasticzero.launcher.store.etcd.lease").warning("lease %x is lost", 255)
    logging.getLogger("elasticzero.launcher.store.etcd.lease").debug("not for people")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\[\d\d:\d\d:\d\d a\] lease ff is lost", line)


def test_json_records_have_node_generation_and_rank(capsys: pytest.CaptureFixture[str]) -> None:
    logging_setup.set_up("a", "warning", "json")
    logging_setup.context.generation = 3
    log = logging.getLogger("elasticzero.launcher.agent.console")
    log.warning("rank %d makes no step", 1, extra={"rank": 1, "node": "b"})
    log.error("gone\nfor good", extra={"bare": True})
    log.info("below the level")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("+00:00") and second.pop("time")
    name = "elasticzero.launcher.agent.console"
    assert first == {
        "level": "warning",
        "logger": name,
        "node": "b",
        "generation": 3,
        "rank": 1,
        "message": "rank 1 makes no step",
    }
    assert second == first | {
        "level": "error",
        "node": "a",
        "rank": None,
        "message": "gone\nfor good",
    }


def options_in(folder: Path, *, log_dir: bool = False) -> AgentOptions:
    return AgentOptions(
        job="j",
        node="n",
        policy=JobPolicy(min_nodes=1, max_nodes=1),
        nproc=1,
        launch=Launch(
            target="t.py", is_module=False, arguments=(), environment={}, directory=str(folder)
        ),
        log_dir=folder,
        snapshot_dir=folder,
        console=ConsoleOutput(log_dir=log_dir),
    )


@pytest.fixture
def reporter(tmp_path: Path) -> Iterator[AgentReporter]:
    reporter = AgentReporter(options_in(tmp_path), EventLog(tmp_path), Metrics())
    yield reporter
    reporter.close(None)


def group_of(log: Path) -> tuple[WorkerGroup, Worker]:
    worker = Worker(0, 0, 1, None, log, 0)  # type: ignore[arg-type]
    return WorkerGroup(None, 1, 0, workers=[worker]), worker  # type: ignore[arg-type]


def test_a_hang_that_ends_by_itself_is_said(
    reporter: AgentReporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank was said to make no step, and then nothing."""
    group, worker = group_of(tmp_path / "0.log")
    step = Stepped(step=7, at_s=1e12, step_s=0.1, data_wait_s=0.0, samples=1)
    reporter.received(group, [(worker, step)], 0.0)
    assert capsys.readouterr().err == ""
    failure = Failure(rank=0, blame="peer", message="no step for 61.0 s after step 6; it waits")
    reporter.examined(group, failure)
    reporter.received(group, [(worker, step), (worker, step)], 0.0)
    lines = [line.partition("n] ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines[0] == "rank 0: no step for 61.0 s after step 6; it waits"
    assert lines[1].startswith("rank 0 makes steps again, ")
    assert lines[1].endswith(" s later: the hang ended by itself")
    assert len(lines) == 2


def test_an_agent_prints_large_changes_of_the_interval_only(
    reporter: AgentReporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group, worker = group_of(tmp_path / "0.log")
    for every in (4, 1, 9, 12, 3, 20):
        reporter.received(
            group, [(worker, SnapshotInterval(every=every, cost_s=0.01, step_s=0.1))], 0.0
        )
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("snapshots every ")[2].split()[0] for line in lines] == ["4", "20"]


def test_trouble_with_etcd_is_not_told_at_every_try(
    reporter: AgentReporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While etcd was away the event log grew by four lines a second."""
    for _ in range(3):
        reporter.store_failed(StoreUnavailable("etcd at 127.0.0.1:1 does not answer"))
    events = events_in(tmp_path)
    assert [event["event"] for event in events].count("store_trouble") == 1
    assert capsys.readouterr().err.count("does not answer") == 1


def events_in(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def test_who_waits_for_others_says_now_and_then_who_is_here(
    reporter: AgentReporter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    of_two = Control(nnodes=(2, 3))
    for after_s in (0.0, 9.0, 1.0, 9.0, 1.0):
        now_s += after_s
        reporter.console.waiting(lambda: registered("n"), of_two)
    reporter.console.waiting(lambda: pytest.fail("asked again"), of_two)
    line = "n] waiting for nodes: 1 of at least 2 are here (n); 1 missing"
    assert [text.endswith(line) for text in capsys.readouterr().err.splitlines()] == [True, True]
    now_s += 10.0
    reporter.console.waiting(lambda: registered("a", "n"), of_two)
    assert not capsys.readouterr().err, "enough are here"


def registered(*names: str, **changes: Any) -> dict[str, Member]:
    """Nodes, oldest first; `changes` are the versions of the last one."""
    plain = Member("n", "i", "10.0.0.1", 1, 2, 1, release="0.2.0", torch="2.13.0+cpu")
    members = {name: replace(plain, node=name, incarnation=name) for name in names}
    return {**members, names[-1]: replace(members[names[-1]], **changes)}


def test_nodes_that_cannot_be_in_one_world_are_named(
    reporter: AgentReporter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough nodes are here, and none of them said a word."""
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    for _ in range(4):
        now_s += 10.0
        reporter.console.waiting(
            lambda: registered("a", "n", torch="2.13.0+cu130"), Control(nnodes=(2, 3))
        )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "n] n has torch 2.13.0+cu130, and a has torch 2.13.0+cpu; install torch 2.13.0+cpu on n, "
        "or torch 2.13.0+cu130 on the other nodes"
    )


@pytest.mark.parametrize("me", ["a", "c"])
def test_versions_that_differ_are_named_once_on_both_nodes(
    reporter: AgentReporter, capsys: pytest.CaptureFixture[str], me: str
) -> None:
    """On the leader's node, and on the one that is set aside, which watches no registrations."""
    members = registered("a", "b", "c", release="0.3.0")
    world = World(
        generation=1,
        token="t",
        members=(members["a"], members["b"]),
        strategy="ddp",
        resume=Resume(tier="fresh"),
        reason="r",
        release="0.2.0",
        torch="2.13.0+cpu",
    )
    view = View(me=members[me], world=world, members=members if me == "a" else None)
    for seen in (view, view, replace(view, members=dict(members) if me == "a" else None)):
        reporter.console.versions(seen)
    (line,) = capsys.readouterr().err.splitlines()
    assert "] c is set aside: c has ElasticZero 0.3.0, and a has ElasticZero 0.2.0; " in line
    later = registered("a", "b", "c", torch="2.13.2+cpu")
    again = replace(view, world=replace(world, generation=2), me=later[me])
    reporter.console.versions(replace(again, members=later if me == "a" else None))
    (line,) = capsys.readouterr().err.splitlines()
    assert "] c has torch 2.13.2+cpu, and a has torch 2.13.0+cpu: they train together" in line


def test_the_network_is_named_once_and_a_better_one_too(
    reporter: AgentReporter, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    group, worker = group_of(tmp_path / "0.log")
    better = "NCCL takes sockets between nodes, though this machine has EFA (rdmap0s6)"
    plain = NetworkTaken(network="sockets", version="2.27.3", warning=better)
    for message in (plain, plain, NetworkTaken(network="EFA", gpu_direct=True)):
        reporter.received(group, [(worker, message)], 0.0)
    lines = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "between nodes NCCL takes sockets (NCCL 2.27.3)",
        better,
        "between nodes NCCL takes EFA with GPUDirect RDMA",
    ]
    assert reporter.status(None, leaving=False)["network"] == "EFA with GPUDirect RDMA"
    assert [e["network"] for e in events_in(tmp_path) if e["event"] == "network"][-1] == "EFA"


def test_scalars_may_have_the_names_of_fields(reporter: AgentReporter, tmp_path: Path) -> None:
    """`session.log(rank=…)`, or `event=…`, ended the node with a TypeError in its loop."""
    group, worker = group_of(tmp_path / "0.log")
    scalars = {"rank": 7.0, "event": 8.0, "time": 9.0, "self": 1.0, "loss": 0.5}
    reporter.received(group, [(worker, Logged(step=3, scalars=scalars))], 0.0)
    (event,) = (event for event in events_in(tmp_path) if event["event"] == "log")
    assert (event["rank"], event["step"], event["loss"]) == (0, 3, 0.5)


def test_an_error_in_a_record_does_not_reach_the_loop(
    reporter: AgentReporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    group, worker = group_of(tmp_path / "0.log")
    step = Stepped(step=7, at_s=1e12, step_s=0.1, data_wait_s=0.0, samples=1)
    with monkeypatch.context() as patch:
        patch.setattr(reporter.console, "progress_resumed", refuse)
        reporter.received(group, [(worker, step)], 0.0)
    reporter.received(group, [(worker, step)], 0.0)
    assert [event["event"] for event in events_in(tmp_path)].count("step") == 1


def test_errors_of_the_loop_are_recorded(
    reporter: AgentReporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        reporter.turn_failed(OSError(24, "Too many open files"), 0)
    reporter.turn_failed(KeyError("generation"), 1)
    failed = [event for event in events_in(tmp_path) if event["event"] == "loop_error"]
    assert [event["failures"] for event in failed] == [0, 1]
    assert failed[1]["message"] == "KeyError: 'generation'"
    printed = capsys.readouterr().err
    assert printed.count("Too many open files") == 1
    assert "an unexpected error in the agent's loop\n" in printed and "KeyError" in printed


def test_events_made_of_messages_have_their_documented_fields(
    reporter: AgentReporter, tmp_path: Path
) -> None:
    """docs/reference/events.md could name a field that a message has lost, or miss a new one."""
    group, worker = group_of(tmp_path / "0.log")
    for message in (
        Restored(step=1, tier="ram", connect_s=0.1, build_s=0.1, restore_s=0.1, bytes_read=8),
        DataChanged(step=1, allowed=("batch",), message="epoch 0 goes on"),
        SharesChanged(step=1, message="rank 0 has 20 %"),
        ResidualLost(step=1, ranks=1, norm=0.1, message="parts of gradients are lost"),
        Stepped(step=2, at_s=0.0, step_s=0.1, data_wait_s=0.0, samples=1),
        Captured(step=2, generation=1, rank=0, world_size=1, bytes=8),
        SnapshotInterval(every=4, cost_s=0.01, step_s=0.1),
        MemoryShort(needed_bytes=2, free_bytes=1),
        Stopping(step=2, clean=True, complete=True, reason="the world grows"),
        Failed(step=2, blame="user", message="no", traceback=""),
    ):
        reporter.received(group, [(worker, message)], 0.0)
    reporter.snapshot_held(SnapshotHeld(step=2, generation=1))
    reporter.saved(SaveFinished(step=2, generation=1, seconds=0.1, bytes=8, committed=True))
    failed = SaveFailed(step=2, generation=1, error="no", newest=None, pause_s=0.1)
    reporter.save_failed(failed)
    reporter.examined(group, Failure(rank=0, blame="hung", message="no step"))
    events = events_in(tmp_path)
    fields = {event["event"]: event.keys() - {"event", "time"} for event in events}
    assert len(fields) == 15
    assert fields == {name: EVENTS[name].fields.keys() for name in fields}


def test_steps_before_and_after_a_change_inside_the_loop_have_their_generations(
    reporter: AgentReporter, tmp_path: Path
) -> None:
    """They come in one batch, when the group is of the next generation already."""
    group, worker = group_of(tmp_path / "0.log")

    def step(number: int) -> Stepped:
        return Stepped(step=number, at_s=float(number), step_s=0.1, data_wait_s=0.0, samples=1)

    group.generation = 2
    switched = Switched(token="new", step=7, seconds=0.01)
    reporter.received(group, [(worker, step(7)), (worker, switched), (worker, step(8))], 0.0)
    reporter.received(group, [(worker, step(9))], 0.0)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] in ("step", "switched")]
    assert [(event["event"], event["step"], event["generation"]) for event in events] == [
        ("step", 7, 1),
        ("switched", 7, 2),
        ("step", 8, 2),
        ("step", 9, 2),
    ]


TRACE = """\
Traceback (most recent call last):
  File "/home/u/train.py", line 12, in train
    raise ValueError("bad sample")
ValueError: bad sample
"""


@pytest.mark.parametrize("final", [True, False], ids=["final", "tried again"])
@pytest.mark.parametrize("repeated", [True, False], ids=["repeated", "in a log"])
def test_an_error_is_printed_once(
    repeated: bool,
    final: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its traceback was there for each rank, and its message again in every line about it."""
    monkeypatch.setattr(console, "HELD_S", 0.0)
    options = options_in(tmp_path, log_dir=not repeated)
    reporter = AgentReporter(options, EventLog(tmp_path), Metrics())
    group, worker = group_of(tmp_path / "0.log")
    error = Failed(
        step=4, blame="user", message="ValueError: bad sample", traceback=TRACE, final=final
    )
    reporter.received(group, [(worker, error), (worker, error)], 0.0)
    reporter.console.tick()
    first, *lines = [
        line.partition("] ")[2] or line for line in capsys.readouterr().err.splitlines()
    ]
    if repeated or not final:
        assert first == "rank 0 failed at train.py:12 in train:"
        assert lines[:-1] == TRACE.splitlines()
    else:
        assert first == "rank 0 failed at train.py:12 in train: ValueError: bad sample"
    assert lines[-1] == "rank 0 failed by the same error"
    failure = Failure(rank=0, **field_values(error))
    done = Done(
        outcome="failed",
        step=4,
        reason="rank 0 on n failed: ValueError: bad sample; it is the script's",
        failure=failure,
    )
    reporter.exits("the job has failed")
    details, trace = reporter.console.failed(done, None)
    assert capsys.readouterr().err.partition("\n")[2] == (
        f"error: rank 0 on n failed by the error above; it is the script's\n{details}\n"
    )
    assert trace == ("" if final else TRACE.rstrip())
    other = AgentConsole(options)
    details, _ = other.failed(done, None)
    whole = "  at train.py:12 in train\n" if final else TRACE
    assert capsys.readouterr().err.startswith(f"error: {done.reason}\n{whole}")


def test_the_error_of_a_script_that_was_told_to_stop_is_not_printed(
    reporter: AgentReporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group, worker = group_of(tmp_path / "0.log")
    group._view = WorkerGroupState(aborted_s=1.0)
    reporter.received(
        group, [(worker, Failed(step=0, blame="user", message="KeyError: 1", traceback=""))], 1.0
    )
    assert capsys.readouterr().err == ""


def test_the_device_of_the_workers_is_printed_once(
    reporter: AgentReporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group, worker = group_of(tmp_path / "0.log")
    restored = Restored(
        step=0, tier="fresh", connect_s=0.1, build_s=0.1, restore_s=0.1, device="the CPU"
    )
    reporter.received(group, [(worker, restored)] * 2, 0.0)
    reporter.console.device("NVIDIA H100", 8)
    assert [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "this node's worker computes on the CPU",
        "this node's 8 workers compute on NVIDIA H100",
    ]


def test_bad_input_is_printed_before_the_errors_that_follow_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank read a file that another one was refused to write, and its error came first."""
    reporter = AgentReporter(options_in(tmp_path, log_dir=True), EventLog(tmp_path), Metrics())
    group, worker = group_of(tmp_path / "0.log")
    missing = Failed(step=4, blame="user", message="FileNotFoundError: a.pt", traceback="")
    refused = Failed(step=4, blame="user", message="use strategy ddp", traceback="", final=True)
    reporter.received(group, [(worker, missing)], 0.0)
    assert capsys.readouterr().err == ""
    reporter.received(group, [(worker, refused)], 0.0)
    lines = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["rank 0 failed: use strategy ddp", "rank 0 failed: FileNotFoundError: a.pt"]


def test_the_error_of_another_node_that_explains_this_ones_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = AgentReporter(options_in(tmp_path, log_dir=True), EventLog(tmp_path), Metrics())
    group, worker = group_of(tmp_path / "0.log")
    missing = Failed(step=4, blame="user", message="FileNotFoundError: a.pt", traceback="")
    reporter.received(group, [(worker, missing)], 0.0)
    failure = Failure(rank=1, blame="user", message="use strategy ddp", final=True)
    reason = "rank 1 on m failed: use strategy ddp"
    reporter.console.failed(Done(outcome="failed", step=4, reason=reason, failure=failure), None)
    text = capsys.readouterr().err
    assert -1 < text.find("use strategy ddp") < text.find("FileNotFoundError"), text
