"""A small regression in float64 that writes down which samples each global batch holds.

The dataset does not divide by the batch, nor the batch by the world.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import time

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elasticzero as ez

SAMPLES = 331


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x_NI = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x_NI, torch.sin(x_NI @ torch.ones(6, 3, dtype=torch.float64)))


def network(hidden: int = 17) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def train(session: ez.Session, options: argparse.Namespace) -> None:
    model, optimizer = session.prepare(
        network(options.hidden),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.05),
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.7)
    scheduler = session.track("scheduler", schedule)
    session.restore()
    seen = -1
    for x, y in session.batches(
        dataset(),
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        epochs=options.epochs,
        seed=3,
    ):
        if session.step_count != seen:
            seen = session.step_count
            place = {"generation": session.generation, "step": seen + 1}
            trace = {**place, "samples": list(session.batch_indices)}
            print(json.dumps({"trace": trace}), flush=True)
            time.sleep(options.pause)
            if options.long_step == seen + 1 and session.generation == 1:
                time.sleep(options.long)
            if options.fail_at == seen + 1 and session.rank == 0:
                raise ValueError(f"told to fail at step {seen + 1}")
        loss = loss_of(model(x), y)
        session.backward(loss)
        if session.step(max_grad_norm=1.0):
            scheduler.step()
            session.log(loss=loss.item())
            if options.slow_after is not None and session.step_count >= options.slow_after:
                time.sleep(1.5 if session.rank == 0 and session.generation == 1 else 0.0)


def refuse_shared_memory() -> None:
    """No file can be given room: what a /dev/shm that is too small does to a capture."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.posix_fallocate = refuse


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-batch", type=int, default=10)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--hidden", type=int, default=17)
    parser.add_argument("--slow-after", type=int)
    parser.add_argument("--long-step", type=int)
    parser.add_argument("--long", type=float, default=8.0)
    parser.add_argument("--slow-start", type=float, default=0.0)
    parser.add_argument("--linger", type=float, default=0.0)
    parser.add_argument("--no-memory", action="store_true")
    chosen = parser.parse_args()
    time.sleep(chosen.slow_start)
    if chosen.no_memory:
        refuse_shared_memory()
    ez.run(lambda session: train(session, chosen))
    time.sleep(chosen.linger if os.environ.get("RANK", "0") != "0" else 0.0)
