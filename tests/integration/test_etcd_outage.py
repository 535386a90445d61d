"""The one member of an etcd is away for a while; test_etcd_cluster.py does more, to three."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from torch import Tensor

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.test_elastic_training import check_samples, check_weights

TTL_S = 2


def job_arguments(checkpoints: Path, pause: str) -> list[str]:
    return [
        *("--nnodes", "2:3", "--settle", "0.5", "--lease-ttl", str(TTL_S)),
        *("--checkpoint-dir", str(checkpoints), str(REGRESSION), "--pause", pause),
    ]


def check_undisturbed(told: Story, codes: dict[str, int], step: int) -> None:
    assert set(codes.values()) == {0}
    assert told.generation == 1, told.logs()
    assert told.lineage.recomputed == 0
    assert told.step > step


@pytest.mark.timeout(120)
def test_etcd_is_killed_and_restarted(
    tmp_path: Path, job: str, reference: dict[str, Tensor]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    with (
        EtcdServer() as etcd,
        story(tmp_path, etcd.endpoint, job, job_arguments(checkpoints, "0.08"), nodes=2) as told,
    ):
        told.wait_for_step(10)
        etcd.kill()
        before = told.step
        time.sleep(TTL_S + 1.5)
        told.look()
        assert told.step > before + 3, "training stood still while etcd was down"
        etcd.restart()
        codes = told.wait_for_end()
        check_undisturbed(told, codes, before)
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)
