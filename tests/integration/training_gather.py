"""Trains by a loss over the whole global batch, with a schedule of the loop's length.

Argument: JSON with strategy and steps, and at will out, habit, options and uneven: rank 0 alone
has a term of the loss for which a layer comes after the gather.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import elasticzero as ez

SAMPLES, BATCH, EPOCHS, SEED = 23, 7, 3, 4


class Pairs(nn.Module):
    """Encodes two views of each sample, and has a temperature beside the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.after = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.encoder(x), self.encoder(x.roll(1, -1)), self.scale * 1.0


def dataset() -> TensorDataset:
    values = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(values.double(), torch.arange(SAMPLES))


def model() -> nn.Module:
    torch.manual_seed(2)
    return Pairs().double()


def loss_of(one: Tensor, other: Tensor, scale: Tensor) -> Tensor:
    """The loss of all rows, each of which is to find its own partner."""
    logits = scale * one @ other.T
    return F.cross_entropy(logits, torch.arange(len(logits)))


def term_of(network: nn.Module, rows: Tensor) -> Tensor:
    """A term of the loss, by a layer that takes what was gathered."""
    output: Tensor = network.get_submodule("after")(rows)
    return (output - 0.5).square().mean()


def rate(steps: int) -> Any:
    return lambda step: 1 - step / (2 * steps)


def train(session: ez.Session, told: dict[str, Any]) -> None:
    data = dataset()
    network, optimizer = session.prepare(
        model(), lambda params: torch.optim.SGD(params, lr=0.5), strategy=told["strategy"]
    )
    length: dict[str, Any] = {"global_batch": BATCH, "epochs": EPOCHS}
    steps = session.steps_in(data, **length)
    assert steps == session.steps_in(DataLoader(data, 2), **length)
    if told.get("habit"):
        steps = EPOCHS * len(DataLoader(data, BATCH)) // session.world_size
    schedule = session.track("schedule", LambdaLR(optimizer, rate(steps)))
    session.restore()
    options: dict[str, Any] = told.get("options", {})
    for batch, numbers in session.batches(data, seed=SEED, **length, **options):
        one, other, scale = network(batch)
        gathered = session.gather(numbers)
        assert gathered.tolist() == session.batch_indices
        rows, others = session.gather(one), session.gather(other)
        loss = loss_of(rows, others, scale)
        if told.get("uneven") and session.rank == 0:
            share = session.micro_batch.weight / len(session.batch_indices)
            loss = loss + term_of(network, rows) / share
        session.backward(loss)
        if session.step():
            schedule.step()
        if session.step_count == told["steps"]:
            break
    state = session.state_dict()
    if session.rank == 0 and "out" in told:
        torch.save(state, told["out"])


if __name__ == "__main__":
    ez.run(lambda session: train(session, json.loads(sys.argv[1])))
