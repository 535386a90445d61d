"""Trains with gradients that do not depend on weights, so that these say what was applied.

A sample's gradient is a matrix of its own, and SGD subtracts the mean of each global batch.
"""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elasticzero as ez

pause = runpy.run_path(str(Path(__file__).with_name("regression.py")))["pause"]
SAMPLES, GLOBAL_BATCH = 240, 12
ROWS, COLUMNS = 40, 64


def gradients() -> Tensor:
    """That of each sample: (samples, rows, columns)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, ROWS, COLUMNS, generator=generator, dtype=torch.float64)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).sum((1, 2)) + self.b.sum()


def train(session: ez.Session, epochs: int, pause_s: float) -> None:
    model, _ = session.prepare(Weights(), lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    session.restore()
    batches = session.batches(
        TensorDataset(gradients()), global_batch=GLOBAL_BATCH, epochs=epochs, seed=3
    )
    for (x,) in batches:
        place = {"generation": session.generation, "step": session.step_count + 1}
        trace = {**place, "samples": list(session.batch_indices)}
        print(json.dumps({"trace": trace}) + "\n", end="", flush=True)
        pause(pause_s)
        session.backward(model(x).mean())
        session.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.1)
    chosen = parser.parse_args()
    ez.run(lambda session: train(session, chosen.epochs, chosen.pause))
