"""A real etcd loses its data under a job that trains: wiped, or restored from a backup."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from torch import Tensor

from elasticzero.launcher.store.etcd.server import find_etcd
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.etcd_members import Members
from tests.integration.test_elastic_training import check_samples, check_weights

TTL_S = 2
LATE_S = 30.0
"""A generous deadline."""


def job_arguments(checkpoints: Path) -> list[str]:
    return [
        *("--nnodes", "2:3", "--settle", "0.5", "--lease-ttl", str(TTL_S)),
        *("--checkpoint-dir", str(checkpoints), str(REGRESSION), "--pause", "0.1"),
    ]


def restore(etcd: Members, backup: Path) -> None:
    """Start anew from what `etcdctl snapshot save` has written, as an operator would."""
    (member,) = etcd.members
    etcd.kill()
    shutil.rmtree(member.data)
    binary = find_etcd()
    assert binary is not None
    subprocess.run(
        [
            *(str(binary.with_name("etcdutl")), "snapshot", "restore", str(backup)),
            *("--data-dir", str(member.data), "--name", member.name),
            *("--initial-cluster", f"{member.name}={member.peer_url}"),
            *("--initial-advertise-peer-urls", member.peer_url),
        ],
        check=True,
        capture_output=True,
        timeout=LATE_S,
    )
    etcd.start(member)


def kill_a_worker(told: Story) -> None:
    """Of a node that trains; wait until the others have gone on without it, or with a new one."""
    generation = told.generation
    (pid, *_) = told.of("started")[-1]["pids"]
    os.kill(pid, signal.SIGKILL)
    told.wait("the next generation", lambda: told.generation > generation)
    step = told.step
    told.wait_for_step(step + 3)


def written_anew(told: Story) -> list[str]:
    messages = [event["message"] for event in told.of("store_recovery")]
    return [text for text in messages if "wrote anew" in text]


@pytest.mark.timeout(240)
def test_training_outlives_a_wiped_etcd(
    tmp_path: Path, job: str, reference: dict[str, Tensor]
) -> None:
    """After a kill everything stopped for good: no world could be written that the store knew."""
    checkpoints = tmp_path / "checkpoints"
    with (
        Members(tmp_path / "etcd") as etcd,
        story(tmp_path, etcd.endpoints, job, job_arguments(checkpoints), nodes=2) as told,
    ):
        told.wait_for_step(10)
        told.pause(0.5)
        etcd.wipe()
        told.wait("what was written anew", lambda: written_anew(told))
        step = told.step
        told.wait_for_step(step + 3)
        assert told.generation == 1, told.logs()
        kill_a_worker(told)
        codes = told.wait_for_end()
        assert set(codes.values()) == {0}, told.logs()
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_training_outlives_an_old_backup_of_etcd(
    tmp_path: Path, job: str, reference: dict[str, Tensor]
) -> None:
    """The backup is two generations old: its world, its leases and its revisions are the past."""
    checkpoints, backup = tmp_path / "checkpoints", tmp_path / "backup"
    with (
        Members(tmp_path / "etcd") as etcd,
        story(tmp_path, etcd.endpoints, job, job_arguments(checkpoints), nodes=2) as told,
    ):
        told.wait_for_step(5)
        told.pause(0.5)
        etcd.control("snapshot", "save", str(backup))
        kill_a_worker(told)
        kill_a_worker(told)
        generation = told.generation
        restore(etcd, backup)
        told.wait("what was written anew", lambda: written_anew(told))
        step = told.step
        told.wait_for_step(step + 3)
        assert told.generation == generation, told.logs()
        kill_a_worker(told)
        codes = told.wait_for_end()
        assert set(codes.values()) == {0}, told.logs()
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_node_that_came_to_the_emptied_etcd_joins_the_others(
    tmp_path: Path, job: str, reference: dict[str, Tensor]
) -> None:
    """It may be there before them: it has no token of theirs, and knows no world."""
    checkpoints = tmp_path / "checkpoints"
    with (
        Members(tmp_path / "etcd") as etcd,
        story(tmp_path, etcd.endpoints, job, job_arguments(checkpoints), nodes=2) as told,
    ):
        told.wait_for_step(10)
        told.pause(2.0)
        etcd.wipe()
        told.cluster.start_node()
        told.wait("what was written anew", lambda: written_anew(told))
        told.wait("three nodes", lambda: told.of("world")[-1]["world_size"] == 3)
        assert told.generation == 2, told.logs()
        step = told.step
        told.wait_for_step(step + 3)
        codes = told.wait_for_end()
        assert set(codes.values()) == {0}, told.logs()
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kills", [False, True], ids=["training", "after a kill"])
def test_sigterm_keeps_its_time_while_etcd_is_away(tmp_path: Path, job: str, kills: bool) -> None:
    """It took 56 s of 25, or for ever where a worker had failed, and saved nothing."""
    checkpoints, grace_s = tmp_path / "checkpoints", 8.0
    arguments = ["--grace", f"{grace_s:g}", "--strategy", "ddp", *job_arguments(checkpoints)]
    with (
        Members(tmp_path / "etcd") as etcd,
        story(tmp_path, etcd.endpoints, job, arguments, nodes=2) as told,
    ):
        told.wait_for_step(10)
        etcd.kill()
        if kills:
            (pid, *_) = told.of("started")[-1]["pids"]
            os.kill(pid, signal.SIGKILL)
            told.wait("the end of that worker", lambda: told.of("ended"))
        began_s = time.monotonic()
        for node in told.cluster.running():
            node.process.send_signal(signal.SIGTERM)
        codes = told.wait_for_end()
        took_s = time.monotonic() - began_s
        assert set(codes.values()) == {75}, told.logs()
        assert took_s < grace_s + 20.0, told.logs()
        saved = [event["step"] for event in told.of("checkpoint")]
        assert saved and max(saved) >= 9, told.logs()
