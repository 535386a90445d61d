"""Trains with mirrors, each rank's kept by the rank before it, and compares each mirror with its
owner's own part.

Run by several processes; argument: JSON with rank, world_size, port, directory, strategy, dtype and
optimizer, and at will changed. Every rank writes its own part of the state, and the mirror that it
keeps; where the script is to have changed parameters after the last step, here or elsewhere, it
checks that with zero3 there is none to hand over. Where it is to have changed the optimizer's
state, after the last step or, on one rank, before it, there is none in any strategy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from elasticzero.data.position import DataPosition, MicroBatch
from elasticzero.parallel import Setting, Strategy, create
from elasticzero.parallel.buckets import layout
from elasticzero.snapshots import manifest_draft
from elasticzero.spans import Span
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.model import NamedModel, RankState
from tests.integration.training_exact import Model, Samples, groups, squares
from tests.support.meeting import joined, mesh_of_world
from tests.support.packing import Packing

STEPS = 6
FACTORIES: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "Muon, AdamW": lambda parameters: {
        "muon": torch.optim.Muon(parameters[0]["params"], lr=0.01),
        "adamw": torch.optim.AdamW(parameters[1:], lr=0.01),
    },
    "Adagrad, SGD": lambda parameters: {
        "adagrad": torch.optim.Adagrad(parameters[:1], lr=0.01, initial_accumulator_value=0.1),
        "sgd": torch.optim.SGD(parameters[1:], lr=0.01, momentum=0.9),
    },
    "Packing": Packing,
}


class Partly(Model):
    """Has a layer that no rank uses in odd steps and that only rank 0 uses in step 2, and a
    parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(7, 3)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.step = self.rank = 0

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if self.step % 2 == 0 and (self.step != 2 or self.rank == 0):
            output = output + self.sometimes(x.to(self.scale.dtype))
        return output


def halve(strategy: Strategy) -> None:
    """Changes the state of the optimizers in place."""
    for optimizer in strategy.optimizers.by_name.values():
        for entries in optimizer.state.values():
            for value in entries.values():
                if isinstance(value, Tensor) and value.dim():
                    value.mul_(0.5)


def train(
    strategy: Strategy, model: Partly, rank: int, world_size: int, *, halves: bool = False
) -> None:
    samples = Samples()
    for step in range(STEPS):
        model.step, model.rank = step, rank
        strategy.optimizers.groups[0].options["lr"] = 0.01 / (1 + step)
        names = [name for name in ("adamw", "sgd") if name in strategy.optimizers.by_name]
        only = (names[-1],) if names and step in (2, 4) else None
        for micro in range(2):
            first = 12 * step + 6 * micro
            indices = range(first + rank * 6 // world_size, first + (rank + 1) * 6 // world_size)
            batch = {k: torch.stack([samples[i % 53][k] for i in indices]) for k in ("x", "y")}
            strategy.expect(MicroBatch(positions=Span(0, 1), weight=1, last=micro == 1))
            strategy.backward(squares(strategy.model, batch).mean(), len(indices) / 12, only)
        strategy.finish(0.7, 0.5)
        strategy.apply()
        if step == 3 and halves and rank == 1:
            assert strategy.mirrored_states()
            halve(strategy)
        if step == 3:  # what a script does to its parameters counts too
            with torch.no_grad():
                for parameter in strategy.model.parameters():
                    parameter.clamp_(-0.3, 0.3)


def main(told: dict[str, Any]) -> None:
    rank, world_size, directory = told["rank"], told["world_size"], Path(told["directory"])
    layout.BUCKET_BYTES = 400
    group = joined(rank, world_size, directory / "port")
    torch.manual_seed(1)
    model = Partly().to(getattr(torch, told["dtype"]))
    named = NamedModel(model)
    strategy = create(
        told["strategy"],
        Setting(
            model=model,
            named=named,
            factory=lambda _: FACTORIES[told["optimizer"]](groups(model)),
            device=torch.device("cpu"),
            rank=rank,
            world_size=world_size,
            mesh=mesh_of_world(),
            mirrors=((rank + 1) % world_size,),
            mirrored_by=(rank - 1) % world_size,
        ),
    )
    small = AuxiliaryState(
        torch.device("cpu"),
        named=named,
        groups=strategy.optimizers.groups,
    )
    changed = told.get("changed")
    train(strategy, model, rank, world_size, halves=changed == "state before")
    strategy.settle()
    if changed == "state before":
        assert not strategy.mirrored_states()
    elif changed == "state":
        assert strategy.mirrored_states()
        halve(strategy)
        assert not strategy.mirrored_states()
    elif changed == "elsewhere":
        assert strategy.take_changes() is None and strategy.mirrored_states()
        with torch.no_grad():  # changes no row here, and might those of another rank
            strategy.model.get_parameter("blocks.0.0.weight").clamp_(-1e6, 1e6)
        assert strategy.take_changes() is None and not strategy.mirrored_states()
    elif changed:
        assert strategy.mirrored_states()
        with torch.no_grad():
            for parameter in strategy.model.parameters():
                parameter.clamp_(-0.01, 0.01)
        assert bool(strategy.mirrored_states()) == (told["strategy"] != "zero3")

    def write(name: str, of: int, share: RankState) -> None:
        writer = manifest_draft.WriterInfo(
            rank=of, world_size=world_size, generation=1, token="t", strategy=told["strategy"]
        )
        _, pieces = manifest_draft.draft(share, small.capture(STEPS, DataPosition()), writer)
        tensors = {p.name: p.data.clone() for p in pieces if not p.name.startswith("rng/")}
        save_file(tensors, directory / f"{name}-{of}")

    write("own", rank, strategy.rank_state())
    for of, share in strategy.mirrored_states().items():
        write("mirror", of, share)
    group.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
