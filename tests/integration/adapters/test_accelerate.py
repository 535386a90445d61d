"""A loop of accelerate on real clusters: a killed worker, a killed node, a join and a drain change
neither the samples nor the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.adapters.stories import Case, check_weights, through_faults, undisturbed
from tests.integration.clusters import SCRIPTS
from tests.integration.scripts import regression


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["zero2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_faults_change_neither_samples_nor_weights(
    strategy: str, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    case = Case(script=SCRIPTS / "accelerate_loop.py", samples=regression.SAMPLES, epochs=4)
    outcome = through_faults(case, tmp_path, etcd, job, strategy)
    alone = undisturbed(case, tmp_path)
    check_weights(outcome, alone)
    faulted, there = outcome.ended, alone.ended
    for name in ("steps", "samples", "lr"):
        assert faulted[name] == there[name], name
    assert faulted["samples"] == 31
    for name in ("mean", "after"):
        assert faulted[name] == pytest.approx(there[name], rel=1e-9), name
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert {f"model/{name}" for name in saved} == outcome.weights.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, outcome.weights[f"model/{name}"]), name
