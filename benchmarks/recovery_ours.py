"""The training whose recovery is measured, under ElasticZero: a small model, steps of some ms."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elasticzero as ez


def train(session: ez.Session, steps: int, pause_s: float) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 16))
    model, _ = session.prepare(plain, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    session.restore()
    data = TensorDataset(torch.randn(4096, 256), torch.randn(4096, 16))
    for x, y in session.batches(data, global_batch=32, steps=steps):
        time.sleep(pause_s)
        session.backward(nn.functional.mse_loss(model(x), y))
        session.step()


def begin(seconds: float) -> None:
    """Takes a core for so long, as imports do."""
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--begin", type=float, default=0.0, help="seconds up to elasticzero.run")
    options = parser.parse_args()
    begin(options.begin)
    ez.run(lambda session: train(session, options.steps, options.pause))
