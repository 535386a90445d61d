"""Captures that go to shared memory while training goes on, as where a GPU has room for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import SCRIPTS, Story, story
from tests.integration.test_elastic_training import check_samples, check_weights
from tests.integration.test_memory_tier import lose
from tests.support.cases import slow

pytestmark = pytest.mark.timeout(180)

IMAGES = SCRIPTS / "images.py"
EACH_STEP = ("--snapshot-every", "1")
STRATEGIES = ("zero2", slow("zero1"), slow("zero3"))


def job_arguments(tmp_path: Path, strategy: str, nodes: str, *options: str) -> list[str]:
    arguments = ["--nnodes", nodes, "--strategy", strategy, *options]
    arguments += ["--checkpoint-dir", str(tmp_path / "c")]
    return [*arguments, str(IMAGES), "--pause", "0.03"]


def check(told: Story, tmp_path: Path, reference: dict[str, Tensor]) -> None:
    check_samples(told.lineage, told.directory())
    check_weights(tmp_path / "c", reference)


def held_step(told: Story, generation: int) -> int:
    """The newest step that all ranks of a generation knew to be held by all nodes."""
    steps = [e["held"] for e in told.of("step") if e["generation"] == generation]
    return max(steps, default=0)


def check_resumed_steps(told: Story) -> None:
    """Training goes on from what was held, or from a newer state; a checkpoint is newer where it
    comes to storage before its replica comes to another node."""
    worlds = {event["generation"]: event["resume_step"] for event in told.of("world")}
    for generation, step in worlds.items():
        assert step >= held_step(told, generation - 1), told.logs()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_was_held_comes_back_whatever_was_being_copied(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """A lost node, a killed worker, a drain and a join."""
    options = job_arguments(tmp_path, strategy, "1:3", *EACH_STEP, "--checkpoint-every", "7")
    with story(tmp_path, etcd.endpoint, job, options, nodes=3) as told:
        told.wait_for_step(20)
        told.wait("a state that all hold", lambda: held_step(told, 1) > 0)
        lose(told, 1)
        told.wait_for_first_step(2)
        told.wait_for_step(told.step + 5)
        with told.slowed(0.2):
            told.cluster.start_node()
            told.wait_for_first_step(3)
        told.wait_for_step(told.step + 5)
        told.cluster.kill_worker(told.cluster.running()[-1])
        told.wait_for_first_step(4)
        told.wait_for_step(told.step + 5)
        told.cluster.drain(told.cluster.running()[0])
        codes = told.wait_for_end()
    assert sorted(codes.values())[0] == -9, told.logs()
    check_resumed_steps(told)
    check(told, tmp_path, reference)


def test_one_worker_of_a_node_still_copies_what_another_has_replaced(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """The snapshot before a checkpoint."""
    options = job_arguments(tmp_path, "zero2", "2", *EACH_STEP, "--checkpoint-every", "3")
    options = ["--nproc-per-node", "2", *options]
    with story(tmp_path, etcd.endpoint, job, options, nodes=2) as told:
        codes = told.wait_for_end()
    assert codes == {"node-0": 0, "node-1": 0}, told.logs()
    assert told.generation == 1, told.logs()
    check(told, tmp_path, reference)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("zero2", "a snapshot"),
        slow("zero2", "a checkpoint"),
        slow("zero2", "the last"),
        slow("ddp", "a checkpoint"),
        slow("ddp", "the last"),
    ],
)
def test_a_worker_whose_capture_cannot_be_finished_fails(
    strategy: str,
    kind: str,
    tmp_path: Path,
    job: str,
    etcd: EtcdServer,
    reference: dict[str, Tensor],
) -> None:
    """And the next generation goes on from what was held before."""
    snapshots, checkpoint_every, first_bad = {
        "a snapshot": ("1", "90", 31),
        "a checkpoint": ("0", "7", 28),
        "the last": ("0", "90", 102),
    }[kind]
    every = ("--snapshot-every", snapshots, "--checkpoint-every", checkpoint_every)
    options = job_arguments(tmp_path, strategy, "2", *every)
    bad = {"TESTER_BAD_FROM": str(first_bad)}
    with story(tmp_path, etcd.endpoint, job, options, nodes=2, environments=[bad, bad]) as told:
        codes = told.wait_for_end()
    assert codes == {"node-0": 0, "node-1": 0}
    assert told.generation == 2, told.logs()
    assert "rank 1 failed: the snapshot is gone" in told.logs()
    check(told, tmp_path, reference)
