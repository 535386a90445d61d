"""Makes the optimizer that a script has made anew over the parameters of a generation, and moves
its schedulers there."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from elasticzero.errors import UserError


class GivenOptimizer:
    """Describes an optimizer of a model that the session has not laid over the ranks yet."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._original, self._model = optimizer, model
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def __call__(self, parameters: Any) -> Optimizer:
        """Returns an optimizer of the same class, options and groups, without state.

        Raises `UserError` if its class takes others, or it has parameters of another model.
        """
        original, now = self._original, dict(self._model.named_parameters())
        taken = inspect.signature(type(original)).parameters
        every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        options = {k: v for k, v in original.defaults.items() if every or k in taken}
        groups = []
        for group in original.param_groups:
            unknown = [p for p in group["params"] if id(p) not in self._names]
            if unknown:
                raise UserError(
                    f"the optimizer has a parameter of shape {tuple(unknown[0].shape)} that is not "
                    "the model's: build it from the parameters of the model that is trained"
                )
            groups.append({**group, "params": [now[self._names[id(p)]] for p in group["params"]]})
        try:
            return type(original)(groups, **options)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"an optimizer of {type(original).__name__} cannot be made again from its options "
                f"({error}): use one of torch.optim"
            ) from error


def move_scheduler(scheduler: LRScheduler, optimizer: Optimizer) -> LRScheduler:
    """Lets a scheduler, which has made no step, work on another optimizer; returns it."""
    rates = [group["lr"] for group in optimizer.param_groups]
    LambdaLR(optimizer, lambda _: 1.0)  # lets schedulers notice the optimizer's steps
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
        part.optimizer = optimizer
    return scheduler
