"""The Trainer of transformers on real clusters: a killed worker, a killed node, a join and a drain
change neither the samples nor the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.adapters.stories import Case, check_weights, through_faults, undisturbed
from tests.integration.clusters import SCRIPTS


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
    script = SCRIPTS / "transformers_trainer.py"
    case = Case(script=script, samples=101, epochs=8, words=["--model", model])
    found = through_faults(case, tmp_path, etcd, job, strategy)
    alone = undisturbed(case, tmp_path)
    check_weights(found, alone, tolerance)
    here, there = found.ended, alone.ended
    assert here["steps"] == there["steps"] == 40
    assert here["eval"] == pytest.approx(there["eval"], rel=1e-6)
    assert here["right"] == pytest.approx(there["right"])
    assert here["loss"] == pytest.approx(there["loss"], rel=0.02)  # but for steps done again
    assert here["logged"] == sorted(set(here["logged"]))
    check_saved(tmp_path / "out", found.weights)


def check_saved(folder: Path, found: dict[str, Tensor]) -> None:
    """The folders load by transformers: the last one, and the newest of those along the way."""
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
