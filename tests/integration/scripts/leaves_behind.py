"""Trains a few steps with something of its own in the process: `python leaves_behind.py WHAT`."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import elasticzero as ez

kept: list[Any] = []


def leave(what: str) -> None:
    if what == "thread":
        threading.Thread(target=time.sleep, args=(3600,), name="reader", daemon=True).start()
    if what == "child":
        kept.append(subprocess.Popen(["sleep", "3600"]))
    if what == "group":
        kept.append(dist.new_group(backend="gloo"))


def train(session: ez.Session, what: str) -> None:
    model, _ = session.prepare(nn.Linear(4, 2), lambda p: torch.optim.SGD(p, lr=0.1))
    session.restore()
    leave(what)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
    for x, y in session.batches(data, global_batch=8, steps=100):
        time.sleep(0.1)
        session.backward(nn.functional.mse_loss(model(x), y))
        session.step()


if __name__ == "__main__":
    ez.run(lambda session: train(session, sys.argv[1]))
    for child in kept:
        child.kill()
