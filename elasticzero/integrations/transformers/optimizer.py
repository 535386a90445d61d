"""Makes the optimizer and the scheduler of a trainer anew for each generation."""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from elasticzero.errors import UserError


class OptimizerFactory:
    """Makes a trainer's optimizer: that of its arguments, or one like that which it was given."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer
        self._given: Optimizer | None = trainer.optimizer
        self.scheduler: LRScheduler | None = trainer.lr_scheduler
        """The scheduler that the trainer was given; None: its arguments describe one."""

    def __call__(self, parameters: Any) -> Optimizer:
        """Returns the optimizer, without state; its parameters are those of the trainer's model."""
        if self._given is not None:
            return rebuilt(self._given)
        self._trainer.optimizer = None
        made: Optimizer = self._trainer.create_optimizer()
        return made

    def scheduler_of(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        """Returns the scheduler of an optimizer that was just made.

        steps: the steps of the whole training.
        """
        if self.scheduler is None:
            made: LRScheduler = self._trainer.create_scheduler(steps, optimizer)
            return made
        rates = [group["lr"] for group in optimizer.param_groups]
        LambdaLR(optimizer, lambda _: 1.0)  # lets schedulers notice the optimizer's steps
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for part in (self.scheduler, *getattr(self.scheduler, "_schedulers", ())):
            part.optimizer = optimizer
        return self.scheduler


def rebuilt(given: Optimizer) -> Optimizer:
    """Returns an optimizer of the same class, options and groups; raises `UserError` if its class
    takes others."""
    taken = inspect.signature(type(given)).parameters
    every = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    options = {k: v for k, v in given.defaults.items() if every or k in taken}
    try:
        return type(given)([dict(group) for group in given.param_groups], **options)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the Trainer was given an optimizer of {type(given).__name__}, which cannot be made "
            f"again from its options ({error}): override create_optimizer"
        ) from error
