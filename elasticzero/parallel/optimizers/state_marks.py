"""Finds changes that a script makes in the state of its optimizers between two of their steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from elasticzero.torch_internals.tensors import count_of_changes


def state_marks(optimizers: Iterable[torch.optim.Optimizer]) -> list[Any]:
    """Returns what is another if a script has changed an entry of the state, or replaced, added or
    removed one.

    A tensor counts by its identity and torch's count of its changes: what changes it through
    `.data` or NumPy is not found. No tensor is read.

    Args:
        optimizers: The optimizers.
    """
    return [
        [(id(parameter), _mark(entries)) for parameter, entries in optimizer.state.items()]
        for optimizer in optimizers
    ]


def _mark(value: Any) -> Any:
    """Returns what is another if a value, or one inside of it, was changed or replaced."""
    if isinstance(value, Tensor):
        return id(value), count_of_changes(value)
    if isinstance(value, dict):
        return [(key, _mark(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple)):
        return [_mark(entry) for entry in value]
    return value if isinstance(value, (bool, int, float, complex, str, bytes)) else id(value)
