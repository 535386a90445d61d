"""Streams on real clusters, through faults: each sample once by the workers' own account, and the
weights of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import elasticzero.checkpoint
from elasticzero.launcher.local.cluster import Placement, on_loopback
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.processes import descendants
from tests.integration.clusters import SCRIPTS, Story, story, traces_in
from tests.integration.scripts import regression

SCRIPT = SCRIPTS / "streams.py"
EPOCHS = 3


def check_samples(told: Story) -> None:
    """Each committed step has the samples that all its ranks together have written down."""
    steps: dict[tuple[int, int], list[int]] = {}
    for generation, step, samples in traces_in(told.directory()):
        if told.lineage.is_committed(generation, step):
            steps.setdefault((step, generation), []).extend(samples)
    assert [step for step, _ in sorted(steps)] == list(range(1, len(steps) + 1))
    used = [sample for at in sorted(steps) for sample in steps[at]]
    for epoch in range(EPOCHS):
        of_epoch = used[epoch * regression.SAMPLES : (epoch + 1) * regression.SAMPLES]
        assert sorted(of_epoch) == list(range(regression.SAMPLES))
    assert len(used) == EPOCHS * regression.SAMPLES


def undisturbed(folder: Path, kind: str) -> dict[str, Tensor]:
    """Final weights of one process that nothing disturbs and that loads its data itself."""
    environment = os.environ | {"ELASTICZERO_CHECKPOINT_DIR": str(folder)}
    command = [sys.executable, str(SCRIPT), kind, "--workers", "0", "--epochs", str(EPOCHS)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return weights(folder)


def weights(folder: Path) -> dict[str, Tensor]:
    state = elasticzero.checkpoint.load(folder)
    return {name: tensor for name, tensor in state.items() if name.startswith("model/")}


def check_evaluation(told: Story, expected: dict[str, Tensor]) -> None:
    """All ranks of the last world print the mean loss over the whole dataset."""
    model = regression.network()
    model.load_state_dict({name.removeprefix("model/"): t for name, t in expected.items()})
    x, y = regression.dataset().tensors
    with torch.no_grad():
        mean = regression.loss_of(model(x), y).item()
    logs = [path.read_text() for path in told.directory().glob("*/0.log")]
    lines = [line for log in logs for line in log.splitlines()]
    losses = [json.loads(line)["loss"] for line in lines if line.startswith('{"loss"')]
    assert len(losses) == 3 and len(set(losses)) == 1
    assert losses[0] == pytest.approx(mean, rel=1e-9)


def train(
    tmp_path: Path,
    etcd: EtcdServer,
    job: str,
    kind: str,
    arguments: Sequence[str],
    place: Callable[[str], Placement] = on_loopback,
) -> Story:
    """Trains while a worker dies, then a node, and another one joins."""
    options = ["--nnodes", "2:3", "--strategy", "zero2", "--lease-ttl", "2"]
    options += ["--checkpoint-dir", str(tmp_path / "c"), "--snapshot-every", "4"]
    options += [str(SCRIPT), kind, "--epochs", str(EPOCHS), "--pause", "0.05", *arguments]
    with story(tmp_path, etcd.endpoint, job, options, nodes=3, place=place) as told:
        told.wait_for_step(8)
        if kind == "iterable":  # of which a process that loads data dies, in place of a worker
            (worker, *_) = told.cluster.workers_of(told.node(0))
            os.kill(min(descendants(worker)), signal.SIGKILL)
        else:
            told.cluster.kill_worker(told.node(0))
        told.wait_for_first_step(2)
        told.wait_for_step(told.step + 5)
        told.cluster.kill_node(told.node(1))
        told.wait_for_first_step(3)
        told.pause(0.3)
        told.cluster.start_node()
        told.wait_for_first_step(4)
        told.pause(0.0)
        codes = told.wait_for_end()
    assert codes == {"node-0": 0, "node-1": -9, "node-2": 0, "node-3": 0}
    return told


def check_training(told: Story, folder: Path, kind: str) -> None:
    """Each sample was used once, and the weights are those of an undisturbed run."""
    check_samples(told)
    expected, trained = undisturbed(folder / "alone", kind), weights(folder / "c")
    assert trained.keys() == expected.keys()
    check_evaluation(told, expected)
    for name, tensor in expected.items():
        assert tensor.dtype == torch.float64
        assert (trained[name] - tensor).abs().max() < 1e-9, name


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("seeks", ["--workers", "2"]),
        pytest.param("skips", ["--workers", "2", "--collate"], marks=pytest.mark.slow),
        pytest.param("workers", ["--workers", "1", "--micro-batch", "2"], marks=pytest.mark.slow),
        pytest.param("iterable", ["--workers", "2"], marks=pytest.mark.slow),
        pytest.param("seeks", ["--workers", "0"], marks=pytest.mark.slow),
    ],
)
def test_each_sample_of_a_stream_is_used_once(
    kind: str, arguments: list[str], tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    check_training(train(tmp_path, etcd, job, kind, arguments), tmp_path, kind)
