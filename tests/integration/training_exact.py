"""A small double-precision model, trained under a strategy: prints nothing, writes its weights.

Argument: JSON with strategy, steps or epochs, and at will batch, micro, clip, weighted, width,
pause (seconds a step), out and log (files), die and fail ([rank, step]), and saved (a directory
that must have a checkpoint before one dies).
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import elasticzero as ez
from elasticzero.checkpoint.steps.catalog import newest_good
from elasticzero.checkpoint.storage.urls import open_directory

SAMPLES = 53
FULL_BYTES = 3000
STUCK = "nobody joins this collective"
"""No file can grow past this where the test asks for a full disk: more than a log, less than a
shard."""


class Model(nn.Module):
    """Blocks, a tied weight, a 0-dim parameter, a buffer, a frozen parameter, odd sizes."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(3))
        self.out = nn.Linear(7, width)
        self.tied = nn.Linear(7, width)
        self.tied.weight = self.out.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.full((2, 3), 0.1), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("seen").add_(1)
        x = x.to(self.scale.dtype)
        for block in self.blocks:
            x = x + block(x)
        output: Tensor = self.out(x) * self.scale + self.tied(x) + self.frozen.sum()
        return output


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(7, generator=generator, dtype=torch.float64)
        y = torch.randn(3, generator=generator, dtype=torch.float64)
        return {"x": x, "y": y, "tokens": torch.tensor(1 + index % 5)}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with options of their own."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """By sample: B."""
    squared: Tensor = (model(batch["x"]) - batch["y"]) ** 2
    return squared.mean(1)


def train(session: ez.Session, options: dict[str, Any]) -> None:
    torch.manual_seed(1 if session.generation == 1 else 100 + session.rank)
    plain = Model(options.get("width", 3)).to(getattr(torch, options.get("dtype", "float64")))
    model, optimizer = session.prepare(
        plain, lambda _: torch.optim.AdamW(groups(plain), lr=0.01), strategy=options["strategy"]
    )
    scheduler = session.track(
        "scheduler", torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    )
    session.restore()
    for batch in session.batches(
        Samples(),
        global_batch=options.get("batch", 8),
        micro_batch=options.get("micro"),
        steps=options.get("steps"),
        epochs=options.get("epochs"),
    ):
        if [session.rank, session.step_count] == options.get("fail"):
            raise ZeroDivisionError("asked for by the test")
        if session.step_count == options.get("stuck"):
            stick(session)
        loss = squares(model, batch)
        if options.get("weighted"):
            tokens = batch["tokens"].double()
            session.backward((loss * tokens).sum() / tokens.sum(), weight=tokens.sum())
        else:
            session.backward(loss.mean())
        if session.step(max_grad_norm=options.get("clip")):
            scheduler.step()
            if options.get("log"):
                line = json.dumps(
                    [session.generation, session.rank, session.step_count, session.batch_indices]
                )
                with open(options["log"], "a") as log:
                    log.write(line + "\n")
            fault(session, options)
    value = session.evaluate(Samples(), lambda b: squares(model, b).mean(), batch_size=5)
    if "state" in options:
        state = session.state_dict()
        assert session.rank == 0 or state == {}
        if session.rank == 0:
            text = json.dumps({name: tensor.tolist() for name, tensor in state.items()})
            Path(options["state"]).write_text(text)
    if "out" in options:
        write(Path(options["out"]), session, value)


def stick(session: ez.Session) -> None:
    """Rank 0 waits for the others in a collective that they never join."""
    group = dist.new_group(backend="gloo")
    if session.rank == 0:
        print(STUCK, flush=True)
        dist.all_reduce(torch.zeros(1), group=group)
    time.sleep(3600)


def fault(session: ez.Session, options: dict[str, Any]) -> None:
    """What the test asks this rank to do at a step."""
    if [session.rank, session.step_count] == options.get("die"):
        while "saved" in options and newest_good(open_directory(options["saved"])) is None:
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    rank, first, last = options.get("full", [-1, 0, 0])
    if session.rank == rank:
        full = first <= session.step_count < last
        limit = FULL_BYTES if full else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    if options.get("told"):
        session.log(loss=torch.ones((), requires_grad=True))
    time.sleep(options.get("pause", 0.0))


def write(path: Path, session: ez.Session, value: Any) -> None:
    """What the session would save, evaluated value included."""
    if session.rank == 0:
        path.write_text(json.dumps({"step": session.step_count, "loss": value}))


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    ez.run(lambda session: train(session, told))
