"""Every change that a script can make in the state of an optimizer gives other marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elasticzero.parallel.optimizers.state_marks import state_marks

Entries = dict[Any, dict[str, Any]]


def made() -> torch.optim.Optimizer:
    """An optimizer that has stepped two parameters once."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.state[parameters[1]]["seen"] = [1, {"mean": torch.zeros(1)}]
    return optimizer


def first(state: Entries) -> dict[str, Any]:
    return next(iter(state.values()))


def last(state: Entries) -> dict[str, Any]:
    return list(state.values())[-1]


CHANGES: dict[str, Callable[[Entries], Any]] = {
    "in place": lambda state: first(state)["exp_avg"].mul_(0.5),
    "of several": lambda state: torch._foreach_mul_([e["exp_avg"] for e in state.values()], 0.5),
    "replaced": lambda state: first(state).update(exp_avg=first(state)["exp_avg"] * 0.5),
    "a count": lambda state: first(state)["step"].zero_(),
    "an entry less": lambda state: first(state).pop("exp_avg_sq"),
    "an entry more": lambda state: first(state).update(extra=1),
    "a number in a list": lambda state: last(state)["seen"].__setitem__(0, 2),
    "a tensor in a list": lambda state: last(state)["seen"][1]["mean"].add_(1),
    "a parameter less": lambda state: state.pop(next(iter(state))),
    "none left": lambda state: state.clear(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_gives_other_marks(change: Callable[[Entries], Any]) -> None:
    optimizer = made()
    before = state_marks([optimizer])
    assert state_marks([optimizer]) == before
    with torch.no_grad():
        change(optimizer.state)
    assert state_marks([optimizer]) != before
