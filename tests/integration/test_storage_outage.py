"""Storage that takes no writes while a generation starts: the storage's failure, and no node's."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.test_elastic_training import check_samples, check_weights
from tests.mounts import disk_that_freezes, freeze, let_write, small_disk, thaw

pytestmark = pytest.mark.timeout(240)


def job_arguments(checkpoints: Path, strategy: str, *options: str) -> list[str]:
    arguments = ["--strategy", strategy, "--checkpoint-dir", str(checkpoints)]
    arguments += ["--checkpoint-every", "20", *options]
    return [*arguments, str(REGRESSION), "--pause", "0.05"]


def newest(checkpoints: Path) -> int | None:
    return catalog.newest_good(open_directory(checkpoints))


def logs_of_workers(told: Story) -> str:
    return "".join(path.read_text() for path in told.directory().glob("*/0.log"))


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "zero2"])
def test_storage_that_is_read_only_as_a_generation_starts_ends_nothing(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """Rank 0's node was blamed and set aside for it, or the job given up, its state in memory."""
    with small_disk(tmp_path / "disk", 8) as disk:
        options = job_arguments(disk / "c", strategy, "--nnodes", "2:2", "--snapshot-every", "1")
        with story(tmp_path, etcd.endpoint, job, options, nodes=2) as told:
            told.wait("a checkpoint", lambda: newest(disk / "c") == 20)
            told.pause(0.3)
            let_write(disk, writes=False)
            for _ in range(3):
                before = told.generation
                told.cluster.kill_worker(told.node(1))
                told.wait_for_generation(before + 1)
                told.wait_for_step(told.step + 2)
            step = told.step
            let_write(disk, writes=True)
            codes = told.wait_for_end()
        assert codes == {"node-0": 0, "node-1": 0}, told.logs()
        assert step > 20
        worlds = [world for world in told.of("world") if world["generation"] > 1]
        assert {world["tier"] for world in worlds} == {"ram"}
        assert not any("cannot be written" in world["reason"] for world in worlds)
        expected = "cannot be written: Read-only file system; training goes on"
        assert expected in logs_of_workers(told)
        check_samples(told.lineage, told.directory())
        check_weights(disk / "c", reference)


@pytest.mark.slow
def test_storage_that_does_not_answer_as_a_generation_starts_ends_nothing(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """A blocked open, as on NFS, held rank 0 up for good, and was taken for a hang of its node."""
    with disk_that_freezes(tmp_path / "disk") as disk:
        options = job_arguments(disk / "c", "ddp", "--nnodes", "2:2")
        with story(tmp_path, etcd.endpoint, job, options, nodes=2) as told:
            told.wait("a checkpoint", lambda: newest(disk / "c") == 20)
            told.pause(0.3)
            freeze(disk)
            try:
                told.cluster.kill_worker(told.node(1))
                told.wait("a second world", lambda: told.generation == 2)
                told.wait_for_step(told.step + 2)
            finally:
                thaw(disk)
            codes = told.wait_for_end()
        assert codes == {"node-0": 0, "node-1": 0}, told.logs()
        second = next(world for world in told.of("world") if world["generation"] == 2)
        assert second["tier"] == "ram" and told.generation == 2
        assert "did not answer within 10 s; training goes on" in logs_of_workers(told)
        check_weights(disk / "c", reference)


@pytest.mark.slow
def test_a_node_that_comes_while_storage_is_read_only_takes_its_place(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """It exited with 64, on which Kubernetes ends the whole job."""
    with small_disk(tmp_path / "disk", 8) as disk:
        options = job_arguments(disk / "c", "zero2", "--nnodes", "1:2")
        with story(tmp_path, etcd.endpoint, job, options, nodes=1) as told:
            told.wait("a checkpoint", lambda: newest(disk / "c") == 20)
            told.pause(0.5)
            let_write(disk, writes=False)
            told.cluster.start_node()
            told.wait("the newcomer's world", lambda: told.generation == 2)
            told.wait_for_step(told.step + 2)
            let_write(disk, writes=True)
            codes = told.wait_for_end()
        assert codes == {"node-0": 0, "node-1": 0}, told.logs()
        assert told.lineage.recomputed == 0
        assert "the job has begun, and saves are tried when due" in told.node(1).log.read_text()
        check_weights(disk / "c", reference)


@pytest.mark.slow
def test_a_fresh_job_does_not_begin_on_storage_that_is_read_only(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        let_write(disk, writes=False)
        options = job_arguments(disk / "c", "ddp", "--nnodes", "1:2")
        with story(tmp_path, etcd.endpoint, job, options, nodes=2) as told:
            codes = told.wait_for_end()
        assert codes == {"node-0": 64, "node-1": 64}, told.logs()
        assert "cannot be written: Read-only file system" in told.node(0).log.read_text()
