"""A job goes on from an import as the program that wrote it would have gone on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elasticzero.checkpoint.io.reader import open_step
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.data.position import MicroBatch
from elasticzero.snapshots import restore
from elasticzero.spans import STRATEGIES, Span
from tests.unit.checkpoint.convert.pickled.cases import opened, written
from tests.unit.state.test_state import Small, build

SAMPLES = torch.ones(2, 5)


def step_of_torch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(SAMPLES).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_the_next_step_is_that_of_the_program_that_saved(
    tmp_path: Path, strategy_name: str
) -> None:
    """The model has tied weights, and its optimizer two groups and a rate of its own."""
    torch.manual_seed(3)
    model = Small()

    def factory(parameters: Any) -> torch.optim.Optimizer:
        weights = [p for p in parameters if p.dim() > 1]
        rest = [p for p in parameters if p.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": weights, "weight_decay": 0.5},
            {"params": rest},
        ]
        return torch.optim.AdamW(groups)

    optimizer = factory(list(model.parameters()))
    optimizer.param_groups[0]["lr"] = 0.25
    for _ in range(3):
        step_of_torch(model, optimizer)
    model.get_buffer("mean").add_(0.5)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(saved, tmp_path / "t.pt")
    names = ("first.weight", "first.bias", "second.bias")
    step = written(opened(tmp_path / "t.pt", names=names), tmp_path / "run")

    strategy, small = build(strategy_name, factory)
    restore.restore_state(open_step(DiskStorage(step)), strategy, small, 0)
    assert torch.equal(small.buffers.saved()["mean"], model.get_buffer("mean"))
    strategy.expect(MicroBatch(positions=Span(0, 1), weight=1, last=True))
    strategy.backward(strategy.model(SAMPLES).square().mean(), 1.0)
    strategy.finish(1.0, None)
    strategy.apply()
    step_of_torch(model, optimizer)
    held = strategy.rank_state().held
    for name in names:
        expected = dict(model.named_parameters())[name].detach().reshape(-1)
        torch.testing.assert_close(held[f"model/{name}"].tensor.detach().reshape(-1), expected)
        average = optimizer.state[model.get_parameter(name)]["exp_avg"].reshape(-1)
        torch.testing.assert_close(held[f"optimizer/{name}/exp_avg"].tensor.reshape(-1), average)
    assert [group.options["lr"] for group in strategy.optimizers.groups] == [0.25, 1e-3]
