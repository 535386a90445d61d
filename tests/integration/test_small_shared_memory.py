"""Shared memory that is too small for the state, as a container's 64 MB may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, story
from tests.integration.test_elastic_training import check_samples
from tests.mounts import small_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
HIDDEN = 40_000
"""Of the model: all state of it is 11 MiB."""


def job_arguments(memory: Path, strategy: str, *options: str) -> list[str]:
    arguments = ["--strategy", strategy, "--snapshot-dir", str(memory), *options, str(REGRESSION)]
    return [*arguments, "--pause", "0.1", "--hidden", str(HIDDEN)]


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_join_and_a_drain_lose_no_step_where_memory_is_short(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a checkpoint directory a mere join threw training back to step 0."""
    disk = tmp_path / "tmp"
    disk.mkdir()
    monkeypatch.setenv("TMPDIR", str(disk))
    with small_disk(tmp_path / "shm", 6) as memory:
        options = job_arguments(memory, strategy, "--nnodes", "1:2")
        with story(tmp_path, etcd.endpoint, job, options, nodes=1) as told:
            told.wait_for_step(8)
            told.pause(0.5)
            told.cluster.start_node()
            told.wait("the newcomer's world", lambda: told.generation == 2)
            told.wait_for_step(told.step + 3)
            told.cluster.drain(told.node(0))
            told.wait("the leaver's end", lambda: not told.node(0).running)
            codes = told.wait_for_end()
            assert not list(disk.glob("elasticzero-snapshots-*"))
        assert codes == {"node-0": 75, "node-1": 0}, told.logs()
        assert told.generation == 3 and told.lineage.recomputed == 0
        tiers = {world["generation"]: world["tier"] for world in told.of("world")}
        assert tiers == {1: "fresh", 2: "live", 3: "live"}
        check_samples(told.lineage, told.directory())
        log = told.node(0).log.read_text()
        assert f"{memory} is short: this node's snapshots need " in log
        assert log.count("is short") == 1 and "--snapshot-dir" in log


@pytest.mark.parametrize(("strategy", "most"), [("ddp", 1), ("zero2", 6)])
def test_a_lost_node_costs_a_few_steps_where_memory_is_short(
    strategy: str, most: int, tmp_path: Path, job: str, etcd: EtcdServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    disk = tmp_path / "tmp"
    disk.mkdir()
    monkeypatch.setenv("TMPDIR", str(disk))
    with small_disk(tmp_path / "shm", 6) as memory:
        options = job_arguments(memory, strategy, "--nnodes", "1:2", "--snapshot-every", "1")
        with story(tmp_path, etcd.endpoint, job, options, nodes=2) as told:
            told.wait_for_step(10)
            told.pause(0.5)
            told.wait_for_step(told.step + 5)
            told.cluster.kill_node(told.node(1))
            codes = told.wait_for_end()
        assert codes == {"node-0": 0, "node-1": -9}, told.logs()
        second = next(world for world in told.of("world") if world["generation"] == 2)
        assert second["tier"] == "ram" and told.lineage.recomputed <= most
        check_samples(told.lineage, told.directory())
