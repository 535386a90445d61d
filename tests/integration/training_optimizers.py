"""A small double-precision model, trained with Muon for its matrices and AdamW for the rest.

Argument: JSON with strategy and steps, and at will micro, clip, bucket_bytes, and keepers, which is
true for optimizers that keep other kinds of state.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset

import elasticzero as ez
from elasticzero.parallel.buckets import layout
from tests.support.kept_state import WHOLE

SAMPLES = 40


class Model(nn.Module):
    """Matrices of several sizes, in no order of size, and other parameters."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(6, 9), (9, 4), (4, 11), (11, 5)]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in sizes)
        self.out = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        output: Tensor = self.out(x) * self.scale
        return output


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator, dtype=torch.float64)
        return {"x": x, "y": torch.sin(3 * x[:3])}


def optimizers(parameters: list[nn.Parameter]) -> dict[str, torch.optim.Optimizer]:
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    return {
        "muon": torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
        "adamw": torch.optim.AdamW(others, lr=0.01),
    }


def keepers(parameters: list[nn.Parameter]) -> dict[str, torch.optim.Optimizer]:
    """Optimizers of several kinds of state, each with a layer or two."""
    kinds = ("lists", "trees", "counting", "slow")
    made = {
        kind: WHOLE[kind](parameters[1 + 2 * index : 3 + 2 * index])
        for index, kind in enumerate(kinds)
    }
    return made | {"global": WHOLE["global"]([parameters[0], *parameters[9:]])}


def schedulers(made: dict[str, torch.optim.Optimizer]) -> dict[str, StepLR]:
    return {
        name: StepLR(optimizer, step_size=4 + i, gamma=0.8)
        for i, (name, optimizer) in enumerate(made.items())
    }


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    squared: Tensor = (model(batch["x"]) - batch["y"]) ** 2
    return squared.mean()


def train(session: ez.Session, told: dict[str, Any]) -> None:
    layout.BUCKET_BYTES = told.get("bucket_bytes", layout.BUCKET_BYTES)
    torch.manual_seed(1 if session.generation == 1 else 100 + session.rank)
    factory = keepers if told.get("keepers") else optimizers
    model, made = session.prepare(Model().double(), factory, strategy=told["strategy"])
    tracked = [session.track(name, wrapped) for name, wrapped in schedulers(made).items()]
    session.restore()
    for batch in session.batches(
        Samples(), global_batch=6, micro_batch=told.get("micro"), steps=told["steps"], shuffle=False
    ):
        session.backward(squares(model, batch))
        if session.step(max_grad_norm=told.get("clip")):
            for scheduler in tracked:
                scheduler.step()


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    ez.run(lambda session: train(session, told))
