"""A small double-precision model whose layers run in an order of their own.

Argument: JSON with strategy and steps.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import elasticzero as ez

SAMPLES = 24
RUNS = (2, 0, 3, 1)
"""The layers in the order in which they run."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in RUNS)

    def forward(self, x: Tensor) -> Tensor:
        for number in RUNS:
            x = torch.tanh(self.layers[number](x))
        return x


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - torch.sin(x)).square().mean()
    return loss


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def train(session: ez.Session, told: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model, _ = session.prepare(Model().double(), optimizer, strategy=told["strategy"])
    session.restore()
    for x in session.batches(Samples(), global_batch=6, steps=told["steps"], shuffle=False):
        session.backward(loss_of(model, x))
        session.step()


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    ez.run(lambda session: train(session, told))
