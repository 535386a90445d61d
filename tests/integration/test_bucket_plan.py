"""Buckets that are filled in the order in which gradients come, of a size that was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import elasticzero.checkpoint as ez_checkpoint
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.urls import open_directory
from tests.integration import training_buckets
from tests.integration.training_harness import Pool, Running

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "training_buckets.py"
WORLDS = ((2, 5), (3, 9), (2, 14))
"""Ranks, and the step at which each world ends."""
RAN_LAST_FIRST = [
    f"layers.{number}.{kind}"
    for number in reversed(training_buckets.RUNS)
    for kind in ("bias", "weight")
]


def plain(steps: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = training_buckets.Model().double()
    optimizer = training_buckets.optimizer(model.parameters())
    samples = training_buckets.Samples()
    for step in range(steps):
        x = torch.stack([samples[(step * 6 + i) % len(samples)] for i in range(6)])
        training_buckets.loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model/" + name: tensor for name, tensor in model.state_dict().items()}


def manifest_of(folder: Path, step: int) -> Manifest:
    return catalog.read_manifest(open_directory(str(folder)).step(step_directory(step)))


def filled(manifest: Manifest) -> list[str]:
    """The names in the buckets, in their order in them."""
    groups = [group for group in manifest.layout.groups if group.rule == "even"]
    names = [name for group in groups for name in group.tensors if name.startswith("model/")]
    return [name.removeprefix("model/") for name in names]


def check_weights(folder: Path) -> None:
    state = ez_checkpoint.load(folder)
    for name, tensor in plain(WORLDS[-1][1]).items():
        assert (state[name] - tensor).abs().max().item() < 1e-9, name


def run(pool: Pool, folder: Path, strategy: str, **options: object) -> list[Running]:
    worlds = [(ranks, {"strategy": strategy, "steps": steps}) for ranks, steps in WORLDS]
    return pool.train_through(SCRIPT, folder, worlds, **options)


@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("zero1", marks=pytest.mark.slow), "zero2"]
)
def test_the_order_of_gradients_is_found_once_and_used_next(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    run(pool, tmp_path, strategy)
    names = [name for name, _ in training_buckets.Model().named_parameters()]
    first, *later = [manifest_of(tmp_path, steps) for _, steps in WORLDS]
    orders = [manifest.state["buckets"]["order"] for manifest in (first, *later)]
    assert [[names[number] for number in order] for order in orders] == [RAN_LAST_FIRST] * 3
    if strategy != "ddp":
        assert filled(first) == list(reversed(names))
        assert [filled(manifest) for manifest in later] == [RAN_LAST_FIRST] * 2
    check_weights(tmp_path)


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "zero1"])
def test_a_size_is_measured_once_in_a_job(pool: Pool, tmp_path: Path, strategy: str) -> None:
    worlds = run(pool, tmp_path, strategy, bucket_bytes="auto")
    sizes = [manifest_of(tmp_path, steps).state["buckets"]["size_bytes"] for _, steps in WORLDS]
    assert sizes == sizes[:1] * 3
    assert sizes[0] % (1 << 20) == 0 < sizes[0]
    measured = [
        "--bucket-bytes auto takes" in worker.log.read_text()
        for running in worlds
        for worker in running.workers
    ]
    assert measured == [True] + [False] * 6
    check_weights(tmp_path)


def test_a_size_that_is_given_is_used_and_not_stored(pool: Pool, tmp_path: Path) -> None:
    run(pool, tmp_path, "zero2", bucket_bytes=400)
    for _, steps in WORLDS:
        manifest = manifest_of(tmp_path, steps)
        groups = [g.tensors for g in manifest.layout.groups if g.tensors[0].startswith("model/")]
        sizes = [sum(manifest.layout.tensors[n].nbytes for n in names) for names in groups]
        assert len(sizes) == 4
        assert manifest.state["buckets"]["size_bytes"] is None
    check_weights(tmp_path)
