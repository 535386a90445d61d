"""Trains a tiny model, and prints a line in every step: `prints.py STEPS [FAILING_RANK]`."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elasticzero as ez

STEPS = int(sys.argv[1])
FAILING_RANK = int(sys.argv[2]) if len(sys.argv) > 2 else None


def train(session: ez.Session) -> None:
    torch.manual_seed(0)
    model, _ = session.prepare(nn.Linear(4, 1), lambda params: torch.optim.SGD(params, lr=0.01))
    data = TensorDataset(torch.randn(4 * STEPS, 4))
    session.restore()
    for (x,) in session.batches(data, global_batch=4, epochs=1):
        if session.rank == FAILING_RANK and session.step_count == STEPS // 2:
            raise ValueError("bad sample")
        time.sleep(0.03)
        session.backward(model(x).square().mean())
        session.step()
        print(f"line {session.step_count} of rank {session.rank}")


if __name__ == "__main__":
    ez.run(train)
