"""Makes the optimizer and the scheduler of a trainer anew for each generation."""

from __future__ import annotations

from typing import Any

import transformers
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elasticzero.integrations.optimizers import GivenOptimizer, move_scheduler


class OptimizerFactory:
    """Makes a trainer's optimizer: that of its arguments, or one like that which it was given."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer
        optimizer = trainer.optimizer
        self._factory = None if optimizer is None else GivenOptimizer(optimizer, trainer.model)
        self._scheduler: LRScheduler | None = trainer.lr_scheduler

    def __call__(self, parameters: Any) -> Optimizer:
        """Returns the optimizer, without state; its parameters are those of the trainer's model."""
        if self._factory is not None:
            return self._factory(parameters)
        self._trainer.optimizer = None
        made: Optimizer = self._trainer.create_optimizer()
        return made

    def scheduler_of(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        """Returns the scheduler of an optimizer that was just made.

        Args:
            optimizer: the optimizer.
            steps: number of steps of the whole training.
        """
        if self._scheduler is not None:
            return move_scheduler(self._scheduler, optimizer)
        made: LRScheduler = self._trainer.create_scheduler(steps, optimizer)
        return made
