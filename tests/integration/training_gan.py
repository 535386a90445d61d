"""Trains a generator and a discriminator, each with an optimizer of its own, in double precision.

Argument: JSON with strategy and steps, and at will micro, turns (within: each global batch steps
the critic, then the generator; between: one of them), die (the rank that kills itself after the
critic's step, and the step), bad (the steps at which the generator's loss is NaN on the last rank),
stale (the generator's loss is computed before the critic's step), odd (what rank 1 names in the
critic's turn).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus
from torch.utils.data import Dataset

import elasticzero as ez

SAMPLES = 24
CLIP = 0.3


class Gan(nn.Module):
    """Both networks in one module, which a session trains."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2))
        self.critic = nn.Sequential(nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 1))

    def critic_loss(self, noise: Tensor, real: Tensor) -> Tensor:
        losses: Tensor = softplus(self.critic(self.generator(noise))) + softplus(-self.critic(real))
        return losses.mean()

    def generator_loss(self, noise: Tensor) -> Tensor:
        loss: Tensor = softplus(-self.critic(self.generator(noise))).mean()
        return loss

    def forward(self, noise: Tensor, real: Tensor, *, both: bool = True) -> Tensor:
        """The sum of both losses; that of the generator reaches no parameter of the critic."""
        if not both:
            return self.critic_loss(noise, real)
        fake = self.generator(noise)
        critic = softplus(self.critic(fake.detach())) + softplus(-self.critic(real))
        fixed = {name: p.detach() for name, p in self.critic.named_parameters()}
        generator = softplus(-functional_call(self.critic, fixed, (fake,)))
        losses: Tensor = critic.mean() + generator.mean()
        return losses


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        drawn = torch.randn(5, generator=generator, dtype=torch.float64)
        return {"noise": drawn[:3], "real": drawn[3:].sin() + 1}


def optimizers(gan: Gan) -> dict[str, torch.optim.Optimizer]:
    return {
        "generator": torch.optim.Adam(gan.generator.parameters(), lr=0.01, betas=(0.5, 0.9)),
        "critic": torch.optim.RMSprop(gan.critic.parameters(), lr=0.005),
    }


def train(session: ez.Session, told: dict[str, Any]) -> None:
    torch.manual_seed(1)
    gan = Gan().double()
    whole, _ = session.prepare(gan, lambda _: optimizers(gan), strategy=told["strategy"])
    model: Any = whole
    session.restore()
    applied: list[bool] = []
    for batch in session.batches(
        Samples(), global_batch=6, micro_batch=told.get("micro"), steps=told["steps"], shuffle=False
    ):
        if "turns" not in told:
            session.backward(model(batch["noise"], batch["real"]))
            session.step()
            continue
        if told.get("stale"):
            loss = model.generator_loss(batch["noise"])
        number = session.step_count
        whose = {"within": ("critic", "generator"), "between": (turn(number),)}[told["turns"]]
        for name in whose:
            if name == "critic":
                loss_d = model(batch["noise"], batch["real"], both=False)
                odd = told.get("odd") if session.rank == 1 else None
                session.backward(loss_d, only=odd or "critic")
            else:
                if not told.get("stale"):
                    loss = model.generator_loss(batch["noise"])
                is_bad = number in told.get("bad", []) and session.rank == session.world_size - 1
                session.backward(loss * float("nan") if is_bad else loss, only=["generator"])
            applied.append(
                session.step(max_grad_norm=CLIP, only=name if name != "critic" else odd or name)
            )
            if told.get("die") == [session.rank, number] and session.generation == 1:
                os.kill(os.getpid(), 9)
    if "out" in told:
        Path(f"{told['out']}-{session.rank}").write_text(json.dumps(applied))


def turn(number: int) -> str:
    """Whose step a global batch is, where the two take turns."""
    return "generator" if number % 3 == 2 else "critic"


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    ez.run(lambda session: train(session, given))
