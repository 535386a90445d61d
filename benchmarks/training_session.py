"""A training in a session whose steps are taken by turns with torch's own, in the same processes.

`session_steps.py` starts it as a job. The reference is torch's FSDP2 for zero3, else its DDP.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from training_ranks import BATCH, BLOCKS, SAMPLES, WARM_UP_STEPS, Block, adam, contender

import elasticzero as ez


def train(session: ez.Session, width: int, order: argparse.Namespace) -> None:
    """Takes turns of steps with the session, as a script does, and by the reference."""
    x = torch.randn(SAMPLES, width, generator=torch.Generator().manual_seed(1))
    y = x.roll(1, 1)
    reference = contender(order.reference, width, order.max_norm)
    torch.manual_seed(0)
    model, _ = session.prepare(nn.Sequential(*[Block(width) for _ in range(BLOCKS)]), adam)
    session.restore()
    seconds: dict[str, list[float]] = {"session": [], "reference": []}

    def reference_turn(turn: int, count: int) -> float:
        dist.barrier()
        began_s = time.perf_counter()
        for step in range(turn * order.steps, turn * order.steps + count):
            first = (step * session.world_size + session.rank) * BATCH % SAMPLES
            reference(x[first : first + BATCH], y[first : first + BATCH])
        return (time.perf_counter() - began_s) / count

    reference_turn(0, WARM_UP_STEPS)
    total = order.steps * (order.pairs + 1)
    data, batch = TensorDataset(x, y), BATCH * session.world_size
    began_s = time.perf_counter()
    for inputs, targets in session.batches(data, global_batch=batch, steps=total):
        if session.step_count and session.step_count % order.steps == 0:
            seconds["session"].append((time.perf_counter() - began_s) / order.steps)
            with session.busy("the reference's steps"):
                seconds["reference"].append(reference_turn(len(seconds["reference"]), order.steps))
                dist.barrier()
            began_s = time.perf_counter()
        session.backward(nn.functional.mse_loss(model(inputs), targets))
        session.step(order.max_norm)
    if session.rank == 0:  # the first turn warms up
        order.out.write_text(json.dumps({name: turns[1:] for name, turns in seconds.items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, help="file for the seconds a step of each turn")
    parser.add_argument("--width", type=int, default=1024, help="of the blocks")
    parser.add_argument("--reference", default="DDP", help="DDP or FSDP2")
    parser.add_argument("--max-norm", type=float, help="of the gradient; by default none")
    parser.add_argument("--pairs", type=int, default=15, help="turns of each, after the first")
    parser.add_argument("--steps", type=int, default=8, help="of one turn")
    options = parser.parse_args()
    ez.run(lambda session: train(session, options.width, options))
