"""Trains a generator and a discriminator, each with an optimizer of its own, in double precision.

Argument: JSON with strategy and steps, and at will kind (of the model), micro, turns (within: each
global batch steps the critic, then the generator; between: one of them), die (the rank that kills
itself after the critic's step, and the step) with saved (a directory, in which it first waits for a
checkpoint), bad (the steps at which the generator's loss is NaN on the last rank), stale (the
generator's loss is computed before the critic's step), odd (what rank 1 names in the critic's
turn), out (a file: what `step` returned) and count (a file: how often FSDP2 has summed gradients in
each turn).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus
from torch.utils.data import Dataset

import elasticzero as ez
from elasticzero.checkpoint.steps.catalog import newest_good
from elasticzero.checkpoint.storage.urls import open_directory

SAMPLES = 24
CLIP = 0.3


class Network(nn.Module):
    """Has layers that zero3 gathers one by one, a 0-dim parameter, and a layer outside of them."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(inputs, width), nn.Linear(width, width)])
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        outputs: Tensor = self.head(x) * self.scale
        return outputs


def critic_loss(gan: Any, fake: Tensor, real: Tensor) -> Tensor:
    losses: Tensor = softplus(gan.critic(fake)) + softplus(-gan.critic(real))
    return losses.mean()


def generator_loss(gan: Any, fake: Tensor) -> Tensor:
    loss: Tensor = softplus(-gan.critic(fake)).mean()
    return loss


class Parts(nn.Module):
    """Both networks in one module, which a session trains. It has no forward of its own."""

    def __init__(self, kind: str = "lists") -> None:
        super().__init__()
        if kind == "lists":
            self.generator: nn.Module
            self.generator = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2))
            self.critic: nn.Module
            self.critic = nn.Sequential(nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 1))
        else:
            self.generator, self.critic = Network(3, 7, 2), Network(2, 9, 1)


class Gan(Parts):
    """Is called itself for all losses but, with kind "lists", the generator's in its turn."""

    def forward(self, noise: Tensor, real: Tensor, whose: str = "both") -> Tensor:
        """The sum of both losses; that of the generator reaches no parameter of the critic."""
        if whose != "both":
            fake = self.generator(noise)
            return (
                critic_loss(self, fake, real) if whose == "critic" else generator_loss(self, fake)
            )
        fake = self.generator(noise)
        critic = softplus(self.critic(fake.detach())) + softplus(-self.critic(real))
        fixed = {name: p.detach() for name, p in self.critic.named_parameters()}
        generator = softplus(-functional_call(self.critic, fixed, (fake,)))
        losses: Tensor = critic.mean() + generator.mean()
        return losses


def build(kind: str) -> Parts:
    """The same weights for the same kind, which is lists, networks or parts."""
    torch.manual_seed(1)
    gan = Parts("networks") if kind == "parts" else Gan(kind)
    return gan.double()


class Losses:
    """Computes the losses of one batch, by the calls that a script of this kind makes."""

    def __init__(self, gan: Any, kind: str, noise: Tensor, real: Tensor) -> None:
        self._gan, self._kind = gan, kind
        self._noise, self._real = noise, real
        self._fake: Tensor | None = None
        """Made once with kind "parts", so that its graph outlives the critic's turn."""

    def of(self, whose: str) -> Tensor:
        if self._kind == "networks" or (self._kind == "lists" and whose == "critic"):
            loss: Tensor = self._gan(self._noise, self._real, whose)
            return loss
        if self._fake is None or self._kind != "parts":
            self._fake = self._gan.generator(self._noise)
        if whose == "critic":
            return critic_loss(self._gan, self._fake.detach(), self._real)
        return generator_loss(self._gan, self._fake)


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        drawn = torch.randn(5, generator=generator, dtype=torch.float64)
        return {"noise": drawn[:3], "real": drawn[3:].sin() + 1}


def optimizers(gan: Parts) -> dict[str, torch.optim.Optimizer]:
    return {
        "generator": torch.optim.Adam(gan.generator.parameters(), lr=0.01, betas=(0.5, 0.9)),
        "critic": torch.optim.RMSprop(gan.critic.parameters(), lr=0.005),
    }


def count_sums() -> list[int]:
    """Returns a list whose last number grows with each reduce-scatter of FSDP2."""
    new, old = "reduce_scatter_single", "reduce_scatter_tensor"  # torch before 2.13
    name = new if hasattr(dist, new) else old
    counts, reduce_scatter = [0], getattr(dist, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        counts[-1] += 1
        return reduce_scatter(*args, **options)

    dist.__dict__[name] = wrapped
    return counts


def train(session: ez.Session, told: dict[str, Any]) -> None:
    kind = told.get("kind", "lists")
    gan = build(kind)
    whole, _ = session.prepare(gan, lambda _: optimizers(gan), strategy=told["strategy"])
    model: Any = whole
    session.restore()
    applied: list[bool] = []
    sums = count_sums() if "count" in told else [0]
    for batch in session.batches(
        Samples(), global_batch=6, micro_batch=told.get("micro"), steps=told["steps"], shuffle=False
    ):
        if not told.get("turns"):
            session.backward(model(batch["noise"], batch["real"]))
            session.step()
            continue
        losses = Losses(model, kind, batch["noise"], batch["real"])
        if told.get("stale"):
            loss = losses.of("generator")
        number = session.step_count
        last = session.rank == session.world_size - 1
        whose = {"within": ("critic", "generator"), "between": (turn(number),)}[told["turns"]]
        for name in whose:
            if name == "critic":
                odd = told.get("odd") if session.rank == 1 else None
                session.backward(losses.of(name), only=odd or "critic")
            else:
                if not told.get("stale"):
                    loss = losses.of(name)
                is_bad = number in told.get("bad", []) and last
                session.backward(loss * float("nan") if is_bad else loss, only=["generator"])
            applied.append(
                session.step(max_grad_norm=CLIP, only=name if name != "critic" else odd or name)
            )
            sums.append(0)
            if told.get("die") == [session.rank, number] and session.generation == 1:
                while newest_good(open_directory(told["saved"])) is None:
                    time.sleep(0.01)
                os.kill(os.getpid(), 9)
    if "count" in told:
        Path(told["count"]).write_text(json.dumps(sums))
    if "out" in told:
        Path(f"{told['out']}-{session.rank}").write_text(json.dumps(applied))


def turn(number: int) -> str:
    """Whose step a global batch is, where the two take turns."""
    return "generator" if number % 3 == 2 else "critic"


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    ez.run(lambda session: train(session, told))
