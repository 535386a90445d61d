"""Refuses what the strategy cannot do. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim.swa_utils import AveragedModel

from elasticzero.errors import UserError

METHODS: Mapping[str, str] = {
    "backward": "return the loss from training_step",
    "optimizer_step": "let configure_optimizers return what is to be stepped",
    "optimizer_zero_grad": "leave it out; gradients are the session's",
    "configure_gradient_clipping": "give Trainer(gradient_clip_val=…), which clips by norm",
    "on_before_optimizer_step": "look at gradients by trainer.strategy.session.on_gradients",
}
"""For each method of a LightningModule that is not called: what to do instead."""


def check_trainer(trainer: Any) -> None:
    """Checks that the trainer has no argument that has no effect.

    Args:
        trainer: Lightning's trainer.

    Raises:
        UserError: it has one; the error says what to do instead.
    """
    limited = trainer.limit_train_batches not in (1.0, 0) and not trainer.fast_dev_run
    advice_by_argument = {
        "limit_train_batches": limited and "give a Subset of the dataset",
        "overfit_batches": trainer.overfit_batches and "give a Subset of the dataset",
        "reload_dataloaders_every_n_epochs": trainer.reload_dataloaders_every_n_epochs
        and "make one dataset of all epochs",
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
        and "clip by norm, or by trainer.strategy.session.on_gradients",
        "precision": getattr(trainer.precision_plugin, "scaler", None) is not None
        and "give bf16-mixed; a loss scale is the session's",
    }
    for name, advice in advice_by_argument.items():
        if advice:
            raise UserError(f"the Elastic strategy takes no such Trainer({name}=…): {advice}")


def check_module(module: LightningModule, callbacks: list[Callback]) -> None:
    """Checks that a module and its callbacks override nothing that is never called.

    Args:
        module: the module.
        callbacks: the trainer's callbacks.

    Raises:
        UserError: one does, or the module optimizes by hand.
    """
    kind = type(module).__name__
    if not module.automatic_optimization:
        raise UserError(
            f"{kind} optimizes by hand (automatic_optimization is False), which the Elastic "
            "strategy cannot follow: write the loop with session.batches"
        )
    for name, advice in METHODS.items():
        if getattr(type(module), name) is not getattr(LightningModule, name):
            raise UserError(f"{kind} overrides {name}, which Elastic does not call: {advice}")
    for callback in callbacks:
        if type(callback).on_before_optimizer_step is not Callback.on_before_optimizer_step:
            raise UserError(
                f"{type(callback).__name__} has on_before_optimizer_step, and gradients are not "
                "those of the parameters then: leave it out"
            )


def check_averages(callbacks: list[Callback]) -> None:
    """Checks that no callback averages the weights of a module that is divided by zero3.

    Args:
        callbacks: the trainer's callbacks.

    Raises:
        UserError: one has an `AveragedModel`.
    """
    for callback in callbacks:
        if any(isinstance(value, AveragedModel) for value in vars(callback).values()):
            raise UserError(
                f"{type(callback).__name__} averages the whole module, of which no rank has more "
                "than a part under zero3: use zero1 or zero2, or leave the callback out"
            )
