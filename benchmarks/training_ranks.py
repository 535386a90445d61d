"""One rank of the training benchmark: steps of several contenders by turns, in one process.

Argument: JSON with width, contenders, pairs and steps. Rank 0 prints its result as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from training_steps import Step, fully_sharded, strategy_step, torch_step

DEEPSPEED = "DeepSpeed "
"""Before the stage, in the name of a contender."""
BLOCKS = 4
SAMPLES = 4096
BATCH = 16
"""Samples a rank in a step."""
WARM_UP_STEPS = 4
TINY = 64
"""Width of a model whose memory does not count."""


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


def deepspeed_step(stage: int, model: nn.Module) -> Step:
    """Returns a step of DeepSpeed's engine with its default options."""
    import deepspeed

    options = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adam(model.parameters()), dist_init_required=False, config=options
    )

    def step(x: Tensor, y: Tensor) -> None:
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()

    return step


def contender(name: str, width: int, max_norm: float | None = None) -> Step:
    """Returns the step of torch's own strategy, or of one of ours.

    max_norm: limit of the norm of the gradient, for DDP and FSDP2; None: no limit.
    """
    torch.manual_seed(0)
    device = torch.device("cpu")
    model = nn.Sequential(*[Block(width) for _ in range(BLOCKS)])
    if name == "DDP":
        return torch_step(DistributedDataParallel(model), adam(model.parameters()), max_norm)
    if name == "DDP in fp16":
        replicated = DistributedDataParallel(model)
        replicated.register_comm_hook(None, fp16_compress_hook)
        return torch_step(replicated, adam(model.parameters()), max_norm)
    if name == "DDP + ZRO":
        parted = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=1e-3,
            fused=True,
        )
        return torch_step(DistributedDataParallel(model), parted)
    if name.startswith(DEEPSPEED):
        return deepspeed_step(int(name.removeprefix(DEEPSPEED)), model)
    if name == "FSDP2":
        sharded = fully_sharded(model, model.children(), device)
        return torch_step(sharded, adam(sharded.parameters()), max_norm)
    strategy, _, mirrors = name.partition(" + ")
    return strategy_step(strategy, model, adam, device, mirrors=bool(mirrors))


def resident_bytes() -> dict[str, int]:
    """Returns the resident memory of this process by its kind: RssAnon, RssFile, RssShmem, and
    VmHWM, the greatest sum of them since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split()[:2] for line in lines if line.startswith(("Rss", "VmHWM")))
    return {name.rstrip(":"): int(kib) << 10 for name, kib in pairs}


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # proc_pid_clear_refs(5)


def load_libraries(names: Iterable[str]) -> None:
    """Takes steps with a tiny model, so that the libraries' own memory is no contender's."""
    x = torch.randn(BATCH, TINY)
    for name in names:
        step = contender(name, TINY)
        for _ in range(WARM_UP_STEPS):
            step(x, x)


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """Returns seconds a step, by contender and turn, and how much anonymous memory this process
    has had at its peak beyond what it had before the model."""
    x = torch.randn(SAMPLES, order["width"], generator=torch.Generator().manual_seed(1))
    y = x.roll(1, 1)
    if order.get("memory"):
        load_libraries(order["contenders"])
    gc.collect()
    forget_peak()
    before = resident_bytes()
    steps = {name: contender(name, order["width"]) for name in order["contenders"]}
    gc.collect()
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
    for turn in range(order["pairs"]):
        for name in list(steps) if turn % 2 == 0 else reversed(steps):
            seconds[name].append(block(name, order["steps"]))
    now = resident_bytes()
    peak = now["VmHWM"] - now["RssFile"] - now["RssShmem"]
    return {"seconds": seconds, "anonymous_bytes": peak - before["RssAnon"]}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    result = measure(json.loads(sys.argv[1]))
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # with nothing to tear down
