"""What is said where a schedule's rates are not those of the restored state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    SequentialLR,
)

from elasticzero.state.schedules import warn_of_changed_rates

Maker = Callable[[torch.optim.Optimizer, int], Any]


def linear(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def sequential(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    return SequentialLR(optimizer, [ConstantLR(optimizer, 0.5, 3), linear(optimizer, steps)], [3])


def chained(optimizer: torch.optim.Optimizer, steps: int) -> ChainedScheduler:
    return ChainedScheduler([linear(optimizer, steps), ConstantLR(optimizer, 0.5, 3)])


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    return CosineAnnealingLR(optimizer, steps)


def after(make: Maker, steps: int, taken: int, *, tensor: bool = False) -> Any:
    rate: Any = torch.tensor(0.1) if tensor else 0.1
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=rate)
    schedule = make(optimizer, steps)
    for _ in range(taken):
        optimizer.step()
        schedule.step()
    return schedule


def warnings_of(
    make: Maker, steps: int, caplog: pytest.LogCaptureFixture, **others: bool
) -> list[str]:
    restored = after(make, steps, 0, **others)
    restored.load_state_dict(after(make, 20, 8, **others).state_dict())
    warn_of_changed_rates({"schedule": restored})
    return [record.message for record in caplog.records]


@pytest.mark.parametrize("make", [linear, sequential, chained])
def test_another_number_of_steps_is_said_in_one_line(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = warnings_of(make, 30, caplog)
    assert line.startswith("'schedule': at its step ") and "session.steps_in(…)" in line
    if make is linear:
        assert "gives a learning rate of 0.0733333, and" in line and "from has 0.06;" in line


@pytest.mark.parametrize("make", [linear, sequential, chained, cosine])
@pytest.mark.parametrize("tensor", [False, True])
def test_the_same_schedule_is_silent(
    make: Maker, tensor: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert not warnings_of(make, 20, caplog, tensor=tensor)


def test_a_schedule_that_stores_its_steps_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """It goes on by the stored number, so that its rates do not change."""
    assert not warnings_of(cosine, 30, caplog)


def test_what_has_no_rates_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_changed_rates({"counter": object()})
    assert not caplog.records
