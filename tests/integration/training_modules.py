"""Trains a model whose modules keep state of every kind besides parameters, in double precision.

Argument: JSON with strategy and steps, and at will die ([rank, step]) with saved (a directory, in
which it first waits for a checkpoint), and out (a file that rank 0 writes the whole state to).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset

import elasticzero as ez
from elasticzero.checkpoint.steps.catalog import newest_good
from elasticzero.checkpoint.storage.urls import open_directory

SAMPLES, GLOBAL_BATCH = 24, 6


class Kept(nn.Module):
    """Counts its forwards in training mode in every way in which a module can."""

    replaced: Tensor
    late: Tensor | None
    growing: Tensor
    widened: Tensor
    expanded: Tensor
    first: Tensor
    tied: Tensor
    turned: Tensor
    dropped: Tensor | None
    counter: Tensor
    swapped: Tensor
    constant: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("replaced", torch.zeros((), dtype=torch.float64))
        self.register_buffer("late", None)
        self.register_buffer("growing", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("widened", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("expanded", torch.zeros(1, dtype=torch.float64).expand(3))
        self.register_buffer("first", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("tied", self.first)
        self.register_buffer("turned", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("dropped", torch.ones(1, dtype=torch.float64))
        self.register_buffer("counter", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.register_buffer("swapped", torch.zeros(1, dtype=torch.float64), persistent=False)
        self.register_buffer("constant", torch.arange(3.0).double(), persistent=False)
        self.tensor = torch.zeros(1, dtype=torch.float64)
        self.tree: dict[str, Any] = {"count": 0, "parts": (1.5, [None, "x"])}

    def get_extra_state(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "tree": self.tree}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.tensor, self.tree = state["tensor"], state["tree"]

    def count(self) -> None:
        self.replaced = self.replaced + 1
        self.late = torch.zeros(2).double() if self.late is None else self.late + 1
        if len(self.growing) < 9:
            self.growing = torch.cat([self.growing, self.replaced.reshape(1)])
        self.widened = self.widened.to(torch.float64 if self.replaced > 3 else torch.int32) + 1
        self.expanded = (self.expanded[:1] + 1).expand(3)
        self.first += 1
        self.turned = (self.turned * 2j).conj() if self.replaced < 9 else self.turned / 2
        if self.replaced > 2:
            self.dropped = None
        self.counter += 1
        self.swapped = self.swapped + 1
        self.tensor = self.tensor + 1
        self.tree["count"] += 1

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count()
        late = torch.zeros(()) if self.late is None else self.late.sum()
        numbers = self.replaced + late + self.growing.sum() + self.widened.sum()
        numbers = numbers + self.turned.sum().imag / 64
        numbers = numbers + self.expanded.sum() + self.tied.sum() + self.counter.sum()
        numbers = numbers + self.swapped.sum() + self.constant.sum() + self.tensor.sum()
        if self.dropped is not None:
            numbers = numbers + self.dropped.sum()
        output: Tensor = x / (1 + 0.01 * (numbers + self.tree["count"]))
        return output


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 6, dtype=torch.float64)
        self.blocks = nn.ModuleList([Kept(), Kept()])
        self.again = self.blocks[1]
        self.leave = nn.Linear(6, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.enter(x))
        for block in self.blocks:
            hidden = block(hidden)
        output: Tensor = self.leave(hidden)
        return output


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        x = torch.randn(4, generator=drawn, dtype=torch.float64)
        return {"x": x, "y": torch.sin(x.sum()).reshape(1)}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = (model(batch["x"]) - batch["y"]).square().mean()
    return loss


def state_of(model: Model, state: dict[str, Any]) -> dict[str, Any]:
    """The `state_dict`, and what it leaves out, as JSON."""
    rest = {
        f"{i}.{key}": v for i, block in enumerate(model.blocks) for key, v in vars(block).items()
    }
    for i, block in enumerate(model.blocks):
        rest |= {f"{i}.{name}": buffer for name, buffer in block.named_buffers()}
    kept = {
        name: rest[name]
        for name in sorted(rest)
        if name.split(".")[1] in ("counter", "swapped", "constant", "tensor", "tree")
    }
    return {"state": _plain(state), "rest": _plain(kept)}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_complex():
        return [str(value.dtype), _plain(torch.view_as_real(value.resolve_conj()))]
    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape), value.double().flatten().tolist()]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def train(session: ez.Session, told: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model = Model()
    session.prepare(model, lambda p: torch.optim.AdamW(p, lr=0.02), strategy=told["strategy"])
    session.restore()
    batches = session.batches(
        Samples(), global_batch=GLOBAL_BATCH, steps=told["steps"], shuffle=False
    )
    for batch in batches:
        session.backward(loss_of(model, batch))
        session.step()
        if [session.rank, session.step_count] == told.get("die"):
            while newest_good(open_directory(told["saved"])) is None:
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
    state = session.state_dict()
    if session.rank == 0 and "out" in told:
        with open(told["out"], "w") as file:
            json.dump(state_of(model, state), file)


class Averaged(nn.Module):
    """A network with batch statistics; docs recommend a moving average of such a one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


def train_average(session: ez.Session, told: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model, _ = session.prepare(
        Averaged(), lambda p: torch.optim.SGD(p, lr=0.02), strategy=told["strategy"]
    )
    average = AveragedModel(model, use_buffers=True)
    session.track("average", average)
    session.restore()
    for batch in session.batches(Samples(), global_batch=GLOBAL_BATCH, steps=told["steps"]):
        session.backward(loss_of(model, batch))
        session.step()
        average.update_parameters(model)


def train_with_noise(session: ez.Session, told: dict[str, Any]) -> None:
    """Draws from all generators before the loop, in it, at the ends of epochs and after it."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = torch.nn.Linear(4, 1).double()
    session.prepare(model, lambda p: torch.optim.SGD(p, lr=0.02), strategy=told["strategy"])
    generators: dict[str, Any] = {
        "torch": torch.Generator().manual_seed(5),
        "python": random.Random(5),
        "numpy": np.random.default_rng(5),
        "philox": np.random.Generator(np.random.Philox(5)),
        "twister": np.random.Generator(np.random.MT19937(5)),
        "old": np.random.RandomState(5),
    }
    for name, generator in generators.items():
        session.track(name, generator)

    def noise() -> float:
        drawn = [random.random(), np.random.random(), torch.rand(()).item()]
        drawn += [random.gauss(0, 1), np.random.standard_normal()]
        drawn += [torch.rand((), generator=generators["torch"]).item()]
        drawn += [generators["python"].random()]
        drawn += [generators[name].random() for name in ("numpy", "philox", "twister")]
        return sum(drawn) + float(generators["old"].standard_normal())

    noise()
    session.restore()
    noise()
    ends: list[float] = []
    for batch in session.batches(
        Samples(),
        global_batch=GLOBAL_BATCH,
        steps=told["steps"],
        on_epoch_end=lambda: ends.append(noise()),
    ):
        session.backward(loss_of(model, batch) * (2 + noise() / 10))
        session.step()
    last, state = noise(), session.state_dict()
    if session.rank == 0:
        with open(told["out"], "w") as file:
            json.dump({"last": last, "state": _plain(state)}, file)


BODIES = {"average": train_average, "noise": train_with_noise, "modules": train}

if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    ez.run(lambda session: BODIES[told.get("body", "modules")](session, told))
