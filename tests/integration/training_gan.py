"""Trains a generator and a discriminator, each with an optimizer of its own, in double precision.

Argument: JSON with strategy and steps, and at will micro.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus
from torch.utils.data import Dataset

import elasticzero as ez

SAMPLES = 24


class Gan(nn.Module):
    """Both networks in one module, which a session trains."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2))
        self.critic = nn.Sequential(nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 1))

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        """The sum of both losses; that of the generator reaches no parameter of the critic."""
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
    model, _ = session.prepare(gan, lambda _: optimizers(gan), strategy=told["strategy"])
    session.restore()
    for batch in session.batches(
        Samples(), global_batch=6, micro_batch=told.get("micro"), steps=told["steps"], shuffle=False
    ):
        session.backward(model(batch["noise"], batch["real"]))
        session.step()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    ez.run(lambda session: train(session, given))
