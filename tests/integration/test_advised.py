"""A script that does what the sentence of a refusal advises trains as in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.ipc.failure import Failed
from tests.integration import training_advised as advised
from tests.integration.training_harness import Pool
from tests.integration.training_parameters import GLOBAL_BATCH, SAMPLES, Samples
from tests.support.cases import slow

SCRIPT = Path(__file__).parent / "training_advised.py"
WORLDS = {2: 2, 3: 5, 1: 8}
"""Number of ranks, and the step up to which they train; an epoch has five."""


def expected(kind: str) -> dict[str, Tensor]:
    """The weights of one process that takes each global batch whole."""
    model = advised.model_of()
    optimizer, samples = advised.optimizer_of(model.parameters()), Samples()
    batches = [range(at, min(at + GLOBAL_BATCH, SAMPLES)) for at in range(0, SAMPLES, GLOBAL_BATCH)]
    for step in range(max(WORLDS.values())):
        chosen = [samples[i] for i in batches[step % len(batches)]]
        batch = {key: torch.stack([sample[key] for sample in chosen]) for key in chosen[0]}
        if kind == "thawed":
            model.first.requires_grad_(step >= advised.THAWED_AT)
        optimizer.zero_grad()
        advised.LOSSES[kind](model, batch, None).backward()
        optimizer.step()
    return {f"model/{name}": tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *(("sharpness", "ddp"), slow("sharpness", "zero1"), ("sharpness", "zero2")),
        *(slow("words", "ddp"), ("words", "zero1"), slow("words", "zero2")),
        *(slow("inputs", "ddp"), slow("inputs", "zero1"), ("inputs", "zero3")),
        *(slow("both", "ddp"), slow("both", "zero2"), ("both", "zero3")),
        *(slow("accumulated", "ddp"), slow("accumulated", "zero1"), slow("accumulated", "zero3")),
        *(("thawed", "ddp"), slow("thawed", "zero1"), ("thawed", "zero2"), ("thawed", "zero3")),
    ],
)
def test_what_a_sentence_advises_is_exact(
    pool: Pool, tmp_path: Path, kind: str, strategy: str
) -> None:
    told = {"kind": kind, "strategy": strategy}
    pool.train_through(SCRIPT, tmp_path, [(n, told | {"steps": s}) for n, s in WORLDS.items()])
    stored = ez_checkpoint.load(tmp_path)
    for name, tensor in expected(kind).items():
        torch.testing.assert_close(stored[name], tensor, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "strategy", "advice"),
    [
        ("words", "ddp", "is taken by torch.autograd.grad"),
        slow("words", "zero3", "is taken by torch.autograd.grad"),
        ("accumulated", "ddp", "micro_batch=, and divide no loss"),
        slow("accumulated", "zero3", "micro_batch=, and divide no loss"),
        slow("thawed", "ddp", "is frozen after it by requires_grad_(False)"),
        ("thawed", "zero3", "is frozen after it by requires_grad_(False)"),
    ],
)
def test_a_refusal_advises_it(
    pool: Pool, tmp_path: Path, kind: str, strategy: str, advice: str
) -> None:
    told = {"kind": kind, "strategy": strategy, "steps": 6, "wrong": True}
    running = pool.start(SCRIPT, [json.dumps(told)], 2, checkpoint_dir=str(tmp_path))
    running.until(running.ended)
    failures = [failed for worker in running.workers for failed in worker.all(Failed)]
    assert any(advice in failed.message for failed in failures if failed.final), running.logs()
