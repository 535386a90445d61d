"""A small model with an optimizer of torchao's, which packs the state of some parameters.

Argument: JSON with steps and optimizer, and at will strategy, virtual (samples of a slice) and
pause (seconds a step). With out, a plain loop of torch's writes its weights and the optimizer's
state there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torchao.optim
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import elasticzero as ez
from elasticzero.parallel.optimizers.state import stored_state

SAMPLES, BATCH = 48, 12


class Model(nn.Module):
    """Two of its parameters have 4096 elements, from which on torchao packs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.out = nn.Linear(64, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return output


def model_of(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 64, generator=generator)
    return TensorDataset(x, torch.sin(x[:, :4] * 2))


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torchao.optim, name)(parameters, lr=0.01)
    return made


def schedule_of(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, step_size=7, gamma=0.7)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def train(session: ez.Session, told: dict[str, Any]) -> None:
    model, optimizer = session.prepare(
        model_of(1 if session.generation == 1 else 100 + session.rank),
        lambda parameters: optimizer_of(told["optimizer"], parameters),
        strategy=told.get("strategy"),
    )
    scheduler = session.track("scheduler", schedule_of(optimizer))
    session.restore()
    options = {"virtual_batch": told["virtual"]} if "virtual" in told else {}
    for x, y in session.batches(
        dataset(), global_batch=BATCH, steps=told["steps"], shuffle=False, **options
    ):
        session.backward(loss_of(model, x, y))
        if session.step(max_grad_norm=told.get("clip")):
            scheduler.step()
            time.sleep(told.get("pause", 0.0))


def plain(told: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the weights and the state after a loop without any of this project's training code.

    The gradient of a global batch is the sum of the halves', as that of two ranks is.
    """
    model = model_of(1)
    optimizer = optimizer_of(told["optimizer"], model.parameters())
    scheduler = schedule_of(optimizer)
    x, y = dataset().tensors
    for step in range(told["steps"]):
        first = step * BATCH % SAMPLES
        for start in (first, first + BATCH // 2):
            part = slice(start, start + BATCH // 2)
            (loss_of(model, x[part], y[part]) * 0.5).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    state = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        kept = stored_state(optimizer.state[parameter])
        state |= {f"optimizer/{name}/{key}": tensor for key, tensor in kept.items()}
    return state


def main(told: dict[str, Any]) -> None:
    if "out" in told:
        save_file(plain(told), Path(told["out"]))
    else:
        ez.run(lambda session: train(session, told))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
