"""What the leading agent knows of its job."""

from __future__ import annotations

import time
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

import pytest

from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.messages import Logged, Stepped
from elasticzero.launcher.agent.config import AgentOptions
from elasticzero.launcher.agent.status import (
    Latest,
    LoopPulse,
    agent_status,
    job_state,
    progress_of,
)
from elasticzero.launcher.observability.progress.states import Trains
from elasticzero.launcher.protocol.documents import Done, Member, NodeStrikes, World
from elasticzero.launcher.protocol.failure_policy import QUARANTINE_STRIKES
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.workers.forking.requests import Launch
from elasticzero.launcher.workers.group import WorkerGroup
from elasticzero.launcher.workers.lifecycle import Process, Stage, WorkerState
from elasticzero.launcher.workers.process import Worker
from elasticzero.options.settings import TrainingSettings

A, B, C, D = (Member(name, f"i-{name}", "10.0.0.1", 9400, 29500, 1) for name in "abcd")
WORLD = World(
    generation=3,
    token="t",
    members=(A, B),
    strategy="ddp",
    resume=Resume(tier="storage", step=10),
    reason="test",
)
VIEW = View(me=A, members={m.node: m for m in (A, B, C, D)}, world=WORLD)
FRESH = View(me=A, members={"a": A, "b": B}, oldest=True)


@pytest.fixture
def options(tmp_path: Path) -> AgentOptions:
    return AgentOptions(
        job="train",
        node="a",
        policy=JobPolicy(min_nodes=2, max_nodes=3),
        nproc=1,
        launch=Launch(
            target="t.py", is_module=False, arguments=(), environment={}, directory=str(tmp_path)
        ),
        log_dir=tmp_path,
        snapshot_dir=tmp_path,
        training=TrainingSettings(checkpoint_dir=str(tmp_path), checkpoint_every=50),
        flops_per_sample=1e9,
        peak_flops=1e12,
    )


def unix_time(monotonic_s: float) -> float:
    return time.time() - (time.monotonic() - monotonic_s)


@pytest.fixture
def latest() -> Latest:
    now_s = time.monotonic()
    latest_status = Latest(began_s=now_s - 60.0)
    for step in range(1, 6):
        at_s = now_s - 10.0 + step
        for rank in (0, 1):
            message = Stepped(
                step=step,
                at_s=at_s,
                step_s=0.9,
                data_wait_s=0.0,
                samples=8,
                gradient_norm=2.0,
                compute_s=0.5 * (rank + 1),
            )
            latest_status.received(rank, message)
    latest_status.received(0, Logged(step=5, scalars={"loss": 1.5, "lr": 0.1}))
    return latest_status


def test_only_the_leader_of_a_job_that_runs_answers(options: AgentOptions, latest: Latest) -> None:
    assert job_state(options, None, latest, {}) is None
    assert job_state(options, replace(VIEW, me=B), latest, {}) is None
    done = Done(outcome="finished", step=5, reason="r")
    assert job_state(options, replace(VIEW, done=done), latest, {}) is None
    assert job_state(options, VIEW, latest, {}) is not None
    assert job_state(options, FRESH, latest, {}) is not None
    assert job_state(options, replace(FRESH, oldest=False), latest, {}) is None


def test_the_state_is_of_the_last_steps_and_of_all_nodes(
    options: AgentOptions, latest: Latest
) -> None:
    times = {("a", 0): 0.5, ("a", 1): 1.0, ("b", 0): 0.5}
    assert latest.stepped_s is not None
    earliest = unix_time(latest.stepped_s)
    state = job_state(options, VIEW, latest, times)
    assert state is not None and state.progress_time is not None
    assert earliest - 0.01 <= state.progress_time <= unix_time(latest.stepped_s) + 0.01
    assert (state.job, state.generation, state.members, state.waiting) == ("train", 3, 2, 2)
    assert (state.step, state.loss, state.gradient_norm) == (5, 1.5, 2.0)
    assert state.step_s == pytest.approx(1.0)
    assert state.samples_per_s == pytest.approx(8.0)
    assert state.mfu == pytest.approx(8e9 / 2e12)
    assert state.checkpoint_every == 50
    assert state.compute_ratios["a", 1] == 2.0


