"""Nodes die, leave and come; the result is that of a run that nothing disturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

import elasticzero.checkpoint
from elasticzero.launcher.local.cluster import Node
from elasticzero.launcher.observability.lineage import Lineage, committed
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.processes import descendants
from tests.integration.clusters import (
    REGRESSION,
    Story,
    events_in,
    story,
    traces_in,
)
from tests.integration.clusters import (
    elasticzero as command,
)
from tests.integration.reference import order_of_samples, steps_in
from tests.support.cases import drawn


def check_weights(checkpoints: Path, reference: dict[str, Tensor]) -> None:
    """The last checkpoint holds the reference's weights to 1e-9 in float64."""
    state = elasticzero.checkpoint.load(checkpoints)
    for name, reference_tensor in reference.items():
        tensor = state[f"model/{name}"]
        assert tensor.dtype == torch.float64
        assert (tensor - reference_tensor).abs().max() < 1e-9, name


def check_samples(
    lineage: Lineage, directory: Path, *, epochs: int = 3, global_batch: int = 10
) -> None:
    """Each step is committed once, with the samples that seed and epoch alone decide."""
    expected, count = order_of_samples(global_batch, epochs), steps_in(global_batch, epochs)
    steps = committed(lineage, traces_in(directory))
    assert [sorted(steps[step]) for step in range(1, count + 1)] == [sorted(s) for s in expected]
    per_epoch = count // epochs
    for epoch in range(epochs):
        used = [s for step in range(per_epoch) for s in steps[epoch * per_epoch + step + 1]]
        assert sorted(used) == list(range(331))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", drawn("zero3"))
def test_a_killed_node_changes_nothing(
    strategy: str, tmp_path: Path, job: str, reference: dict[str, Tensor]
) -> None:
    logs, checkpoints = tmp_path / "logs", tmp_path / "checkpoints"
    arguments = ["local", "--nodes", "3", "--strategy", strategy, "--fault", "kill-node@60"]
    arguments += ["--job", job, "--log-dir", str(logs), "--checkpoint-dir", str(checkpoints)]
    arguments += ["--checkpoint-every", "25", str(REGRESSION), "--pause", "0.02"]
    completed = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=150, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "step 60: SIGKILL to every process of node-" in completed.stdout
    lineage = Lineage()
    for event in events_in(logs / job):
        lineage.take(event)
    assert len(lineage.resume_steps) == 2, completed.stdout
    if strategy == "ddp":
        assert lineage.recomputed <= 1, completed.stdout
    else:
        assert lineage.resume_steps[2] >= 50, completed.stdout
    check_samples(lineage, logs / job)
    check_weights(checkpoints, reference)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", drawn("zero2"))
def test_a_drained_node_and_a_newcomer_cost_no_step(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:3", "--strategy", strategy, "--checkpoint-dir", str(checkpoints)]
    arguments += [str(REGRESSION), "--pause", "0.1"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(5)
        told.cluster.drain(told.node(0))
        told.wait("the leaver's end", lambda: not told.node(0).running)
        told.wait_for_step(10)
        told.pause(0.8)
        told.cluster.start_node()
        told.wait("the newcomer's world", lambda: told.generation >= 3)
        codes = told.wait_for_end()
    assert codes == {"node-0": 75, "node-1": 0, "node-2": 0}
    assert told.lineage.recomputed == 0
    tiers = {event["generation"]: event["tier"] for event in told.of("world")}
    assert tiers == {1: "fresh", 2: "live", 3: "live"}
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", drawn())  # nodes die, come and leave in the stories above
def test_nodes_that_hold_everything_die_come_and_leave_without_a_lost_step(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """`--shard node`, two workers a node: no snapshot is taken while training, none is missed."""
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:3", "--strategy", strategy, "--checkpoint-dir", str(checkpoints)]
    arguments += ["--nproc-per-node", "2", "--shard", "node", str(REGRESSION), "--pause", "0.15"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(10)
        told.cluster.kill_node(told.node(0))
        told.wait_for_first_step(2)
        told.pause(1.0)
        told.cluster.start_node()
        told.wait_for_first_step(3)
        told.cluster.drain(told.node(1))
        codes = told.wait_for_end()
    assert codes == {"node-0": -9, "node-1": 75, "node-2": 0}
    assert told.lineage.recomputed == 0
    worlds = {event["generation"]: event for event in told.of("world")}
    assert [worlds[n]["tier"] for n in (2, 3, 4)] == ["ram"] * 3
    assert [worlds[n]["world_size"] for n in (1, 2, 3, 4)] == [4, 2, 4, 2]
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(120)
def test_a_killed_worker_costs_at_most_a_step_under_ddp(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:2", "--checkpoint-dir", str(checkpoints), str(REGRESSION)]
    with story(tmp_path, etcd.endpoint, job, [*arguments, "--pause", "0.05"], nodes=2) as told:
        told.wait_for_step(20)
        told.cluster.kill_worker(told.node(0))
        codes = told.wait_for_end()
    assert codes == {"node-0": 0, "node-1": 0}
    assert told.generation == 2
    assert told.lineage.recomputed <= 1
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.timeout(180)
def test_a_leader_falls_silent_and_comes_back_and_another_dies(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """Every process of the first leader's node is suspended, as a machine may be for a while."""
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:3", "--lease-ttl", "2", "--checkpoint-dir", str(checkpoints)]
    arguments += [str(REGRESSION), "--pause", "0.05"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        told.wait_for_step(20)
        told.pause(0.4)
        silent = leader(told)
        suspended = [silent.process.pid, *descendants(silent.process.pid)]
        send(suspended, signal.SIGSTOP)
        told.wait_for_first_step(2)
        assert silent.name not in members(told)
        send(suspended, signal.SIGCONT)
        told.wait("its return", lambda: silent.name in members(told) and told.generation > 2)
        told.wait_for_first_step(told.generation)
        told.cluster.kill_node(leader(told))
        told.wait_for_first_step(told.generation + 1)
        codes = told.wait_for_end()
    assert sorted(codes.values()) == [-9, 0, 0], told.logs()
    assert all(told.lineage.lost(generation) <= 1 for generation in told.lineage.resume_steps)
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


def members(told: Story) -> list[str]:
    """The nodes of the newest world, the leader first."""
    world = max(told.of("world"), key=lambda event: event["generation"])
    return list(world["members"])


def leader(told: Story) -> Node:
    return told.cluster.nodes[members(told)[0]]


def send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_five_workers_all_notice_a_lost_one(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    arguments = ["--nnodes", "1:5", str(REGRESSION), "--pause", "0.1"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=5) as told:
        told.wait_for_step(5)
        killed_s = time.time()
        told.cluster.kill_worker(told.node(3))
        told.wait("all to stop", lambda: len(told.of("stopping")) >= 4)
        noticed = {event["rank"]: event["time"] for event in told.of("stopping")}
        told.wait("the next generation's steps", lambda: 2 in told.lineage.reached)
    assert len(noticed) == 4
    assert max(noticed.values()) - killed_s < 10.0
