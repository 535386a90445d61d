"""Small double-precision models, each of which does something unusual with its parameters.

Argument: JSON with kind (a key of `KINDS`), strategy and steps, and at will micro.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import elasticzero as ez

SAMPLES = 36
GLOBAL_BATCH = 8
"""Leaves four samples for the last global batch of an epoch."""


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(6, generator=generator, dtype=torch.float64),
            "y": torch.randn(1, generator=generator, dtype=torch.float64),
            "i": torch.tensor(index % 10),
        }


class Layers(nn.Module):
    """Two layers, of which kinds change something."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)
        self.forwards = 0

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        self.forwards += 1
        result: Tensor = self.last(torch.tanh(self.first(x)))
        return result


def clamped() -> Layers:
    """The most common hook of all: its result is not the sum of its results for parts."""
    model = Layers()
    model.first.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model


def hooked_later(model: nn.Module) -> None:
    weights = dict(model.named_parameters())
    weights["first.weight"].register_hook(lambda gradient: gradient.sign() * 0.01)

    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(parameter.grad.norm())

    weights["last.weight"].register_post_accumulate_grad_hook(scale)


def noisy() -> Layers:
    """Adds noise to gradients, which must be the same on all ranks."""
    model = Layers()
    model.first.weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
    return model


class Masked(Layers):
    """Is pruned by a mask that is laid over a weight in each forward, from one forward on."""

    def __init__(self, since: int = 0) -> None:
        super().__init__()
        self.since = since
        self.mask = (torch.arange(36).view(6, 6) % 3 > 0).double()

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        if self.forwards >= self.since:
            self.first.weight.data.mul_(self.mask)
        return super().forward(x, i)


class Momentum(Layers):
    """Has a frozen encoder that follows another one in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        if self.training:
            for ours, theirs in zip(self.key.parameters(), self.first.parameters(), strict=True):
                ours.data = 0.9 * ours.data + 0.1 * theirs.data
        result: Tensor = super().forward(x, i) + self.key(x).mean(dim=1, keepdim=True)
        return result


class Touched(Layers):
    """Has a script that changes a weight between the forward and the backward."""


def transposed() -> Layers:
    model = Layers()
    model.first.weight = nn.Parameter(model.first.weight.detach().t())
    return model


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(2, 3, 2)
        self.last = nn.Linear(6, 1)
        weight = self.convolve.weight
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        image = x.view(-1, 1, 2, 3).expand(-1, 2, -1, -1)
        result: Tensor = self.last(torch.tanh(self.convolve(image)).flatten(1))
        return result


class Renormalized(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6, max_norm=1.0)

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return super().forward(x * self.words(i), i)


class Looked(Layers):
    """Renormalizes the rows that it looks up by a function, which no module shows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(10, 6))

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return super().forward(x * nn.functional.embedding(i, self.rows, max_norm=1.0), i)


class Mirrored(Layers):
    """Decodes with the transpose of what it encodes with, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(6, 6)
        self.back.weight.data = self.first.weight.data.t()

    def double(self) -> Mirrored:
        super().double()
        self.back.weight.data = self.first.weight.data.t()
        return self

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return super().forward(self.back(torch.tanh(self.first(x))), i)


class Empty(Layers):
    """Has parameters without elements, as of an adapter of rank 0, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = (nn.Parameter(torch.empty(n, 2 - n)) for n in (0, 2))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return super().forward(x, i) * self.scale + self.rows.sum() + self.columns.sum()


class Stacked(Layers):
    """Has a layer that zero3 frees after its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6))  # type: ignore[assignment]


class Viewed(Layers):
    """Has a buffer that is a row of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("row", self.first.weight.data[0])

    def double(self) -> Viewed:
        super().double()
        self.row = self.first.weight.data[0]
        return self


def clamp(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.clamp_(-0.2, 0.2)


def loaded(model: nn.Module, *, assign: bool = False) -> None:
    """Loads whole tensors, as of a model that was trained before, into what was prepared."""
    whole = {n: tuple(p.shape) for n, p in Layers().named_parameters()}
    values = {n: torch.linspace(-0.5, 0.5, math.prod(s)).view(s) for n, s in whole.items()}
    model.load_state_dict(values, assign=assign)


class Rotated(Layers):
    """Has a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex128))

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return super().forward((x * self.turn).abs(), i)


class Lazy(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LazyLinear(1)


class PlainHooks(Layers):
    """Has a module with plain dicts of hooks, as a wrapper around modules may make them."""

    def __init__(self) -> None:
        super().__init__()
        self.first._forward_pre_hooks = {}


class Normalized(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.first(x)))
        return result


KINDS: dict[str, Callable[[], nn.Module]] = {
    "clamped": clamped,
    "hooked": Layers,
    "noisy": noisy,
    "masked": Masked,
    "masked later": lambda: Masked(since=6),
    "momentum": Momentum,
    "touched": Touched,
    "penalty": Layers,
    "transposed": transposed,
    "channels_last": ChannelsLast,
    "max_norm": Renormalized,
    "max_norm of a function": Looked,
    "one memory": Mirrored,
    "empty": Empty,
    "loaded": Layers,
    "aliased": Layers,
    "viewed": Viewed,
    "differentiated": Stacked,
    "set": Layers,
    "assigned": Layers,
    "complex": Rotated,
    "lazy": Lazy,
    "plain hooks": PlainHooks,
    "BatchNorm": Normalized,
}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


def plain_hooks_too(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer of the kind that wrappers are: with plain dicts of hooks, or without any."""
    optimizer = optimizer_of(parameters)
    optimizer._optimizer_step_pre_hooks = {}
    del optimizer._optimizer_step_post_hooks
    return optimizer


def loss_of(kind: str, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"]
    if kind == "penalty":
        x = x.clone().requires_grad_()
    output = model(x, batch["i"])
    loss: Tensor = (output - batch["y"]).square().mean()
    if kind == "differentiated":
        slopes = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss = loss + sum(slope.square().sum() for slope in slopes)
    if kind == "touched":
        model.last.weight.data.clamp_(-0.1, 0.1)  # type: ignore[operator, union-attr]
    if kind == "penalty":
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = loss + (slope.norm(dim=1) - 1).square().mean()
    return loss


def train(session: ez.Session, told: dict[str, Any]) -> None:
    kind = told["kind"]
    torch.manual_seed(1)
    made = KINDS[kind]().double()
    aliases = [parameter.data for parameter in made.parameters()] if kind == "aliased" else []
    factory = plain_hooks_too if kind == "plain hooks" else optimizer_of
    model, _ = session.prepare(made, factory, strategy=told["strategy"])
    if kind == "hooked":
        hooked_later(model)
    if kind in ("loaded", "assigned"):
        loaded(model, assign=kind == "assigned")
    session.restore()
    for batch in session.batches(
        Samples(),
        global_batch=GLOBAL_BATCH,
        micro_batch=told.get("micro"),
        steps=told["steps"],
        shuffle=False,
    ):
        session.backward(loss_of(kind, model, batch))
        session.step()
        clamp(aliases)
        if kind == "set":
            with torch.no_grad():
                model.get_parameter("first.weight").set_(torch.zeros(6, 6).double())  # type: ignore[call-overload]


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    ez.run(lambda session: train(session, arguments))
