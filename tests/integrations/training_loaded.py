"""Begins with another program's files, trains one step, and writes the whole model to a file.

Argument: JSON with load, strategy and out; at will frozen (one bias is, and the rest is in two
groups), model (of `foreign_models`), shapes (of the parameters, whose norm is trained), pretrained
(the directory that the model's library loads), rate, clip, and load_optimizer.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

import elasticzero as ez
from tests.integrations.foreign_checkpoints import SAMPLES, by_dimensions, small_model
from tests.integrations.foreign_models import TOKENS, build, load_pretrained, of_shapes


def model_of_told() -> nn.Module:
    if "shapes" in told:
        return of_shapes(told["shapes"])
    model: nn.Module = build(told["model"]) if "model" in told else small_model().double()
    if "pretrained" in told:
        model = load_pretrained(model, told["pretrained"])
    if told.get("frozen"):
        model[0].bias.requires_grad_(False)  # type: ignore[index]
    return model


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    if "model" in told:
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
        return loss
    output: torch.Tensor = model(batch)
    return output.square().mean()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=told.get("rate", 1e-3))


def train(session: ez.Session) -> None:
    in_groups = told.get("frozen") or told.get("model") == "gpt2"
    model, _ = session.prepare(
        model_of_told(),
        by_dimensions if in_groups else adam,
        strategy=told["strategy"],
        load=told.get("load"),
        load_optimizer=told.get("load_optimizer", True),
    )
    session.restore()
    samples: Any = [TOKENS] * 4 if "model" in told else list(SAMPLES)
    for batch in session.batches(samples, global_batch=len(samples), steps=1, shuffle=False):
        session.backward(loss_of(model, batch))
        session.step(max_grad_norm=told.get("clip"))
    weights = session.state_dict()
    if session.rank == 0:
        torch.save(weights, told["out"])


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    ez.run(train)
