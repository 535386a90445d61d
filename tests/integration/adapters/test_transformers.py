"""The Trainer of transformers on real clusters: a killed worker, a killed node, a join and a drain
change neither the samples nor the weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import elasticzero.checkpoint
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import SCRIPTS, Story, story

SCRIPT = SCRIPTS / "transformers_trainer.py"
SAMPLES, EPOCHS, STEPS_IN_EPOCH = 101, 8, 5
WORLD_BATCH = 24
"""What 4 samples a device and 2 accumulated batches make of 3 ranks."""


def weights(folder: Path) -> dict[str, Tensor]:
    found = elasticzero.checkpoint.load(folder)
    return {name: tensor for name, tensor in found.items() if name.startswith("model/")}


def undisturbed(tmp_path: Path, model: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Final weights of one process that nothing disturbs, and what it says at its end."""
    words = [sys.executable, str(SCRIPT), str(tmp_path / "alone"), "--model", model]
    words += ["--epochs", str(EPOCHS)]
    done = subprocess.run(
        [*words, "--global-batch", str(WORLD_BATCH)],
        env=os.environ | {"ELASTICZERO_CHECKPOINT_DIR": str(tmp_path / "c-alone")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return weights(tmp_path / "c-alone"), ended(done.stdout)


def ended(said: str) -> dict[str, Any]:
    (found,) = [line for line in said.splitlines() if line.startswith('{"ended"')]
    told: dict[str, Any] = json.loads(found)["ended"]
    return told


def check_samples(told: Story) -> None:
    steps = told.committed()
    assert sorted(steps) == list(range(1, EPOCHS * STEPS_IN_EPOCH + 1))
    for epoch in range(EPOCHS):
        of_epoch = range(epoch * STEPS_IN_EPOCH + 1, (epoch + 1) * STEPS_IN_EPOCH + 1)
        assert sorted(s for step in of_epoch for s in steps[step]) == list(range(SAMPLES))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "model", "tolerance"),
    [
        ("zero2", "gpt2", 1e-9),
        pytest.param("zero3", "gpt2", 1e-9, marks=pytest.mark.slow),
        pytest.param("ddp", "llama", 1e-6, marks=pytest.mark.slow),  # computes in 32 bits in places
    ],
)
def test_faults_change_neither_samples_nor_weights(
    strategy: str, model: str, tolerance: float, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    words = ["--nnodes", "2:3", "--strategy", strategy, "--settle", "2", "--lease-ttl", "2"]
    words += ["--checkpoint-dir", str(tmp_path / "c"), "--snapshot-every", "2"]
    words += [
        str(SCRIPT),
        str(tmp_path / "out"),
        "--model",
        model,
        "--epochs",
        str(EPOCHS),
        "--pause",
        "0.1",
    ]
    with story(tmp_path, etcd.endpoint, job, words, nodes=3) as told:
        told.wait_for_step(4)
        told.cluster.kill_worker(told.node(0))
        told.wait_for_first_step(2)
        told.wait_for_step(told.step + 3)
        told.cluster.kill_node(told.node(1))
        told.wait_for_first_step(3)
        told.pause(0.5)
        told.cluster.start_node()
        told.wait_for_first_step(4)
        told.cluster.drain(told.node(2))
        told.wait_for_first_step(5)
        codes = told.wait_for_end()
        said = "".join(path.read_text() for path in told.directory().glob("*/0.log"))
    assert codes["node-0"] == codes["node-3"] == 0 and codes["node-1"] == -9
    check_samples(told)
    expected, alone = undisturbed(tmp_path, model)
    found = weights(tmp_path / "c")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == torch.float64
        assert (found[name] - tensor).abs().max() < tolerance, name
    here = ended(said)
    assert here["steps"] == alone["steps"] == EPOCHS * STEPS_IN_EPOCH
    assert here["eval"] == pytest.approx(alone["eval"], rel=1e-6)
    assert here["right"] == pytest.approx(alone["right"])
    assert here["loss"] == pytest.approx(alone["loss"], rel=0.02)
    assert here["logged"] == sorted(set(here["logged"]))
    check_saved(tmp_path / "out", found)


def check_saved(folder: Path, found: dict[str, Tensor]) -> None:
    """The folders load by transformers: the last one, and the newest of those along the way."""
    from transformers import AutoModelForCausalLM

    names = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert names == ["checkpoint-30", "checkpoint-40"]
    assert not list(folder.glob(".*unfinished"))
    for at in (folder, folder / "checkpoint-40"):
        model = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float64)
        for name, tensor in model.state_dict().items():
            if f"model/{name}" in found:
                assert torch.equal(tensor, found[f"model/{name}"]), name
    state = json.loads((folder / "checkpoint-40" / "trainer_state.json").read_text())
    assert state["global_step"] == 40
