"""One rank of the training benchmark: steps of several contenders by turns, in one process.

Argument: JSON with width, contenders, pairs and steps. Rank 0 prints its result as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from elasticzero.parallel import Setting, create
from elasticzero.state.model import NamedModel

BLOCKS = 4
SAMPLES = 4096
BATCH = 16
"""Samples a rank in a step."""
WARM_UP_STEPS = 4

Step = Callable[[Tensor, Tensor], None]


class Block(nn.Module):
    """A residual block of two linear layers, as in a transformer without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return output


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def contender(name: str, width: int) -> Step:
    """The step of torch's own strategy, or of one of ours without a session around it."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*[Block(width) for _ in range(BLOCKS)])
    ranks = dist.get_world_size()
    if name in ("DDP", "DDP + ZRO"):
        model = DistributedDataParallel(model)
    if name == "FSDP2":
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if name == "DDP + ZRO":
        parted = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=1e-3,
            fused=True,
        )
        return plain(model, parted)
    if name in ("DDP", "FSDP2"):
        return plain(model, adam(model.parameters()))
    strategy = create(
        name,
        Setting(
            model=model,
            named=NamedModel(model),
            factory=adam,
            device=torch.device("cpu"),
            rank=dist.get_rank(),
            world_size=ranks,
        ),
    )

    def step(x: Tensor, y: Tensor) -> None:
        strategy.expect(last=True)
        strategy.backward((strategy.model(x) - y).square().mean(), 1 / ranks)
        strategy.finish(1.0, None)
        strategy.apply()

    return step


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(told: dict[str, Any]) -> dict[str, Any]:
    """Returns seconds a step, by contender and turn, and the peak memory of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    steps = {name: contender(name, told["width"]) for name in told["contenders"]}
    gc.collect()
    x = torch.randn(SAMPLES, told["width"], generator=torch.Generator().manual_seed(1))
    y = x.roll(1, 1)
    taken = dict.fromkeys(steps, 0)

    def block(name: str, count: int) -> float:
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(count):
            first = (taken[name] * dist.get_world_size() + dist.get_rank()) * BATCH % SAMPLES
            steps[name](x[first : first + BATCH], y[first : first + BATCH])
            taken[name] += 1
        return (time.perf_counter() - began_s) / count

    for name in steps:
        block(name, WARM_UP_STEPS)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(told["pairs"]):
        for name in list(steps) if turn % 2 == 0 else reversed(steps):
            seconds[name].append(block(name, told["steps"]))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"seconds": seconds, "before_bytes": before, "peak_bytes": after}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = measure(json.loads(sys.argv[1]))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # with nothing to tear down
