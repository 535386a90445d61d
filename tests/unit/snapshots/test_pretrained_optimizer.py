"""Optimizers begin with the state that another program has saved, by number or by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from elasticzero.data.position import MicroBatch
from elasticzero.errors import UserError
from elasticzero.ipc.agent_client import STANDALONE, AgentClient
from elasticzero.parallel import Strategy
from elasticzero.snapshots.pretrained.model import Pretrained
from elasticzero.snapshots.pretrained.optimizer import PretrainedOptimizer
from elasticzero.spans import STRATEGIES, Span
from tests.unit.state.test_state import Small, build

LINK = AgentClient(None, STANDALONE)
SAMPLES = torch.ones(2, 5, dtype=torch.float64)


class Strange:
    """Stands for a class of the program that saved."""


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    weights = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": 0.5}, {"params": rest}]
    return torch.optim.AdamW(groups, amsgrad=True)


def step_of_torch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(SAMPLES).square().mean().backward()
    optimizer.step()


def trained(factory: Any = in_groups) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Small().double()
    optimizer = factory(list(model.parameters()))
    optimizer.param_groups[0]["lr"] = 0.25
    for _ in range(3):
        step_of_torch(model, optimizer)
    return model, optimizer


def written(form: str, folder: Path, model: nn.Module, optimizer: Any) -> Path:
    state = optimizer.state_dict()
    if form == "trainer":
        save_model(model, str(folder / "model.safetensors"))
        torch.save(state, folder / "optimizer.pt")
        return folder
    file = folder / ("last.ckpt" if form == "lightning" else "epoch3.pt")
    if form == "lightning":
        weights = {f"net.{name}": tensor for name, tensor in model.state_dict().items()}
        torch.save(
            {"state_dict": weights, "optimizer_states": [state], "hyper_parameters": Strange()},
            file,
        )
    else:
        torch.save({"model": model.state_dict(), "optimizer": state}, file)
    return file


def started(where: Path, name: str, factory: Any = in_groups) -> Strategy:
    """The model and optimizer after `prepare` and `restore`."""

    class Filled(Small):
        def __init__(self) -> None:
            super().__init__()
            self.double()
            self.stored = Pretrained(self, where, LINK, with_optimizer=True)
            for tensor in (*self.parameters(), *self.buffers()):
                if self.stored.has(tensor):
                    self.stored.fill(tensor)

    strategy, small = build(name, factory, torch.float64, Filled)
    stored: Any = strategy.model.stored
    PretrainedOptimizer(stored, strategy.optimizers, LINK, None).load(strategy, small)
    return strategy


@pytest.mark.parametrize("form", ["torch", "lightning", "trainer"])
@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_the_next_step_is_that_of_the_program_that_saved(
    tmp_path: Path, strategy_name: str, form: str
) -> None:
    """The model has tied weights, and its optimizer two groups and a rate of its own."""
    model, optimizer = trained()
    strategy = started(written(form, tmp_path, model, optimizer), strategy_name)
    assert [group.options["lr"] for group in strategy.optimizers.groups] == [0.25, 1e-3]
    strategy.expect(MicroBatch(positions=Span(0, 1), weight=1, last=True))
    strategy.backward(strategy.model(SAMPLES).square().mean(), 1.0)
    strategy.finish(1.0, None)
    strategy.apply()
    strategy.settle()
    step_of_torch(model, optimizer)
    held = strategy.rank_state().held
    for name, parameter in model.named_parameters():
        expected = {"model/{}": parameter.detach()}
        expected |= {f"optimizer/{{}}/{k}": t for k, t in optimizer.state[parameter].items()}
        for full, tensor in expected.items():
            ours = held[full.format(name)].tensor.detach().reshape(-1)
            torch.testing.assert_close(ours, tensor.reshape(-1), rtol=1e-12, atol=1e-12)


def test_other_groups_are_refused_with_both_sizes(tmp_path: Path) -> None:
    where = written("torch", tmp_path, *trained())
    with pytest.raises(
        UserError, match=r"groups of \[1, 2\] parameters, and the script's of \[3\]"
    ):
        started(where, "ddp", torch.optim.AdamW)


def test_another_order_is_refused_by_a_shape(tmp_path: Path) -> None:
    where = written("torch", tmp_path, *trained(torch.optim.AdamW))
    with pytest.raises(UserError, match="the names are in another order"):
        started(where, "ddp", lambda parameters: torch.optim.AdamW(list(parameters)[::-1]))


def test_an_optimizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    where = written("torch", tmp_path, *trained(torch.optim.AdamW))
    for strategy in ("ddp", "zero1"):
        with pytest.raises(UserError, match="the files were written with another optimizer"):
            started(where, strategy, lambda p: torch.optim.SGD(p, momentum=0.9, lr=0.1))


def test_files_without_an_optimizer_are_refused(tmp_path: Path) -> None:
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    save_model(model, str(tmp_path / "model.safetensors"))
    for where in (tmp_path / "model.pt", tmp_path):
        with pytest.raises(UserError, match="the files have no optimizer"):
            started(where, "ddp")


def test_an_unknown_class_in_the_optimizer_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = optimizer.state_dict()
    state["state"][0]["odd"] = Strange()
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "epoch3.pt")
    with pytest.raises(UserError, match="Strange"):
        started(tmp_path / "epoch3.pt", "ddp")
