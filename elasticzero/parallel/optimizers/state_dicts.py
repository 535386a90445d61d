"""Calls `state_dict` and `load_state_dict` of optimizers that return more there than torch's do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from elasticzero.errors import CheckpointMismatch
from elasticzero.parallel.optimizers.probe import FAILURES
from elasticzero.torch_internals.hooks import has_state_dict_hooks


def changes_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether the optimizer's `state_dict` is another than torch's."""
    inherited = type(optimizer).state_dict is torch.optim.Optimizer.state_dict
    return not inherited or "state_dict" in vars(optimizer) or has_state_dict_hooks(optimizer)


def load_state_dict(optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
    """Calls an optimizer's `load_state_dict`, and leaves it the dicts of its groups.

    Raises:
        CheckpointMismatch: The optimizer has refused it.
    """
    try:
        with unchanged_groups(optimizer):
            optimizer.load_state_dict(state_dict)
    except FAILURES as error:
        raise CheckpointMismatch(
            f"{type(optimizer).__name__}.load_state_dict has failed with what its state_dict has "
            f"returned ({type(error).__name__}: {error}): use the optimizer that wrote the "
            "checkpoint, or mend its load_state_dict"
        ) from error


@contextmanager
def unchanged_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Leaves an optimizer the dicts of its groups, which schedulers and the session hold, and gives
    them the options of those that have taken their place meanwhile."""
    groups = list(optimizer.param_groups)
    yield
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if group is not loaded:
            for key, value in loaded.items():
                present = group.get(key)
                if isinstance(present, Tensor) and isinstance(value, Tensor):
                    present.copy_(value)
                elif key != "params":
                    group[key] = value
    optimizer.param_groups[:] = groups
