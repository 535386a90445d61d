"""Begins with another program's files, trains one step, and writes the whole model to a file.

Argument: JSON with load, strategy and out; at will frozen (one bias is, and the rest is in two
groups), gpt2 (the model of the Trainer's test), and clip.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

import elasticzero as ez
from tests.integrations.foreign_checkpoints import SAMPLES, TOKENS, by_dimensions, gpt2, small_model


def build() -> nn.Module:
    model = gpt2() if told.get("gpt2") else small_model().double()
    if told.get("frozen"):
        model[0].bias.requires_grad_(False)  # type: ignore[index]
    return model


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    if told.get("gpt2"):
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
        return loss
    output: torch.Tensor = model(batch)
    return output.square().mean()


def train(session: ez.Session) -> None:
    in_groups = told.get("frozen") or told.get("gpt2")
    model, _ = session.prepare(
        build(),
        by_dimensions if in_groups else torch.optim.AdamW,
        strategy=told["strategy"],
        load=told["load"],
        load_optimizer=True,
    )
    session.restore()
    samples: Any = [TOKENS] * 4 if told.get("gpt2") else list(SAMPLES)
    for batch in session.batches(samples, global_batch=len(samples), steps=1, shuffle=False):
        session.backward(loss_of(model, batch))
        session.step(max_grad_norm=told.get("clip"))
    weights = session.state_dict()
    if session.rank == 0:
        torch.save(weights, told["out"])


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    ez.run(train)
