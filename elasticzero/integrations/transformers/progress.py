"""Keeps what a `Trainer` knows of its training as part of the training state."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
import transformers
from torch.optim.lr_scheduler import LRScheduler
from transformers.trainer_callback import TrainerState

from elasticzero.comm.broadcast_value import broadcast_value
from elasticzero.session import Session
from elasticzero.state.schedules import warn_of_changed_rates

OF_THE_PROCESS = ("is_local_process_zero", "is_world_process_zero")


class Exported(Protocol):
    """Describes callbacks that keep state, such as that which stops early."""

    def state(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class MeanLoss:
    """Holds what a mean over steps is made of."""

    total: float = 0.0
    steps: int = 0

    def with_step(self, loss: float) -> MeanLoss:
        """Returns the mean that counts one more step, of this loss."""
        return MeanLoss(self.total + loss, self.steps + 1)

    @property
    def mean(self) -> float:
        """Returns the mean; 0: there is no step."""
        return self.total / max(self.steps, 1)


class TrainerProgress:
    """Holds a trainer's state, which is rank 0's, and its scheduler's.

    What a trainer logs has times, and so differs by rank: `share` makes it equal. `session.track`
    keeps this.
    """

    def __init__(self) -> None:
        self.global_batch: int | None = None
        """Samples in a step over all ranks; None: no generation has trained yet."""
        self._losses, self._unlogged = MeanLoss(), MeanLoss()
        """Over the whole training, and over the steps since the last log."""
        self.gradient_norm: float | None = None
        """That of the newest step, before clipping; None: there was no step."""
        self.operations = 0.0
        """Floating-point operations of the whole training, of all ranks."""
        self.scheduler: LRScheduler | None = None
        self._shared = ""
        self._loaded_scheduler: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "global_batch": self.global_batch,
            "loss": list(dataclasses.astuple(self._losses)),
            "unlogged": list(dataclasses.astuple(self._unlogged)),
            "gradient_norm": self.gradient_norm,
            "operations": self.operations,
            "trainer": self._shared,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.global_batch = state["global_batch"]
        self._losses = MeanLoss(*state["loss"])
        self._unlogged = MeanLoss(*state.get("unlogged", ()))  # older states have none of these
        self.gradient_norm = state.get("gradient_norm")
        self.operations = state.get("operations", 0.0)
        self._shared = state["trainer"]
        self._loaded_scheduler = state["scheduler"]

    def add_step(self, session: Session, operations: float) -> None:
        """Takes what the session's newest step has given.

        Args:
            session: The session.
            operations: The floating-point operations of the step, of all ranks.
        """
        self.operations += operations
        loss, self.gradient_norm = session.loss, session.gradient_norm
        assert loss is not None
        self._losses, self._unlogged = self._losses.with_step(loss), self._unlogged.with_step(loss)

    def mean_loss(self) -> float:
        """Returns the mean over all steps; 0 if there is none."""
        return self._losses.mean

    def take_unlogged(self) -> float | None:
        """Returns the mean over the steps since the last call; None: there is none."""
        unlogged, self._unlogged = self._unlogged, MeanLoss()
        return unlogged.mean if unlogged.steps else None

    def adopt_scheduler(self, scheduler: LRScheduler) -> None:
        """Lets a scheduler that was just built go on where the loaded one stood."""
        self.scheduler = scheduler
        if (state := self._loaded_scheduler) is None:
            return
        scheduler.load_state_dict(state)
        if not dist.is_initialized() or dist.get_rank() == 0:
            warn_of_changed_rates({"the Trainer's schedule": scheduler})
        for group, rate in zip(scheduler.optimizer.param_groups, state["_last_lr"], strict=True):
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def share(self, trainer: transformers.Trainer) -> None:
        """Gives all ranks the trainer's state of rank 0; all call this together."""
        trainer.state = dataclasses.replace(trainer.state, stateful_callbacks=exported(trainer))
        told = dataclasses.asdict(trainer.state)
        text = json.dumps({k: v for k, v in told.items() if k not in OF_THE_PROCESS})
        group = dist.group.WORLD
        self._shared = text if group is None else broadcast_value(text, group)
        trainer.state = self._state(trainer)

    def recall(self, trainer: transformers.Trainer) -> TrainerState | None:
        """Returns the state that was loaded, and gives the callbacks theirs; None: there is
        none."""
        if not self._shared:
            return None
        state = self._state(trainer)
        for callback in exported(trainer):
            stored = state.stateful_callbacks.get(type(callback).__name__, {})
            if isinstance(stored, list):
                stored = stored.pop(0)
            constant = {} if callback is trainer.control else stored.get("args", {})
            for name, value in {**stored.get("args", {}), **stored.get("attributes", {})}.items():
                if name not in constant:
                    setattr(callback, name, value)
        return state

    def _state(self, trainer: transformers.Trainer) -> TrainerState:
        state = TrainerState(**json.loads(self._shared))
        state.is_local_process_zero = trainer.is_local_process_zero()
        state.is_world_process_zero = trainer.is_world_process_zero()
        return state


def exported(trainer: transformers.Trainer) -> list[Any]:
    """Returns the callbacks that keep state, and the trainer's control."""
    candidates = [*trainer.callback_handler.callbacks, trainer.control]
    return [
        candidate
        for candidate in candidates
        if isinstance(candidate, transformers.trainer_callback.ExportableState)
    ]
