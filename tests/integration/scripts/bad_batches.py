"""Trains a small 64-bit model; the loss of the last rank is NaN in some global batches.

Argument: JSON with out (a file, into which rank 0 writes generation, weights and count of steps),
log (a file that gets a line for each batch that rank 0 has computed), steps, bad (numbers of global
batches, from 0) and at will spike (the same, with a large loss instead), pause (seconds a step) and
die ([generation, rank, batch]: where a worker kills itself before its step).
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import elasticzero as ez

GLOBAL_BATCH = 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def data(steps: int) -> Tensor:
    """The samples, each with its number as the last of six columns."""
    size = GLOBAL_BATCH * steps
    values = torch.randn(size, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.cat([values, torch.arange(size, dtype=torch.float64)[:, None]], 1)


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (net(batch[:, :5]) - batch[:, :3]).square().mean()
    return loss


def train(session: ez.Session, told: dict[str, Any]) -> None:
    net, _ = session.prepare(model(), optimizer)
    session.restore()
    samples: Any = data(told["steps"])
    loop = session.batches(samples, global_batch=GLOBAL_BATCH, epochs=1, shuffle=False)
    for batch in loop:
        number = session.batch_indices[0] // GLOBAL_BATCH
        if told.get("die") == [session.generation, session.rank, number]:
            os.kill(os.getpid(), 9)
        loss = loss_of(net, batch)
        last = session.rank == session.world_size - 1
        if number in told["bad"] and last:
            loss = loss * float("nan")
        if number in told.get("spike", []) and last:
            loss = loss + 1e6
        session.backward(loss)
        if session.rank == 0:
            with open(told["log"], "a") as log:
                log.write(f"{session.generation} {number}\n")
        session.step()
        time.sleep(told.get("pause", 0.0))
    weights = {name: tensor.tolist() for name, tensor in session.state_dict().items()}
    if session.rank == 0:
        outcome = {"generation": session.generation, "weights": weights}
        Path(told["out"]).write_text(json.dumps(outcome | {"count": session.step_count}))


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    ez.run(lambda session: train(session, told))
