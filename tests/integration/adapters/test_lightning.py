"""Lightning's Trainer on real clusters: a killed worker, a killed node, a join and a drain change
neither the samples nor the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.adapters.stories import Case, check_weights, through_faults, undisturbed
from tests.integration.clusters import SCRIPTS
from tests.integration.scripts import regression


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_faults_change_neither_samples_nor_weights(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    case = Case(
        script=SCRIPTS / "lightning_trainer.py",
        samples=regression.SAMPLES,
        epochs=4,
        curve="train_loss_step",
    )
    outcome = through_faults(case, tmp_path, etcd, job, strategy)
    alone = undisturbed(case, tmp_path)
    check_weights(outcome, alone)
    faulted, there = outcome.ended, alone.ended
    for name in ("steps", "epoch", "waited"):
        assert faulted[name] == there[name], name
    for name in ("val_loss", "best", "after"):
        assert faulted[name] == pytest.approx(there[name], rel=1e-6), name
    check_saved(Path(faulted["path"]), outcome.weights)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_faults_do_not_change_an_average_of_the_weights(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """The callback puts it in the weights' place at the end; it keeps it by hooks of checkpoints,
    which were not called."""
    case = Case(
        script=SCRIPTS / "lightning_trainer.py",
        samples=regression.SAMPLES,
        epochs=4,
        curve="train_loss_step",
        arguments=["--average"],
    )
    outcome = through_faults(case, tmp_path, etcd, job, strategy)
    check_weights(outcome, undisturbed(case, tmp_path))


def check_saved(path: Path, weights: dict[str, Tensor]) -> None:
    """The files of ModelCheckpoint have the whole model."""
    names = {name.removeprefix("model/") for name in weights}
    states = [torch.load(at, weights_only=False) for at in (path, path.with_name("last.ckpt"))]
    assert all(state["state_dict"].keys() == names for state in states)
    for name in names:
        assert torch.equal(states[1]["state_dict"][name], weights[f"model/{name}"]), name
