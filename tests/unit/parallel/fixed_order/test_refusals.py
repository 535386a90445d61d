"""Gradients cannot be summed in a fixed order under every strategy and option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elasticzero.errors import UserError
from elasticzero.options.settings import TrainingSettings
from elasticzero.parallel import Setting, create
from elasticzero.state.model import NamedModel


@pytest.mark.parametrize(
    ("strategy", "mirrors", "message"),
    [
        ("zero3", {}, "--deterministic cannot be had with strategy zero3"),
        ("zero1", {"mirrored_by": 1}, "--deterministic cannot be had with --redundancy mirror"),
        ("zero2", {"mirrored_by": 1}, "--deterministic cannot be had with --redundancy mirror"),
    ],
)
def test_a_strategy_that_cannot_keep_the_order_refuses_it(
    strategy: str, mirrors: dict[str, Any], message: str
) -> None:
    model = nn.Linear(2, 2)
    setting = Setting(
        model=model,
        named=NamedModel(model),
        factory=torch.optim.AdamW,
        device=torch.device("cpu"),
        rank=0,
        world_size=2,
        options=TrainingSettings(deterministic=True),
        **mirrors,
    )
    with pytest.raises(UserError, match=message):
        create(strategy, setting)
