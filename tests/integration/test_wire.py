"""Gradients that are encoded between ranks: training goes on as ever, to nearly equal weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

import elasticzero
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import SCRIPTS, story
from tests.integration.test_elastic_training import check_samples
from tests.support.cases import option_text, slow

pytestmark = pytest.mark.timeout(180)

ENCODED = SCRIPTS / "encoded.py"
CLOSE = {"bf16": 0.02, "int8": 0.02, "fp8": 0.02, "int4": 0.2, "topk:0.2": 0.2, "powersgd:1": 0.5}
"""By how much weights may differ: those of a small network, after 100 steps of AdamW."""


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", ("--wire", "int8")),
        slow("ddp", ("--wire", "bf16")),
        slow("zero1", ("--wire", "fp8")),
        slow("ddp", ("--wire", "powersgd:1")),
        ("zero2", ("--wire", "topk:0.2")),
        slow("zero2", ("--wire", "int4", "--shard", "node", "--nproc-per-node", "2")),
    ],
    ids=option_text,
)
def test_nodes_die_come_and_leave_with_encoded_gradients(
    strategy: str,
    options: tuple[str, ...],
    tmp_path: Path,
    job: str,
    etcd: EtcdServer,
    reference: dict[str, Tensor],
) -> None:
    """Replicas are compared at each step: they are equal to the bit."""
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:3", "--strategy", strategy, "--checkpoint-dir", str(checkpoints)]
    arguments += ["--verify-replicas", "1", *options]
    arguments += [str(ENCODED), "--pause", "0.1"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        told.wait_for_step(10)
        told.cluster.kill_node(told.node(0))
        told.wait_for_first_step(2)
        told.cluster.start_node()
        told.wait_for_first_step(3)
        told.wait_for_step(told.step + 5)
        told.cluster.drain(told.node(1))
        codes = told.wait_for_end()
    assert sorted(codes.values()) == [-9, 0, 0, 75], told.logs()
    check_samples(told.lineage, told.directory())
    state = elasticzero.checkpoint.load(checkpoints)
    differences = [
        float((state[f"model/{name}"] - tensor).abs().max()) for name, tensor in reference.items()
    ]
    assert 1e-9 < max(differences) < CLOSE[options[1]]
