"""The RAM tier on real clusters: what is lost with nodes is read from the memory of those left."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from elasticzero.checkpoint.ram.slots import SLOTS
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.launcher.snapshots.shared_memory import snapshot_directory
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.test_elastic_training import check_samples, check_weights
from tests.support.cases import drawn

pytestmark = pytest.mark.timeout(180)


def job_arguments(checkpoints: Path, strategy: str, *options: str) -> list[str]:
    """Options of a run that writes no checkpoint but at its end, unless `more` says so."""
    arguments = ["--strategy", strategy, "--checkpoint-dir", str(checkpoints), *options]
    return [*arguments, str(REGRESSION), "--pause", "0.03"]


def members(told: Story) -> list[str]:
    """The nodes of the newest world, in its order."""
    worlds = told.of("world")
    return list(max(worlds, key=lambda world: world["generation"])["members"])


def lose(told: Story, *places: int) -> None:
    """SIGKILL to every process of the nodes at these places of the world's order."""
    names = members(told)
    for place in places:
        told.cluster.kill_node(told.cluster.nodes[names[place]])


@pytest.mark.parametrize("strategy", drawn("zero2"))
def test_a_lost_node_of_four_costs_two_steps_at_most_without_any_checkpoint(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    options = job_arguments(tmp_path / "c", strategy, "--nnodes", "1:4", "--snapshot-every", "1")
    with story(tmp_path, etcd.endpoint, job, options, nodes=4) as told:
        told.wait_for_step(30)
        told.pause(1.0)
        # In such a step all nodes hear what a buddy has; then comes the snapshot that counts.
        told.wait_for_step(told.step + 5)
        lose(told, 2)
        codes = told.wait_for_end()
    assert sorted(codes.values()) == [-9, 0, 0, 0], told.logs()
    second = next(world for world in told.of("world") if world["generation"] == 2)
    assert second["tier"] == "ram" and second["world_size"] == 3
    assert told.lineage.recomputed <= 2
    check_samples(told.lineage, told.directory())
    check_weights(tmp_path / "c", reference)


@pytest.mark.parametrize("strategy", drawn())
def test_two_lost_nodes_that_are_no_pair_lose_nothing_that_was_held(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    options = job_arguments(tmp_path / "c", strategy, "--nnodes", "1:4", "--snapshot-every", "2")
    with story(tmp_path, etcd.endpoint, job, options, nodes=4) as told:
        told.wait_for_step(30)
        lose(told, 0, 3)
        told.wait_for_end()
    later = [world for world in told.of("world") if world["generation"] > 1]
    assert {world["tier"] for world in later} == {"ram"}
    assert min(world["resume_step"] for world in later) >= 20
    check_samples(told.lineage, told.directory())
    check_weights(tmp_path / "c", reference)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_a_lost_pair_falls_back_to_storage_and_says_so(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    options = job_arguments(
        tmp_path / "c", strategy, "--nnodes", "1:4", "--snapshot-every", "1",
        "--checkpoint-every", "10",
    )  # fmt: skip
    with story(tmp_path, etcd.endpoint, job, options, nodes=4) as told:
        told.wait_for_step(35)
        lose(told, 2, 3)
        told.wait_for_end()
    fallen = [world for world in told.of("world") if world["tier"] == "storage"]
    assert fallen and all(world["resume_step"] % 10 == 0 for world in fallen)
    assert any("no node is left that holds the part of rank" in w["reason"] for w in fallen)
    check_samples(told.lineage, told.directory())
    check_weights(tmp_path / "c", reference)


@pytest.mark.parametrize("strategy", drawn())
def test_memory_is_bounded_whatever_happens_to_the_world(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    options = job_arguments(
        tmp_path / "c", strategy, "--nnodes", "1:3", "--snapshot-every", "1",
        "--checkpoint-every", "7", "--keep", "2",
    )  # fmt: skip
    most: dict[str, int] = {}
    with story(tmp_path, etcd.endpoint, job, options, nodes=3) as told:

        def count() -> bool:
            for name in told.cluster.nodes:
                files = list((snapshot_directory(job, name) / SLOTS).glob("*"))
                most[name] = max(most.get(name, 0), len(files))
            return told.step >= 60 or not told.cluster.running()

        told.wait_for_step(10)
        lose(told, 1)
        told.wait("a second world", lambda: count() or told.generation >= 2)
        told.cluster.start_node()
        told.wait("the end", lambda: count() and not told.cluster.running())
    # One rank a node: two slots of its own, two for a replica, and a third for a stop.
    assert max(most.values()) <= 5, most
    left = [step.step for step in catalog.steps(open_directory(tmp_path / "c"))]
    assert len(left) == 2, left


@pytest.mark.parametrize("strategy", drawn("ddp"))
def test_a_worker_that_was_alone_leaves_its_state_with_its_agent(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    options = job_arguments(tmp_path / "c", strategy, "--nnodes", "1:1", "--snapshot-every", "1")
    with story(tmp_path, etcd.endpoint, job, options, nodes=1) as told:
        told.wait_for_step(20)
        told.cluster.kill_worker(told.node(0))
        told.wait_for_end()
    second = next(world for world in told.of("world") if world["generation"] == 2)
    assert second["tier"] == "ram" and told.lineage.recomputed <= 2
    check_samples(told.lineage, told.directory())
    check_weights(tmp_path / "c", reference)


@pytest.mark.parametrize("strategy", drawn())
def test_where_nobody_can_go_on_the_agents_save_what_memory_holds(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    options = job_arguments(tmp_path / "c", strategy, "--nnodes", "2:2", "--snapshot-every", "1")
    with story(tmp_path, etcd.endpoint, job, options, nodes=2) as told:
        told.wait_for_step(25)
        lose(told, 1)
        told.wait("a checkpoint", lambda: told.of("checkpoint"))
        step = told.of("checkpoint")[0]["step"]
        assert step >= 20 and not told.of("world")[-1]["resume_step"]
        told.cluster.start_node()
        told.wait_for_end()
    last = max(told.of("world"), key=lambda world: world["generation"])
    assert last["resume_step"] == step
    check_samples(told.lineage, told.directory())
    check_weights(tmp_path / "c", reference)


@pytest.mark.parametrize("strategy", drawn())
def test_four_nodes_that_all_leave_save_what_they_hold_before_they_go(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    options = job_arguments(tmp_path / "c", strategy, "--nnodes", "1:4", "--snapshot-every", "1")
    with story(tmp_path, etcd.endpoint, job, options, nodes=4) as told:
        told.wait_for_step(20)
        for name in members(told):
            told.cluster.drain(told.cluster.nodes[name])
        codes = told.wait_for_end()
    assert set(codes.values()) == {75}
    assert catalog.newest_good(open_directory(tmp_path / "c")) == told.step


@pytest.mark.parametrize("strategy", drawn())
def test_without_shared_memory_checkpoints_are_written_all_the_same(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    options = [
        "--nnodes", "1:1", "--nproc-per-node", "2", "--strategy", strategy, "--checkpoint-dir",
        str(tmp_path / "c"), "--checkpoint-every", "30", str(REGRESSION), "--no-memory",
    ]  # fmt: skip
    with story(tmp_path, etcd.endpoint, job, options, nodes=1) as told:
        codes = told.wait_for_end()
    assert codes == {"node-0": 0}
    assert {event["direct"] for event in told.of("captured")} == {True}
    first, *_, last = sorted(info.step for info in catalog.steps(open_directory(tmp_path / "c")))
    assert (first, last) == (30, 102)  # those between may come late on a busy machine
    check_weights(tmp_path / "c", reference)
