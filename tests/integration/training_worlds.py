"""Trains a small model for as many steps as told, and writes its loss and its weights.

Argument: JSON with numbers (float64, bf16, or bits: float32 with dropout and slices), strategy,
steps and out (a file). The file that `TESTER_PAUSE_FILE` names says how long each step is to take.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import elasticzero as ez
from tests.integration.scripts.regression import pause

SAMPLES = 331
GLOBAL_BATCH, MICRO_BATCH, SLICE, SEED = 12, 3, 3, 7


class Model(nn.Module):
    """Blocks, a 0-dim parameter, a frozen one, odd sizes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 19)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(19), nn.Linear(19, 19), nn.Tanh(), nn.Dropout(dropout))
            for _ in range(2)
        )
        self.leave = nn.Linear(19, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.full((3,), 0.1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        output: Tensor = self.leave(x) * self.scale + self.frozen
        return output


class Samples(Dataset[dict[str, Tensor]]):
    """Has noise in its targets, so that a loss never comes close to 0."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        x_NI = torch.randn(SAMPLES, 7, generator=generator, dtype=torch.float64)
        noise_NO = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
        y_NO = torch.sin(x_NI @ torch.ones(7, 3, dtype=torch.float64)) + noise_NO
        self.x_NI, self.y_NO = x_NI.to(dtype), y_NO.to(dtype)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x_NI[index], "y": self.y_NO[index]}


def build(numbers: str) -> nn.Module:
    torch.manual_seed(1)
    return Model(0.3 if numbers == "bits" else 0.0).to(dtype_of(numbers))


def dtype_of(numbers: str) -> torch.dtype:
    return torch.float64 if numbers == "float64" else torch.float32


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.05)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.7)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]).to(batch["y"].dtype), batch["y"])


def train(session: ez.Session, told: dict[str, Any]) -> None:
    numbers = told["numbers"]
    model, optimizer = session.prepare(
        build(numbers),
        optimizer_of,
        strategy=told["strategy"],
        precision="bf16" if numbers == "bf16" else "fp32",
    )
    schedule = session.track("schedule", schedule_of(optimizer))
    session.restore()
    samples = Samples(dtype_of(numbers))
    for batch in session.batches(
        samples,
        global_batch=GLOBAL_BATCH,
        micro_batch=None if numbers == "bits" else MICRO_BATCH,
        virtual_batch=SLICE if numbers == "bits" else None,
        steps=told["steps"],
        seed=SEED,
    ):
        session.backward(loss_of(model, batch))
        if session.step(max_grad_norm=1.0):
            schedule.step()
            pause(0.0)
    loss = session.evaluate(samples, lambda batch: loss_of(model, batch), batch_size=50)
    state = session.state_dict()
    if session.rank == 0:
        bits = {name: tensor.contiguous().numpy().tobytes().hex() for name, tensor in state.items()}
        Path(told["out"]).write_text(json.dumps({"loss": loss, "state": bits}))


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    ez.run(lambda session: train(session, told))