def test_a_node_that_is_set_aside_does_not_wait(options: AgentOptions, latest: Latest) -> None:
    world = replace(WORLD, strikes=(NodeStrikes(node="c", count=QUARANTINE_STRIKES),))
    view = replace(VIEW, world=world, struck_s={"c": time.monotonic()})
    state = job_state(options, view, latest, {})
    assert state is not None
    assert (state.waiting, state.set_aside) == (1, 1)


def test_progress_counts_from_the_begin_before_a_step(options: AgentOptions) -> None:
    latest = Latest(began_s=time.monotonic() - 60.0)
    state = job_state(options, FRESH, latest, {})
    assert state is not None and state.progress_time is not None
    assert state.step is None
    assert state.progress_time == pytest.approx(unix_time(latest.began_s), abs=30.0)
    latest.plain = True
    state = job_state(options, FRESH, latest, {})
    assert state is not None and state.progress_time is None


def test_the_status_has_each_workers_own_time(options: AgentOptions, latest: Latest) -> None:
    status = agent_status(options, VIEW, latest, leaving=False)
    assert status["compute_s"] == {"0": 0.5, "1": 1.0}


def test_health_is_the_age_of_the_last_turn() -> None:
    """`/healthz` said ok for a loop that stood still in a write to a pipe."""
    now_s = 100.0
    pulse = LoopPulse(5.0, lambda: now_s)
    assert pulse.turns() and pulse.answer().status == HTTPStatus.OK  # it has not begun
    pulse.turned(now_s)
    now_s += 5.0
    assert pulse.turns() and pulse.answer().content == b"ok\n"
    now_s += 0.1
    assert not pulse.turns()
    answer = pulse.answer()
    assert answer.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert answer.content == b"the agent's loop has stood still for 5.1 s\n"
    pulse.turned(now_s)
    assert pulse.turns()
    now_s += 60.0
    pulse.ended()  # the end saves what there is, and takes what it needs
    assert pulse.turns() and pulse.answer().status == HTTPStatus.OK


def workers_in(*states: WorkerState) -> WorkerGroup:
    log = Path("0.log")
    workers = [Worker(rank, rank, 1, None, log, 0) for rank in range(len(states))]  # type: ignore[arg-type]
    for worker, state in zip(workers, states, strict=True):
        worker.state = state
    return WorkerGroup(None, 3, 0, workers=workers)  # type: ignore[arg-type]


STARTING, GONE = WorkerState(), WorkerState(process=Process.EXITED)
CALLED, READY = WorkerState(stage=Stage.ATTACHED), WorkerState(stage=Stage.RESTORED)


@pytest.mark.parametrize(
    ("view", "states", "text"),
    [
        (FRESH, (), "1 of at least 2 nodes are here"),
        (replace(VIEW, round_s=1.0), (READY,), "1 of at least 2 nodes are here"),
        (VIEW, (STARTING, CALLED), "waiting for rank 0 to call elasticzero.run"),
        (VIEW, (STARTING, STARTING), "waiting for ranks 0, 1 to call elasticzero.run"),
        (VIEW, (READY, CALLED), "waiting for rank 1 to meet the others and load state"),
        (VIEW, (READY, GONE), "waiting for the first step"),
        (replace(VIEW, done=Done(outcome="finished", step=5, reason="r")), (READY,), None),
    ],
)
def test_what_a_node_waits_for(
    view: View, states: tuple[WorkerState, ...], text: str | None
) -> None:
    latest = Latest(began_s=0.0, reason="1 of at least 2 nodes are here")
    group = workers_in(*states) if states else None
    assert progress_of(view, group, latest) == text
    if text is not None and states and view.round_s is None:
        latest.plain = True
        assert "no steps are seen" in str(progress_of(view, group, latest))


def test_how_far_training_has_come(latest: Latest) -> None:
    group = workers_in(READY)
    progress = progress_of(VIEW, group, latest)
    assert isinstance(progress, Trains) and progress.leads
    assert (progress.step, progress.total, progress.loss) == (5, None, 1.5)
    assert progress.steps_per_s == pytest.approx(1.0)
    other = progress_of(replace(VIEW, me=B), group, latest)
    assert isinstance(other, Trains) and not other.leads
    latest.starting(time.monotonic())  # another generation begins
    assert progress_of(VIEW, group, latest) == "waiting for the first step"
