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
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from training_steps import Step, fully_sharded, strategy_step, torch_step

BLOCKS = 4
SAMPLES = 4096
BATCH = 16
"""Samples a rank in a step."""
WARM_UP_STEPS = 4


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
    """Returns the step of torch's own strategy, or of one of ours."""
    torch.manual_seed(0)
    device = torch.device("cpu")
    model = nn.Sequential(*[Block(width) for _ in range(BLOCKS)])
    if name == "DDP":
        return torch_step(DistributedDataParallel(model), adam(model.parameters()))
    if name == "DDP + ZRO":
        parted = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=1e-3,
            fused=True,
        )
        return torch_step(DistributedDataParallel(model), parted)
    if name == "FSDP2":
        sharded = fully_sharded(model, model.children(), device)
        return torch_step(sharded, adam(sharded.parameters()))
    return strategy_step(name, model, adam, device)


def measure(given: dict[str, Any]) -> dict[str, Any]:
    """Returns seconds a step, by contender and turn, and the peak memory of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    steps = {name: contender(name, given["width"]) for name in given["contenders"]}
    gc.collect()
    x = torch.randn(SAMPLES, given["width"], generator=torch.Generator().manual_seed(1))
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
    for turn in range(given["pairs"]):
        for name in list(steps) if turn % 2 == 0 else reversed(steps):
            seconds[name].append(block(name, given["steps"]))
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
