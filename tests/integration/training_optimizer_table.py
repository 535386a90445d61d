"""Trains a small model with each optimizer of torch's under each strategy, beside torch's DDP.

Argument: JSON with rank, world_size, port and out, the name of a file without the rank. Writes, by
strategy and optimizer, the greatest difference of a weight after STEPS steps, or the refusal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elasticzero.data.position import MicroBatch
from elasticzero.errors import UserError
from elasticzero.parallel import Setting, create
from elasticzero.spans import Span
from elasticzero.state.model import NamedModel
from elasticzero.training.argument_checks import check_factory
from tests.support.meeting import joined, mesh_of_world

STEPS = 100
optim = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adadelta": lambda ps: optim.Adadelta(ps, lr=0.3),
    "Adafactor": lambda ps: optim.Adafactor(ps, lr=0.01),
    "Adagrad": lambda ps: optim.Adagrad(ps, lr=0.05, initial_accumulator_value=0.1),
    "Adam": lambda ps: optim.Adam(ps, lr=0.01, amsgrad=True),
    "AdamW": lambda ps: optim.AdamW(ps, lr=0.01, fused=True),
    "Adamax": lambda ps: optim.Adamax(ps, lr=0.01),
    "ASGD": lambda ps: optim.ASGD(ps, lr=0.05),
    "LBFGS": lambda ps: optim.LBFGS(ps),
    "Muon": lambda ps: optim.Muon(ps, lr=0.01),
    "NAdam": lambda ps: optim.NAdam(ps, lr=0.01),
    "RAdam": lambda ps: optim.RAdam(ps, lr=0.01),
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda ps: optim.Rprop(ps, lr=0.01),
    "SGD": lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True),
    "SparseAdam": lambda ps: optim.SparseAdam(ps),
}
DIVIDED = ("zero1", "zero2", "zero3")
"""The strategies under which each optimizer is tried."""


class Model(nn.Module):
    """Matrices, which are all that Muon takes, and vectors for the others."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        options: Any = {"bias": name != "Muon", "dtype": torch.float64}
        self.first = nn.Linear(5, 7, **options)
        self.second = nn.Linear(7, 6, **options)
        self.third = nn.Linear(6, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return output


def loss_of(model: nn.Module, samples: range) -> Tensor:
    x = (
        torch.linspace(-2, 2, 40, dtype=torch.float64)
        .view(8, 5)
        .cos()[samples.start : samples.stop]
    )
    squared: Tensor = (model(x) - x[:, :2].roll(1, 1)).square()
    return squared.mean()


def samples_of(rank: int, world_size: int) -> range:
    return range(rank * 8 // world_size, (rank + 1) * 8 // world_size)


@cache
def by_ddp(name: str, rank: int, world_size: int) -> dict[str, Tensor]:
    """The weights that torch's DDP and the plain optimizer give."""
    model = Model(name)
    distributed = DistributedDataParallel(model)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(distributed, samples_of(rank, world_size)).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained(name: str, strategy: str, rank: int, world_size: int) -> dict[str, Tensor]:
    """The weights of this rank, by name; under zero3 its rows alone."""
    model = Model(name)
    names = list(NamedModel(model).parameters)
    laid = create(
        strategy,
        Setting(
            model=model,
            named=NamedModel(model),
            factory=check_factory(OPTIMIZERS[name]),
            device=torch.device("cpu"),
            rank=rank,
            world_size=world_size,
            mesh=mesh_of_world(),
        ),
    )
    part = samples_of(rank, world_size)
    for _ in range(STEPS):
        laid.expect(MicroBatch(positions=Span(0, 1), weight=1, last=True))
        laid.backward(loss_of(laid.model, part), len(part) / 8)
        laid.finish(1.0, None)
        laid.apply()
    laid.settle()
    held = laid.rank_state().held
    return {name: held[f"model/{name}"].tensor for name in names}


def compare(name: str, strategy: str, rank: int, world_size: int) -> float | str:
    try:
        parameters = trained(name, strategy, rank, world_size)
    except UserError as error:
        return str(error)
    expected = by_ddp(name, rank, world_size)
    worst = 0.0
    for parameter, tensor in parameters.items():
        whole = expected[parameter]
        part = whole if tensor.shape == whole.shape else whole.chunk(world_size)[rank]
        worst = max(worst, (part - tensor).abs().max().item())
    return worst


def main(told: dict[str, Any]) -> None:
    rank, world_size = told["rank"], told["world_size"]
    group = joined(rank, world_size, Path(told["out"] + "-port"))
    table = {
        strategy: {name: compare(name, strategy, rank, world_size) for name in OPTIMIZERS}
        for strategy in DIVIDED
    }
    group.close()
    Path(f"{told['out']}-{rank}").write_text(json.dumps(table))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
