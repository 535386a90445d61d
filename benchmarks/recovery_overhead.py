"""A training whose steps are taken by turns with ElasticZero and without, in the same processes."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import elasticzero as ez
from elasticzero.parallel import Setting, create
from elasticzero.state.model import NamedModel

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


Step = Callable[[Tensor, Tensor], None]


def now_s() -> float:
    """Once what the GPU was given is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.monotonic()


def plain(model: nn.Module) -> Step:
    """A step of a model that communicates by itself."""
    optimizer = adam(model.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def bare(name: str, session: ez.Session) -> tuple[str, Step]:
    """The same strategy without a session: torch's own where torch has it."""
    model = network().to(session.device)
    if name == "ddp":
        own = [session.device.index] if session.device.type == "cuda" else None
        return "torch DDP", plain(DistributedDataParallel(model, device_ids=own))
    if name == "zero3":
        mesh = init_device_mesh(session.device.type, (session.world_size,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return "torch FSDP2", plain(model)
    setting = Setting(
        model=model,
        named=NamedModel(model),
        factory=adam,
        device=session.device,
        rank=session.rank,
        world_size=session.world_size,
    )
    strategy = create(name, setting)

    def step(x: Tensor, y: Tensor) -> None:
        strategy.expect(last=True)
        loss = nn.functional.mse_loss(strategy.model(x), y)
        strategy.backward(loss, 1.0 / session.world_size)
        strategy.finish(1.0, None)
        strategy.apply()

    return "its strategy alone", step


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
        found = {"bare": what, "own_s": own_s[1:], "bare_s": bare_s[1:]}
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, help="file for the seconds of each block")
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    ez.run(lambda session: train(session, options.pairs, options.out))
