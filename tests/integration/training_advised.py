"""Trains as the sentences of refusals advise, and as they refuse.

Argument: JSON with kind (a key of `LOSSES`, "accumulated" or "thawed"), strategy and steps, and at
will wrong (the script does what is refused).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import elasticzero as ez
from tests.integration.training_parameters import GLOBAL_BATCH, Samples

Batch = dict[str, Tensor]


class Model(nn.Module):
    """Adds rows of an embedding to its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6)
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.first(x + self.words(i))))
        return result


def model_of() -> Model:
    torch.manual_seed(1)
    return Model().double()


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def mean(output: Tensor, batch: Batch) -> Tensor:
    return (output - batch["y"]).square().mean()


def of_all(loss: Tensor, inputs: list[Tensor], session: ez.Session | None) -> list[Tensor]:
    """Gradients of the global batch, up to a factor, as docs/training.md has them."""
    weight = 1.0 if session is None else session.micro_batch.weight
    gradients = torch.autograd.grad(loss * weight, inputs, retain_graph=True)
    if session is not None and session.world_size > 1:
        for gradient in gradients:
            dist.all_reduce(gradient)
    return list(gradients)


def sharpness(model: nn.Module, batch: Batch, session: ez.Session | None) -> Tensor:
    """SAM: the loss at the worst weights that are near."""
    weights = dict(model.named_parameters())
    loss = mean(model(batch["x"], batch["i"]), batch)
    gradients = of_all(loss, list(weights.values()), session)
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    moves = dict(zip(weights, gradients, strict=True))
    moved = {name: w + 0.05 * moves[name] / norm for name, w in weights.items()}
    return mean(functional_call(model, moved, (batch["x"], batch["i"])), batch)


def words(model: nn.Module, batch: Batch, session: ez.Session | None) -> Tensor:
    """FGM: the loss, and that of an embedding which is moved along its gradient."""
    weight = model.get_parameter("words.weight")
    loss = mean(model(batch["x"], batch["i"]), batch)
    [gradient] = of_all(loss, [weight], session)
    moved = {"words.weight": weight + 0.5 * gradient / gradient.norm()}
    return loss + mean(functional_call(model, moved, (batch["x"], batch["i"])), batch)


def inputs(model: nn.Module, batch: Batch, session: ez.Session | None) -> Tensor:
    """The loss of inputs that are moved along their gradient."""
    x = batch["x"].clone().requires_grad_()
    [gradient] = torch.autograd.grad(mean(model(x, batch["i"]), batch), x)
    return mean(model(batch["x"] + 0.1 * gradient.sign(), batch["i"]), batch)


def both(model: nn.Module, batch: Batch, session: ez.Session | None) -> Tensor:
    """The sum of the losses of the inputs and of the moved ones."""
    x = batch["x"].clone().requires_grad_()
    loss = mean(model(x, batch["i"]), batch)
    [gradient] = torch.autograd.grad(loss, x, retain_graph=True)
    return loss + mean(model(batch["x"] + 0.1 * gradient.sign(), batch["i"]), batch)


def plain(model: nn.Module, batch: Batch, session: ez.Session | None) -> Tensor:
    return mean(model(batch["x"], batch["i"]), batch)


LOSSES: dict[str, Callable[[nn.Module, Batch, ez.Session | None], Tensor]] = {
    "sharpness": sharpness,
    "words": words,
    "inputs": inputs,
    "both": both,
    "accumulated": plain,
    "thawed": plain,
}
THAWED_AT = 3


def wrongly(model: nn.Module, batch: Batch, session: ez.Session) -> None:
    """A second backward for a gradient that moves a weight."""
    weight = model.get_parameter("words.weight")
    session.backward(mean(model(batch["x"], batch["i"]), batch))
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(0.1)
    session.backward(mean(model(batch["x"], batch["i"]), batch))
    with torch.no_grad():
        weight.copy_(before)


def train(session: ez.Session, told: dict[str, Any]) -> None:
    kind, wrong = told["kind"], told.get("wrong", False)
    made = model_of()
    if kind == "thawed" and wrong:
        made.first.requires_grad_(False)
    model, _ = session.prepare(made, optimizer_of, strategy=told["strategy"])
    first = model.get_submodule("first")
    if kind == "thawed" and not wrong:
        first.requires_grad_(session.step_count >= THAWED_AT)
    session.restore()
    micro = 2 if kind == "accumulated" and not wrong else None
    for batch in session.batches(
        Samples(),
        global_batch=GLOBAL_BATCH,
        micro_batch=micro,
        steps=told["steps"],
        shuffle=False,
    ):
        if kind == "thawed":
            first.requires_grad_(session.step_count >= THAWED_AT)
        if kind == "words" and wrong:
            wrongly(model, batch, session)
            session.step()
        elif kind == "accumulated" and wrong:
            session.backward(plain(model, batch, session) / 4)
            if session.step_count % 4 == 3:
                session.step()
        else:
            session.backward(LOSSES[kind](model, batch, session))
            session.step()


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    ez.run(lambda session: train(session, arguments))
