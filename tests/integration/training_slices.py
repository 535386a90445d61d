"""A model with dropout, batch statistics and random samples, trained in slices.

Argument: JSON with strategy, steps and dtype, and at will batch, virtual, clip, weighted, workers,
optimizer, die ([rank, step]) with saved (a directory, in which it first waits for a checkpoint),
pause (seconds a step), stream (the samples are one), log (a file for the losses of slices) and out
(one for the result).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import elasticzero as ez
from elasticzero.checkpoint.steps.catalog import newest_good
from elasticzero.checkpoint.storage.urls import open_directory

SAMPLES = 47


class RunningMean(nn.Module):
    """Batch statistics that one sample has too: a slice of a stream may have no more."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Model(nn.Module):
    """Dropout, batch statistics, odd sizes, a layer that only some slices use."""

    def __init__(self, *, stream: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(7, 37, bias=False)
        self.norm = RunningMean(37) if stream else nn.BatchNorm1d(37)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(37, 11)
        self.sometimes = nn.Linear(11, 11)
        self.out = nn.Linear(11, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.norm(self.first(x))))
        x = torch.relu(self.second(x))
        if not self.training or random.random() < 0.4:
            x = x + self.sometimes(x)
        noise = 1.0 + 0.1 * float(np.random.standard_normal()) * self.training
        output: Tensor = self.out(x) * self.scale * noise
        return output


class Samples:
    """Draws noise for each sample that is read."""

    def __init__(self, dtype: torch.dtype, noise: float = 0.1) -> None:
        self.dtype = dtype
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(7, generator=generator, dtype=torch.float64)
        y = torch.randn(3, generator=generator, dtype=torch.float64)
        if self.noise:
            x = x + self.noise * torch.randn(7, dtype=torch.float64)
        x = x.to(self.dtype)
        return {"x": x, "y": y.to(self.dtype), "tokens": torch.tensor(1 + index % 5)}


SHARDS = (3, 11, 1, 8, 9, 10, 5)
"""Number of samples in each shard of the stream."""


def stream_of(dtype: torch.dtype) -> ez.Stream:
    samples = Samples(dtype, noise=0.0)

    def read(shard: int, start: int) -> Iterator[dict[str, Tensor]]:
        first = sum(SHARDS[:shard])
        yield from (samples[i] for i in range(first + start, first + SHARDS[shard]))

    return ez.Stream(range(len(SHARDS)), read, readers=len(SHARDS), shuffle_window=4)


def noisy(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Draws noise where a slice of the stream is collated."""
    batch: dict[str, Tensor] = default_collate(samples)
    return batch | {"x": batch["x"] + 0.1 * torch.randn_like(batch["x"])}


def several(params: Any) -> dict[str, torch.optim.Optimizer]:
    parameters = list(params)
    return {
        "muon": torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.02),
        "sgd": torch.optim.SGD([p for p in parameters if p.dim() != 2], lr=0.02, momentum=0.9),
    }


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.002),
    "several": several,
}


def loss_of(model: nn.Module, batch: dict[str, Tensor], weighted: bool) -> tuple[Tensor, float]:
    """The mean loss of a slice, and its weight."""
    squared = ((model(batch["x"]) - batch["y"]) ** 2).mean(1)
    if not weighted:
        return squared.mean(), float(len(squared))
    tokens = batch["tokens"].to(squared.dtype) / 3
    return (squared * tokens).sum() / tokens.sum(), float(tokens.sum())


def train(session: ez.Session, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    dtype = getattr(torch, options["dtype"])
    weighted, streams = options.get("weighted", False), options.get("stream", False)
    model, made = session.prepare(
        Model(stream=streams).to(dtype),
        OPTIMIZERS[options.get("optimizer", "adamw")],
        strategy=options["strategy"],
    )
    first = next(iter(made.values())) if isinstance(made, dict) else made
    scheduler = session.track(
        "scheduler", torch.optim.lr_scheduler.StepLR(first, step_size=5, gamma=0.9)
    )
    session.restore()
    samples, losses = Samples(dtype), list[float]()
    dataset: Any = stream_of(dtype) if streams else samples  # no `Dataset`, as a script's may be
    for batch in session.batches(
        dataset,
        collate_fn=noisy if streams else None,
        global_batch=options.get("batch", 12),
        virtual_batch=options.get("virtual", 3),
        steps=options["steps"],
        seed=5,
        num_workers=options.get("workers", 0),
    ):
        loss, weight = loss_of(model, batch, weighted)
        losses.append(loss.item())
        session.backward(loss, weight=weight if weighted else None)
        if session.step(max_grad_norm=options.get("clip")):
            scheduler.step()
            if "log" in options:
                entry = [session.world_size, session.rank, session.step_count, losses]
                with open(options["log"], "a") as log:
                    log.write(json.dumps(entry) + "\n")
            losses = []
            time.sleep(options.get("pause", 0.0))
            if [session.rank, session.step_count] == options.get("die"):
                while newest_good(open_directory(options["saved"])) is None:
                    time.sleep(0.01)
                os.kill(os.getpid(), 9)
    if "out" in options:
        value = session.evaluate(
            samples,  # type: ignore[arg-type]
            lambda b: loss_of(model, b, weighted=False)[0],
            batch_size=5,
        )
        state = session.state_dict()
        if session.rank == 0:
            bits = {name: t.contiguous().numpy().tobytes().hex() for name, t in state.items()}
            Path(options["out"]).write_text(json.dumps({"loss": value, "state": bits}))


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    ez.run(lambda session: train(session, told))
