"""Observers of quantization-aware training see a rank's samples, and rank 0's buffers count."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from elasticzero import checkpoint as ez_checkpoint
from tests.integration import training_observers as observed
from tests.integration.training_harness import Pool
from tests.integration.training_parameters import GLOBAL_BATCH, SAMPLES, Samples
from tests.support.cases import slow

SCRIPT = Path(__file__).parent / "training_observers.py"
WORLDS = {2: 3, 1: 7}
"""Number of ranks, and the step up to which they train; an epoch has five."""


def cloned(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a copy; a histogram makes the very tensors that it loads its own, and fills them."""
    return {name: tensor.clone() for name, tensor in state.items()}


def expected(kind: str) -> dict[str, Tensor]:
    """Returns the state of plain torch whose observers see each rank's samples."""
    model, samples = observed.model_of(kind), Samples()
    optimizer = observed.optimizer_of(model.parameters())
    batches = [range(at, min(at + GLOBAL_BATCH, SAMPLES)) for at in range(0, SAMPLES, GLOBAL_BATCH)]
    for step in range(max(WORLDS.values())):
        ranks = next(ranks for ranks, until in WORLDS.items() if step < until)
        chosen = batches[step % len(batches)]
        optimizer.zero_grad()
        before = cloned(model.state_dict())
        first: dict[str, Tensor] = {}
        for rank in range(ranks):
            model.load_state_dict(cloned(before))
            part = [
                samples[i] for i in chosen[rank * len(chosen) // ranks :][: len(chosen) // ranks]
            ]
            batch = {key: torch.stack([sample[key] for sample in part]) for key in part[0]}
            (observed.loss_of(model, batch) / ranks).backward()
            first = first or cloned(model.state_dict())
        model.load_state_dict(first)
        optimizer.step()
    return {f"model/{name}": tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *(("channels", "ddp"), slow("channels", "zero3")),
        *(slow("moving average", "ddp"), ("moving average", "zero2")),
        slow("histogram", "ddp"),
    ],
)
def test_observers_are_those_of_rank_0(
    pool: Pool, tmp_path: Path, kind: str, strategy: str
) -> None:
    told = {"kind": kind, "strategy": strategy}
    pool.train_through(SCRIPT, tmp_path, [(n, told | {"steps": s}) for n, s in WORLDS.items()])
    stored = ez_checkpoint.load(tmp_path)
    for name, tensor in expected(kind).items():
        torch.testing.assert_close(stored[name], tensor, rtol=0, atol=1e-6)
