"""Scalars of a job reach TensorBoard: each step once, whatever happens to nodes and leaders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, combinations
from pathlib import Path

import pytest

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.reference import steps_in
from tests.unit.ops.trackers.test_tensorboard_run import points

pytest.importorskip("tensorboard")
EPOCHS = 4
STEPS = steps_in(10, EPOCHS)


def runs_to(directory: Path, *arguments: str) -> list[str]:
    return ["--log-to", f"tensorboard:{directory}", *arguments, str(REGRESSION), "--epochs", "4"]


def subsets(values: list[float]) -> Iterator[tuple[float, ...]]:
    return chain.from_iterable(combinations(values, n) for n in range(1, len(values) + 1))


def check_curve(told: Story, directory: Path) -> tuple[int, int]:
    """Every step is there once, in order, and is the mean of what ranks of one generation logged.

    Returns for how many steps it is that of all its ranks, and the number of steps. What a killed
    node had not handed over is missing.
    """
    logged: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    generation = dict.fromkeys(told.cluster.nodes, 0)
    for node, event in told.told:
        if event["event"] in ("start", "switched"):
            generation[node] = event["generation"]
        elif event["event"] == "log":
            logged[event["step"]][generation[node]].append(event["loss"])
    curve = [(step, value) for _, step, value in points(directory, "loss")]
    assert [step for step, _ in curve] == list(range(1, STEPS + 1))
    whole = 0
    for step, value in curve:
        of_all = [sum(values) / len(values) for values in logged[step].values()]
        if any(value == pytest.approx(mean, rel=1e-5) for mean in of_all):
            whole += 1
            continue
        parts = chain.from_iterable(subsets(values) for values in logged[step].values())
        assert any(value == pytest.approx(sum(p) / len(p), rel=1e-5) for p in parts), step
    return whole, len(curve)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_curve_has_every_step_once_through_lost_leaders_a_drain_and_a_join(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    directory = tmp_path / "curves"
    arguments = ["--nnodes", "1:3", "--strategy", "zero2", *runs_to(directory), "--pause", "0.2"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        told.wait_for_step(8)
        told.cluster.kill_worker(told.node(1))
        told.wait_for_first_step(2)
        told.wait_for_step(told.step + 6)
        leader = told.of("world")[-1]["members"][0]
        told.cluster.kill_node(told.cluster.nodes[leader])
        told.wait_for_first_step(3)
        told.wait_for_step(told.step + 6)
        with told.slowed(1.0):
            told.cluster.start_node()
            told.wait_for_first_step(4)
        leader = told.of("world")[-1]["members"][0]
        told.cluster.drain(told.cluster.nodes[leader])
        told.wait_for_first_step(5)
        codes = told.wait_for_end()
        told.look()
        assert sorted(codes.values()) == [-9, 0, 0, 75]
        whole, steps = check_curve(told, directory / job / "run-1")
    assert whole >= steps - 25, "only a killed node's last seconds are missing"
    assert [path.name for path in (directory / job).iterdir()] == ["run-1"]


@pytest.mark.timeout(180)
def test_the_last_steps_have_the_values_of_all_nodes(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    directory = tmp_path / "curves"
    arguments = ["--nnodes", "3", *runs_to(directory), "--pause", "0.01"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        codes = told.wait_for_end()
        told.look()
        assert set(codes.values()) == {0}
        assert check_curve(told, directory / job / "run-1") == (STEPS, STEPS)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_goes_on_after_a_restart_and_another_begins_with_another_job(
    tmp_path: Path, job: str
) -> None:
    directory, checkpoints = tmp_path / "curves", tmp_path / "checkpoints"
    arguments = ["--nnodes", "1", *runs_to(directory, "--checkpoint-dir", str(checkpoints))]
    with EtcdServer() as etcd:
        stopped = tmp_path / "stopped"
        stopped.mkdir()
        slow = [*arguments, "--pause", "0.1"]
        with story(stopped, etcd.endpoint, job, slow, nodes=1) as told:
            told.wait_for_step(20)
            told.cluster.drain(told.node(0))
            told.wait("its end", lambda: not told.node(0).running)
    with EtcdServer() as another:  # nothing of the job is left but its checkpoint, and the curve
        with story(tmp_path, another.endpoint, job, arguments, nodes=1) as told:
            assert set(told.wait_for_end().values()) == {0}
            assert told.of("world")[0]["resume_step"] >= 20
        curve = [step for _, step, _ in points(directory / job / "run-1", "loss")]
        assert curve == list(range(1, STEPS + 1))
    arguments = ["--nnodes", "1", *runs_to(directory)]  # no checkpoint: it begins at the first step
    anew = tmp_path / "anew"
    anew.mkdir()
    with (
        EtcdServer() as third,
        story(anew, third.endpoint, job, [*arguments, "--pause", "0.01"], nodes=1) as told,
    ):
        assert set(told.wait_for_end().values()) == {0}
    assert curve == [step for _, step, _ in points(directory / job / "run-1", "loss")]
    assert curve == [step for _, step, _ in points(directory / job / "run-2", "loss")]


@pytest.mark.timeout(120)
def test_a_tracker_that_cannot_be_written_stops_no_training(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("where the directory should be")
    arguments = ["--nnodes", "2", *runs_to(blocked), "--pause", "0.01"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        assert set(told.wait_for_end().values()) == {0}
        told.look()
        lines = [line for line in told.logs().splitlines() if "--log-to tensorboard" in line]
        events = [event["error"] for event in told.of("tracker")]
        assert events and all(any(event in line for line in lines) for event in events)
    assert any("NotADirectoryError" in line or "FileExistsError" in line for line in lines), lines
    assert any("steps are not written" in line for line in lines), lines
