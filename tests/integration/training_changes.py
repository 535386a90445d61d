"""Trains a small model whose parameters the script changes after each step, in turn in every way.

Argument: JSON with strategy, dtype and steps, and at will wrong, one of `WRONGS`, and own, "before"
or "after": a backward of the script's own beside that of the session; and empty: a micro-batch in
each step has no weight, and NaN for its loss.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import elasticzero as ez

SAMPLES, GLOBAL_BATCH = 48, 6


class Samples(Dataset[dict[str, Tensor]]):
    """Every sixth counts for nothing, where a sample has a weight."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum().sin(), "weight": torch.tensor(float(index % 6 > 0))}


def network(dtype: str) -> nn.Sequential:
    torch.manual_seed(2)
    layers = [nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 41), nn.Tanh(), nn.Linear(41, 1)]
    return nn.Sequential(*layers).to(getattr(torch, dtype))


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0625, momentum=0.5)


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """By sample."""
    x: Tensor = batch["x"].to(next(iter(model.parameters())).dtype)
    output: Tensor = model(x)
    return (output.squeeze(1).double() - batch["y"].double()).square()


def clamp(model: nn.Module, aliases: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.25, 0.25)


def set_data(model: nn.Module, aliases: Sequence[Tensor]) -> None:
    parameter = model.get_parameter("2.weight")
    parameter.data = parameter.data * 0.75


def through_a_vector(model: nn.Module, aliases: Sequence[Tensor]) -> None:
    layer = model.get_submodule("4")
    vector = nn.utils.parameters_to_vector(layer.parameters())
    nn.utils.vector_to_parameters(vector.clamp(-0.125, 0.125), layer.parameters())


def by_aliases(model: nn.Module, aliases: Sequence[Tensor]) -> None:
    """Reads the newest values through tensors of before, and writes others."""
    for alias in aliases:
        alias.mul_(1 - alias.abs().mean() / 4)


CHANGES = [clamp, set_data, by_aliases, through_a_vector]


def _bias_of(model: nn.Module, value: nn.Parameter) -> None:
    model.get_submodule("2").register_parameter("bias", value)


WRONGS: dict[str, Callable[[nn.Module], Any]] = {
    "assigned": lambda model: _bias_of(model, nn.Parameter(model.get_parameter("2.bias").detach())),
    "added": lambda model: model.add_module("head", nn.Linear(1, 1)),
    "parametrized": lambda model: nn.utils.parametrizations.weight_norm(model.get_submodule("4")),
}


def main(told: dict[str, Any]) -> None:
    ez.run(lambda session: train(session, told))


def train(session: ez.Session, told: dict[str, Any]) -> None:
    model = network(told["dtype"])
    aliases = [model.get_parameter("0.weight").data]
    model, _ = session.prepare(model, optimizer_of, strategy=told["strategy"])  # type: ignore[assignment]
    aliases.append(model.get_parameter("0.bias").data)
    session.restore()
    micro = 1 if told.get("empty") else None
    for batch in session.batches(
        Samples(),
        global_batch=GLOBAL_BATCH,
        micro_batch=micro,
        steps=told["steps"],
        shuffle=False,
    ):
        if told.get("own") == "before":
            model(batch["x"].to(next(iter(model.parameters())).dtype)).mean().backward()
        losses = squares(model, batch)
        if told.get("empty"):
            weight = batch["weight"].double()
            session.backward((losses * weight).sum() / weight.sum(), weight=weight.sum())
        else:
            session.backward(losses.mean())
        if told.get("own") == "after":
            squares(model, batch).mean().backward()
        if session.step() and told.get("wrong"):
            WRONGS[told["wrong"]](model)
        elif session.step_count and micro is None:
            CHANGES[session.step_count % len(CHANGES)](model, aliases)


def plain(told: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of one process that takes each global batch whole."""
    model, samples = network(told["dtype"]), Samples()
    aliases = [p.data for p in model.get_submodule("0").parameters()]
    optimizer = optimizer_of(model.parameters())
    for step in range(told["steps"]):
        first = step * GLOBAL_BATCH
        chosen = [samples[i % SAMPLES] for i in range(first, first + GLOBAL_BATCH)]
        batch = {key: torch.stack([sample[key] for sample in chosen]) for key in chosen[0]}
        losses, weight = squares(model, batch), batch["weight"].double()
        loss = (losses * weight).sum() / weight.sum() if told.get("empty") else losses.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not told.get("empty"):
            CHANGES[(step + 1) % len(CHANGES)](model, aliases)
    return {f"model/{name}": p.detach() for name, p in model.named_parameters()}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
