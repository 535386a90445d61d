"""Trains by a framework's script while a worker dies, then a node, another one joins and one is
drained, and compares with a process that nothing disturbs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import elasticzero.checkpoint
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import Story, story
from tests.unit.ops.trackers.test_tensorboard_run import points

RANKS = 3
IMPORTS = {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
"""Lets a script that Python runs by itself import its neighbours; an agent's workers can."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script that takes an output folder, --epochs, --pause and --global-batch."""

    script: Path
    samples: int
    epochs: int
    batch: int = 8
    """Samples of a step on each rank with which training begins."""
    arguments: Sequence[str] = ()
    curve: str = "loss"
    """Name under which the framework logs the loss."""
    logs_every: int = 1
    """Number of steps from one log to the next."""

    @property
    def steps_in_epoch(self) -> int:
        return -(-self.samples // (self.batch * RANKS))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Holds what a training came to."""

    weights: dict[str, Tensor]
    ended: dict[str, Any]
    """Figures that rank 0 prints at its end."""


def through_faults(
    case: Case, tmp_path: Path, etcd: EtcdServer, job: str, strategy: str
) -> Outcome:
    """Trains on three nodes, through the faults; checks that each sample is used once an epoch."""
    arguments = ["--nnodes", "2:3", "--strategy", strategy, "--lease-ttl", "2"]
    arguments += ["--checkpoint-dir", str(tmp_path / "c"), "--snapshot-every", "2"]
    arguments += ["--log-to", f"tensorboard:{tmp_path / 'curves'}"]
    arguments += [str(case.script), str(tmp_path / "out"), *case.arguments]
    arguments += ["--epochs", str(case.epochs), "--pause", "0.1"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=RANKS) as told:
        told.wait_for_step(4)
        told.cluster.kill_worker(told.node(0))
        told.wait_for_first_step(2)
        told.wait_for_step(case.steps_in_epoch + 3)  # in the second epoch
        told.cluster.kill_node(told.node(1))
        told.wait_for_first_step(3)
        told.pause(2.0)
        told.cluster.start_node()
        told.wait_for_first_step(4)
        told.pause(0.5)
        told.cluster.drain(told.node(2))
        told.wait_for_first_step(5)
        codes = told.wait_for_end()
        output = "".join(path.read_text() for path in told.directory().glob("*/0.log"))
    assert codes["node-0"] == codes["node-3"] == 0 and codes["node-1"] == -9
    check_samples(case, told)
    without = next(world for world in told.of("world") if "node-1" not in world["members"])
    check_curve(case, tmp_path / "curves" / job / "run-1", without["resume_step"])
    return Outcome(weights=weights(tmp_path / "c"), ended=ended(output))


def undisturbed(case: Case, tmp_path: Path) -> Outcome:
    """Trains on one process, with the same global batch."""
    command = [sys.executable, str(case.script), str(tmp_path / "alone"), *case.arguments]
    command += ["--epochs", str(case.epochs), "--global-batch", str(case.batch * RANKS)]
    done = subprocess.run(
        command,
        env=os.environ | IMPORTS | {"ELASTICZERO_CHECKPOINT_DIR": str(tmp_path / "c-alone")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Outcome(weights=weights(tmp_path / "c-alone"), ended=ended(done.stdout))


def weights(folder: Path) -> dict[str, Tensor]:
    state = elasticzero.checkpoint.load(folder)
    return {name: tensor for name, tensor in state.items() if name.startswith("model/")}


def ended(log: str) -> dict[str, Any]:
    (last_line,) = [line for line in log.splitlines() if line.startswith('{"ended"')]
    told: dict[str, Any] = json.loads(last_line)["ended"]
    return told


def check_samples(case: Case, told: Story) -> None:
    steps, count = told.committed(), case.steps_in_epoch
    assert sorted(steps) == list(range(1, case.epochs * count + 1))
    for epoch in range(case.epochs):
        of_epoch = range(epoch * count + 1, (epoch + 1) * count + 1)
        used = sorted(sample for step in of_epoch for sample in steps[step])
        assert used == list(range(case.samples))


def check_curve(case: Case, run: Path, killed_after: int) -> None:
    """Each step is in the curve once. Of the steps before a node was killed, the last ones may be
    missing: it had not handed them over."""
    steps = [step for _, step, _ in points(run, case.curve)]
    logged = range(case.logs_every, case.epochs * case.steps_in_epoch + 1, case.logs_every)
    assert steps == sorted(set(steps)) and set(steps) <= set(logged)
    assert len(steps) >= 0.7 * len(logged), steps
    missing = sorted(set(logged) - set(steps))
    until_killed = [step for step in logged if step <= killed_after]
    assert missing == until_killed[len(until_killed) - len(missing) :], (missing, killed_after)


def check_weights(outcome: Outcome, reference: Outcome, tolerance: float = 1e-9) -> None:
    assert outcome.weights.keys() == reference.weights.keys()
    for name, tensor in reference.weights.items():
        assert tensor.dtype == torch.float64
        assert (outcome.weights[name] - tensor).abs().max() < tolerance, name
