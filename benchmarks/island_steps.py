"""A training that writes down when each of its steps ended; `island_link.py` starts it as a job."""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset
from training_ranks import BLOCKS, SAMPLES, Block, adam

import elasticzero as ez

BATCH = 16


def train(session: ez.Session, order: argparse.Namespace) -> None:
    """Trains, with a rest in each step, and writes the end and the samples of each."""
    x = torch.randn(SAMPLES, order.width, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block(order.width) for _ in range(BLOCKS)])
    model, _ = session.prepare(blocks, adam)
    session.restore()
    data, ends = TensorDataset(x, x.roll(1, 1)), []
    for inputs, targets in session.batches(data, global_batch=BATCH, steps=order.steps):
        time.sleep(order.pause)
        session.backward(nn.functional.mse_loss(model(inputs), targets))
        session.step()
        ends.append((time.time(), len(inputs)))
    with open(f"{order.out}-{os.environ['GROUP_RANK']}-{os.getpid()}", "w") as file:
        json.dump(ends, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", help="what the names of the files begin with")
    parser.add_argument("--width", type=int, default=800, help="of the blocks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds")
    options = parser.parse_args()
    ez.run(lambda session: train(session, options))
