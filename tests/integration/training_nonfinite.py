"""A small training that goes wrong in step 5 as it is told.

Argument: JSON with strategy, steps and wrong.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

import elasticzero as ez

BAD_STEP = 5


class Overflow(torch.autograd.Function):
    """The identity, with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * float("inf")


class Model(nn.Module):
    """Holds infinity where that is right: in a mask, and in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("mask", torch.full((4,), -float("inf")))
        self.frozen = nn.Parameter(torch.full((2,), float("nan")), requires_grad=False)

    def forward(self, x: Tensor, overflow: bool = False) -> Tensor:
        x = self.first(x)
        output: Tensor = self.last(Overflow.apply(x) if overflow else x)  # type: ignore[no-untyped-call]
        return output


def train(session: ez.Session, told: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model, optimizer = session.prepare(
        Model().double(), lambda ps: torch.optim.Adam(ps, lr=0.01), strategy=told["strategy"]
    )
    session.restore()
    data: Any = torch.randn(40, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for batch in session.batches(data, global_batch=8, micro_batch=2, steps=told["steps"]):
        bad = session.step_count + 1 == BAD_STEP and session.rank == session.world_size - 1
        wrong = told["wrong"] if bad else ""
        loss = model(batch, wrong == "gradient").square().mean()
        if wrong == "loss":
            loss = loss + float("inf")
        if told["wrong"] == "weightless":
            session.backward(loss * float("nan"), weight=0.0)
            session.step()
            continue
        session.backward(loss)
        if wrong == "lr":
            optimizer.param_groups[0]["lr"] = float("inf")
        session.step(max_grad_norm=told.get("clip"))
        if wrong == "state":
            for state in optimizer.state.values():
                state["exp_avg_sq"].fill_(float("inf"))


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    ez.run(lambda session: train(session, told))
