"""A training whose steps are taken by turns with ElasticZero and without, in the same processes."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from training_steps import Step, fully_sharded, strategy_step, torch_step

import elasticzero as ez

BLOCK = 20
GLOBAL_BATCH = 64
WIDTH = 1024
LAYERS = 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 16))


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)  # type: ignore[arg-type]


def now_s() -> float:
    """Once what the GPU was given is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.monotonic()


def bare(name: str, session: ez.Session) -> tuple[str, Step]:
    """Returns the same strategy without a session, torch's own where torch has it, and its name."""
    model = network().to(session.device)
    if name == "ddp":
        devices = [session.device.index] if session.device.type == "cuda" else None
        reduced = DistributedDataParallel(model, device_ids=devices)
        return "torch DDP", torch_step(reduced, adam(reduced.parameters()))
    if name == "zero3":
        linear = [layer for layer in model if isinstance(layer, nn.Linear)]
        sharded = fully_sharded(model, linear, session.device)
        return "torch FSDP2", torch_step(sharded, adam(sharded.parameters()))
    return "its strategy alone", strategy_step(name, model, adam, session.device)


def train(session: ez.Session, pairs: int, out: Path) -> None:
    name = session._assignment.strategy
    data = TensorDataset(torch.randn(4096, WIDTH), torch.randn(4096, 16))
    what, step = bare(name, session)
    sampler: DistributedSampler[Any] = DistributedSampler(data, session.world_size, session.rank)
    part = GLOBAL_BATCH // session.world_size
    model, _ = session.prepare(network(), adam)
    session.restore()

    def bare_block() -> float:
        loader = iter(DataLoader(data, batch_size=part, sampler=sampler))
        began_s = now_s()
        for _ in range(BLOCK):
            step(*(tensor.to(session.device) for tensor in next(loader)))
        return (now_s() - began_s) / BLOCK

    own_s: list[float] = []
    bare_s: list[float] = []
    began_s = now_s()
    steps = BLOCK * (pairs + 2)
    for x, y in session.batches(data, global_batch=GLOBAL_BATCH, steps=steps):
        if session.step_count and session.step_count % BLOCK == 0:
            own_s.append((now_s() - began_s) / BLOCK)
            with session.busy("steps without ElasticZero"):
                bare_s.append(bare_block())
            began_s = now_s()
        session.backward(nn.functional.mse_loss(model(x), y))
        session.step()
    if session.rank == 0:  # the first block warms up
        blocks = {"bare": what, "own_s": own_s[1:], "bare_s": bare_s[1:]}
        out.write_text(json.dumps(blocks))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, help="file for the seconds of each block")
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    ez.run(lambda session: train(session, options.pairs, options.out))
