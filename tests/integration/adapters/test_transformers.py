"""The Trainer of transformers on real clusters: a killed worker, a killed node, a join and a drain
change neither the samples nor the weights."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.adapters.stories import (
    Case,
    check_weights,
    ended,
    through_faults,
    undisturbed,
)
from tests.integration.clusters import SCRIPTS, elasticzero


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "model", "tolerance"),
    [
        pytest.param("zero2", "gpt2", 1e-9, marks=pytest.mark.slow),
        pytest.param("zero3", "gpt2", 1e-9, marks=pytest.mark.slow),
        pytest.param("ddp", "llama", 1e-6, marks=pytest.mark.slow),  # computes in 32 bits in places
    ],
)
def test_faults_change_neither_samples_nor_weights(
    strategy: str, model: str, tolerance: float, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    script = SCRIPTS / "transformers_trainer.py"
    case = Case(script=script, samples=101, epochs=8, arguments=["--model", model], logs_every=2)
    outcome = through_faults(case, tmp_path, etcd, job, strategy)
    alone = undisturbed(case, tmp_path)
    check_weights(outcome, alone, tolerance)
    faulted, there = outcome.ended, alone.ended
    assert faulted["steps"] == there["steps"] == 40
    assert faulted["eval"] == pytest.approx(there["eval"], rel=1e-6)
    assert faulted["right"] == pytest.approx(there["right"])
    assert faulted["loss"] == pytest.approx(there["loss"], rel=1e-6)
    assert faulted["flos"] == pytest.approx(there["flos"], rel=0.1)  # but for what pads a batch
    assert faulted["each"] == [pytest.approx(figures, rel=1e-6) for figures in there["each"]]
    assert list(faulted["logged"]) == list(there["logged"])
    for step, figures in there["logged"].items():
        assert faulted["logged"][step] == pytest.approx(figures, rel=1e-5), step
    check_saved(tmp_path / "out", outcome.weights)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_each_rank_ends_with_the_whole_best_model(strategy: str, tmp_path: Path) -> None:
    arguments = ["--nproc-per-node=2", "--strategy", strategy, "--http-port=0", "--preemption=none"]
    arguments += ["--log-dir", str(tmp_path / "logs"), str(SCRIPTS / "transformers_trainer.py")]
    arguments += [str(tmp_path / "out"), "--best", "--epochs", "6"]
    done = subprocess.run(
        elasticzero("run", *arguments), capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "logs").glob("*/*/0.log")
    told = ended(log.read_text())
    assert len(told["each"]) == 5 and told["right"] == pytest.approx(
        max(r for r, _ in told["each"])
    )


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_generated_sequences_of_other_lengths_hold_no_rank_up(tmp_path: Path) -> None:
    """With zero3 a rank whose sequences have ended runs the model for the others, as long as there
    are others: after training each rank generates alone."""
    made = []
    for strategy in ("ddp", "zero3"):
        arguments = ["--nproc-per-node=2", "--strategy", strategy, "--http-port=0"]
        arguments += ["--preemption=none", "--log-dir", str(tmp_path / strategy)]
        arguments += [str(SCRIPTS / "generating_trainer.py"), str(tmp_path / "out")]
        done = subprocess.run(
            elasticzero("run", *arguments), capture_output=True, text=True, timeout=70, check=False
        )
        assert done.returncode == 0, done.stderr
        (log,) = (tmp_path / strategy).glob("*/*/0.log")
        lines = [ln for ln in log.read_text().splitlines() if ln.startswith(("[[", '{"after'))]
        made.append([json.loads(line) for line in lines])
    assert made[0] == made[1]
    series, after = made[1]
    assert len(series) == 3 and all(different > 3 for _, different in series)
    assert after["after"] == series[-1][0]


def check_saved(folder: Path, weights: dict[str, Tensor]) -> None:
    """The folders load by transformers: the last one, and the newest of those along the way."""
    names = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert names == ["checkpoint-30", "checkpoint-40"]
    assert not list(folder.glob(".*unfinished"))
    for at in (folder, folder / "checkpoint-40"):
        model = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float64)
        for name, tensor in model.state_dict().items():
            if f"model/{name}" in weights:
                assert torch.equal(tensor, weights[f"model/{name}"]), name
    state = json.loads((folder / "checkpoint-40" / "trainer_state.json").read_text())
    assert state["global_step"] == 40
