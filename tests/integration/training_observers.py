"""Trains a model of quantization-aware training, whose observers change buffers in each forward.

Argument: JSON with kind (a key of `OBSERVERS`), strategy and steps.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao import quantization

import elasticzero as ez
from tests.integration.training_parameters import GLOBAL_BATCH, Samples

OBSERVERS = {
    "moving average": (
        quantization.MovingAverageMinMaxObserver,
        quantization.default_weight_fake_quant,
    ),
    "channels": (
        quantization.MinMaxObserver,
        quantization.default_per_channel_weight_fake_quant,
    ),
    "histogram": (quantization.HistogramObserver, quantization.default_weight_fake_quant),
}
"""Observers of activations and weights; those of channels give buffers their shape at first."""


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant = quantization.QuantStub()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.relu(self.first(self.quant(x))))
        return result


def model_of(kind: str) -> nn.Module:
    """A model of 32 bits: torch has no kernel of channels for 64."""
    torch.manual_seed(1)
    observer, weight = OBSERVERS[kind]
    activation = quantization.FakeQuantize.with_args(
        observer=observer, quant_min=0, quant_max=255, dtype=torch.quint8
    )
    model = Quantized()
    model.qconfig = quantization.QConfig(activation=activation, weight=weight)  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch moves them to a package of its own
        prepared: nn.Module = quantization.prepare_qat(model)
    return prepared


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    squares: Tensor = (model(batch["x"].float()) - batch["y"].float()).square()
    return squares.mean()


def train(session: ez.Session, told: dict[str, Any]) -> None:
    made = model_of(told["kind"])
    model, _ = session.prepare(made, optimizer_of, strategy=told["strategy"])
    session.restore()
    for batch in session.batches(
        Samples(), global_batch=GLOBAL_BATCH, steps=told["steps"], shuffle=False
    ):
        session.backward(loss_of(model, batch))
        session.step()


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    ez.run(lambda session: train(session, arguments))
