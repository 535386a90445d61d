"""Trains an adapter on a frozen base, beside a frozen average of it that the script updates.

Arguments: a file, into which rank 0 writes the sums of all tensors at the end; the steps.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import elasticzero as ez

OUT, STEPS = Path(sys.argv[1]), int(sys.argv[2])


class Adapted(nn.Module):
    """A base that is not trained, an adapter that is, and an average that follows the adapter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.adapter = nn.Linear(64, 64), nn.Linear(64, 64)
        self.average = nn.Linear(64, 64)
        self.double()

    def freeze(self) -> None:
        self.base.requires_grad_(False)
        self.average.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.adapter(x) + self.average(x)
        return output

    def follow(self) -> None:
        """Updates the average as contrastive learners do: in a way that autograd does not see."""
        with torch.no_grad():
            for mean, value in zip(
                self.average.parameters(), self.adapter.parameters(), strict=True
            ):
                mean.data.lerp_(value.data, 0.1)


def data() -> Any:
    return torch.randn(80, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def train(session: ez.Session) -> None:
    inner = Adapted()
    inner.freeze()
    model, _ = session.prepare(inner, lambda params: torch.optim.AdamW(params, lr=0.01))
    session.restore()
    for batch in session.batches(data(), global_batch=8, steps=STEPS, shuffle=False):
        session.backward(model(batch).square().mean())
        if session.step():
            inner.follow()
        time.sleep(0.05)
    state = session.state_dict()
    if session.rank == 0:
        OUT.write_text(json.dumps({name: value.sum().item() for name, value in state.items()}))


if __name__ == "__main__":
    ez.run(train)
