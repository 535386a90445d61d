"""Trains a model whose parameters the script changes within each step, before the optimizer's.

Argument: JSON with strategy and steps, and at will fail ([rank, step]): that rank raises an error
in the step after this one, once it has made its changes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import elasticzero as ez

SAMPLES, GLOBAL_BATCH = 48, 6


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=drawn, dtype=torch.float64)


class Follower(nn.Module):
    """Has a frozen encoder, which follows the trained one in each forward if it is told to."""

    def __init__(self, *, follows: bool) -> None:
        super().__init__()
        self.follows = follows
        self.trained, self.frozen = (nn.Linear(4, 5, dtype=torch.float64) for _ in range(2))
        self.leave = nn.Linear(5, 1, dtype=torch.float64)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.follows and self.training:
            with torch.no_grad():
                self.frozen.weight.lerp_(self.trained.weight, 0.25)
        output: Tensor = self.leave(torch.tanh(self.trained(x)) + torch.sin(self.frozen(x)))
        return output


def model_of(strategy: str) -> Follower:
    torch.manual_seed(4)
    return Follower(follows=strategy != "zero3")


def change(model: Follower, strategy: str) -> None:
    """Changes parameters so that torch counts it, and, but for zero3, so that it does not."""
    with torch.no_grad():
        model.leave.weight.mul_(0.875)
        model.frozen.bias.add_(0.125)
    if strategy != "zero3":
        model.trained.bias.data.mul_(0.75)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x).squeeze(1) - x.sum(1).sin()).square().mean()
    return loss


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0625, momentum=0.5)


def plain(strategy: str, steps: int) -> dict[str, Tensor]:
    """The weights of one process in plain torch."""
    model, samples = model_of(strategy), Samples()
    optimizer = optimizer_of([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        change(model, strategy)
        first = step * GLOBAL_BATCH % SAMPLES
        x = torch.stack([samples[index] for index in range(first, first + GLOBAL_BATCH)])
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
    return {f"model/{name}": tensor for name, tensor in model.state_dict().items()}


def train(session: ez.Session, told: dict[str, Any]) -> None:
    strategy = told["strategy"]
    made = model_of(strategy)
    model, _ = session.prepare(made, optimizer_of, strategy=strategy)
    session.restore()
    for x in session.batches(
        Samples(), global_batch=GLOBAL_BATCH, steps=told["steps"], shuffle=False
    ):
        change(made, strategy)
        loss = loss_of(model, x)
        if told.get("fail") == [session.rank, session.step_count]:
            raise ZeroDivisionError("asked for by the test")
        session.backward(loss)
        session.step()


if __name__ == "__main__":
    ez.run(lambda session: train(session, json.loads(sys.argv[1])))
