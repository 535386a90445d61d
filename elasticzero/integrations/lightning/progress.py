"""Keeps where a trainer's loops, schedulers and callbacks stand as part of the training state."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer import call

from elasticzero.integrations.global_batch import agreed_global_batch
from elasticzero.integrations.lightning import hook_state
from elasticzero.session import Session
from elasticzero.snapshots.restore import open_source
from elasticzero.state.schedules import warn_of_changed_rates

NAME = "lightning"
"""Name under which the session tracks it."""


class FitProgress:
    """Holds a trainer's progress; `session.track` keeps it.

    Callbacks may keep what differs by rank, so that theirs is rank 0's, which `share` gives to all;
    large tensors, as of averages, must be equal on all ranks.
    """

    def __init__(self, trainer: pl.Trainer, requested: int | None, stored: int | None) -> None:
        """Describes the progress of a trainer that is about to fit.

        Args:
            trainer: the one whose loops, schedulers and callbacks are stored.
            requested: samples in a step over all ranks that the script gives; None: it gives none.
            stored: samples in a step of the state that training goes on from; None: it begins now.
        """
        self.global_batch = stored or requested or 0
        """Samples in a step over all ranks; 0: it follows from the loader."""
        self.callbacks_changed = True
        self._trainer, self._requested = trainer, requested
        self._callbacks: dict[str, Any] = {}
        self._hooks: dict[str, Any] = {}
        """The entries that hooks of callbacks and module have saved."""
        self._each_step = hook_state.changes_each_step(trainer)
        self._shared_epoch = -1
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        hooks = {"hooks": self._hooks} if self._hooks else {}
        return hooks | {
            "global_batch": self.global_batch,
            "loops": self._trainer.fit_loop.state_dict(),
            "schedulers": [config.scheduler.state_dict() for config in self._configs],
            "callbacks": self._callbacks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def share(self) -> None:
        """Takes over the state of rank 0's callbacks if theirs may have changed; all ranks call
        this together, before each boundary."""
        epoch = self._trainer.current_epoch
        if not (self._each_step or self.callbacks_changed or epoch != self._shared_epoch):
            return
        states = {
            "callbacks": call._call_callbacks_state_dict(self._trainer),  # noqa: SLF001 - no public name
            "hooks": hook_state.saved_by_hooks(self._trainer),
        }
        if not self._each_step:  # or they are captured before they change
            states = copy.deepcopy(states)
        states = hook_state.of_rank_zero(states)
        self._callbacks, self._hooks = states["callbacks"], states["hooks"]
        self.callbacks_changed, self._shared_epoch = False, epoch

    def recall(self) -> None:
        """Gives loops, schedulers and callbacks the state that was loaded, if there is any."""
        if (state := self._loaded) is None:
            return
        self.global_batch = agreed_global_batch(self._requested, state["global_batch"], 0)
        self._callbacks = state["callbacks"]
        self._trainer.fit_loop.load_state_dict(state["loops"])
        for config, stored in zip(self._configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(stored)
        if self._trainer.is_global_zero:
            schedules = {f"scheduler {i}": c.scheduler for i, c in enumerate(self._configs)}
            warn_of_changed_rates(schedules)
        self._hooks = state.get("hooks", {})
        hook_state.load_by_hooks(self._trainer, self._hooks, self._callbacks)
        states = {"callbacks": self._callbacks, "pytorch-lightning_version": pl.__version__}
        call._call_callbacks_load_state_dict(self._trainer, states)  # noqa: SLF001 - likewise

    @property
    def _configs(self) -> list[Any]:
        return list(self._trainer.strategy.lr_scheduler_configs)


def stored_global_batch(session: Session) -> int | None:
    """Returns the global batch of the state that this generation goes on from; None: it is the
    first, or a process alone."""
    assignment = session._assignment  # noqa: SLF001 - the package's own
    if assignment.resume.tier == "fresh":
        return None
    tracked = open_source(assignment).manifest.state.get("tracked", {})
    global_batch: int | None = tracked.get(NAME, {}).get("global_batch")
    return global_batch
