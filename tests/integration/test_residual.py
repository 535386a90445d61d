"""What was not sent of gradients yet is training state: whatever happens, nothing of it is lost."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import elasticzero
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import SCRIPTS, Story, story
from tests.integration.clusters import elasticzero as command
from tests.integration.scripts.weightless import GLOBAL_BATCH, SAMPLES, gradients
from tests.support.cases import option_text, slow

pytestmark = pytest.mark.timeout(180)

EPOCHS = 3
assert SAMPLES % GLOBAL_BATCH == 0


def job_arguments(
    checkpoints: Path, strategy: str, *options: str, epochs: int = EPOCHS
) -> list[str]:
    arguments = ["--nnodes", "1:3", "--strategy", strategy, "--checkpoint-dir", str(checkpoints)]
    arguments += ["--verify-replicas", "1", *options, str(SCRIPTS / "weightless.py")]
    return [*arguments, "--epochs", str(epochs)]


def missing(checkpoints: Path, epochs: int = EPOCHS) -> Tensor:
    """What neither was applied nor is left to be sent, of all samples' gradients."""
    state = elasticzero.checkpoint.load(checkpoints)
    left: Tensor = state["residual/w"].sum(0)
    assert left.any()
    exact = epochs * gradients().sum(0) / GLOBAL_BATCH
    difference: Tensor = exact + state["model/w"] - left
    return difference


def drain_and_join(told: Story) -> None:
    told.wait_for_step(6)
    with told.slowed(0.5):  # else training is over before they are there
        told.cluster.drain(told.node(1))
        told.wait_for_generation(2)
        told.wait_for_step(told.step + 3)
        told.cluster.start_node()
        told.wait_for_generation(3)
        told.wait_for_step(told.step + 3)


def lose_a_node(told: Story) -> None:
    told.wait_for_step(8)
    with told.slowed(0.5):
        told.cluster.kill_node(told.node(0))
        told.wait_for_first_step(2)


@dataclass
class Ended:
    """A job of three nodes that has ended."""

    told: Story
    codes: list[int]
    missing: Tensor


Train = Callable[..., Ended]
"""Runs a job through a change: the change, the strategy, then further options."""


@pytest.fixture
def train(tmp_path: Path, job: str, etcd: EtcdServer) -> Train:
    def run(change: Callable[[Story], None], strategy: str, *options: str) -> Ended:
        checkpoints = tmp_path / "checkpoints"
        arguments = job_arguments(checkpoints, strategy, *options)
        with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
            change(told)
            codes = told.wait_for_end()
        return Ended(told, sorted(codes.values()), missing(checkpoints))

    return run


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", ("--wire", "int8")),
        ("zero2", ("--wire", "int4")),
        slow("zero1", ("--wire", "fp8")),
        slow("ddp", ("--wire", "bf16")),
        slow("zero2", ("--wire", "topk:0.05")),
        ("zero1", ("--wire", "powersgd:2")),
        slow("ddp", ("--wire", "powersgd:2")),
        slow("zero1", ("--wire", "int8", "--shard", "node", "--nproc-per-node", "2")),
        ("ddp", ("--wire", "int8", "--changes-inside", "off")),
        slow("ddp", ("--wire", "powersgd:2", "--changes-inside", "off")),
        slow("zero1", ("--wire", "int8", "--changes-inside", "off")),
    ],
    ids=option_text,
)
def test_nodes_that_leave_and_come_lose_nothing(
    strategy: str, options: tuple[str, ...], train: Train
) -> None:
    ended = train(drain_and_join, strategy, *options)
    assert ended.codes == [0, 0, 0, 75], ended.told.logs()
    assert not ended.told.of("residual_lost")
    assert float(ended.missing.abs().max()) < 1e-9


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("zero1", ("--wire", "int8")),
        slow("zero2", ("--wire", "int4", "--snapshot-every", "3")),
        slow("zero1", ("--wire", "powersgd:2")),
    ],
    ids=option_text,
)
def test_a_snapshot_has_what_a_lost_node_had(
    strategy: str, options: tuple[str, ...], train: Train
) -> None:
    ended = train(lose_a_node, strategy, *options)
    assert ended.codes == [-9, 0, 0], ended.told.logs()
    assert not ended.told.of("residual_lost")
    assert float(ended.missing.abs().max()) < 1e-9


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", ("--wire", "int8")),
        slow("ddp", ("--wire", "int4", "--nproc-per-node", "2")),
        slow("ddp", ("--wire", "topk:0.05")),
        slow("ddp", ("--wire", "powersgd:2")),
        slow("zero1", ("--wire", "powersgd:2", "--redundancy", "mirror")),
        slow("zero2", ("--wire", "int8", "--redundancy", "mirror")),
        slow("zero1", ("--wire", "int8", "--shard", "node", "--nproc-per-node", "2")),
    ],
    ids=option_text,
)
def test_what_a_lost_node_had_is_said_where_no_step_is_made_again(
    strategy: str, options: tuple[str, ...], train: Train
) -> None:
    """Survivors keep what they have: no more is missing than the lost ranks had."""
    ended = train(lose_a_node, strategy, *options)
    assert ended.codes == [-9, 0, 0], ended.told.logs()
    (lost,) = ended.told.of("residual_lost")
    assert lost["ranks"] == (2 if "--nproc-per-node" in options else 1)
    assert 0 < float(torch.linalg.vector_norm(ended.missing)) < 3 * lost["norm"]
    assert f"(norm about {lost['norm']:.3g})" in ended.told.logs()


def test_a_job_that_goes_on_with_fewer_ranks_has_all_residuals(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """Also once the checkpoint is written anew for another number of ranks."""
    checkpoints, resharded = tmp_path / "checkpoints", tmp_path / "resharded"
    arguments = job_arguments(checkpoints, "zero1", "--wire", "int8", epochs=1)
    for directory in ("first", "second"):
        (tmp_path / directory).mkdir()
    with story(tmp_path / "first", etcd.endpoint, job, arguments, nodes=3) as told:
        assert set(told.wait_for_end().values()) == {0}
    assert elasticzero.checkpoint.load(checkpoints)["residual/w"].shape[0] == 3
    reshard = command("checkpoint", "reshard", str(checkpoints), str(resharded))
    subprocess.run([*reshard, "--world-size", "2"], check=True, capture_output=True)
    arguments = job_arguments(resharded, "ddp", "--wire", "int4", epochs=2)
    with story(tmp_path / "second", etcd.endpoint, f"{job}-2", arguments, nodes=2) as told:
        assert set(told.wait_for_end().values()) == {0}
    assert elasticzero.checkpoint.load(resharded)["residual/w"].shape[0] == 2
    assert float(missing(resharded, epochs=2).abs().max()) < 1e-9
