"""Refuses what the adapter cannot do, by the arguments and methods that ask for it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers
from transformers import TrainerCallback

from elasticzero.errors import UserError

SET = bool
DIVIDES = (
    "leave it out; elasticzero run --strategy zero2 or zero3 divides the state among the ranks"
)

ARGUMENTS: Mapping[str, tuple[Callable[[Any], object], str]] = {
    "deepspeed": (SET, DIVIDES),
    "fsdp": (SET, DIVIDES),
    "parallelism_config": (SET, "leave it out; models are not divided within a layer here"),
    "ignore_data_skip": (SET, "leave it out; each sample is used exactly once"),
    "neftune_noise_alpha": (SET, "leave it out, or add the noise in the model's forward"),
    "use_liger_kernel": (SET, "leave it out, and apply liger's kernels to the model yourself"),
    "enable_jit_checkpoint": (SET, "leave it out; the agent saves the state at a notice"),
    "include_num_input_tokens_seen": (
        lambda value: value not in (False, "no", None),
        "leave it out; session.log(tokens=…) counts tokens",
    ),
    "debug": (SET, "leave it out; --on-nonfinite says what is not finite"),
    "train_sampling_strategy": (
        lambda value: value == "batch_rebalance",
        "give another one; the batches of ranks are the session's",
    ),
    "average_tokens_across_devices": (
        lambda value: not value,
        "leave it at True; a loss is a mean over the whole global batch",
    ),
    "include_tokens_per_second": (SET, "leave it out; session.log(tokens=…) counts tokens"),
}
"""For each argument of `TrainingArguments`: whether a value is refused, and what to do instead."""

METHODS: Mapping[str, str] = {
    "get_batch_samples": "override compute_loss, or write the loop with session.batches",
    "_inner_training_loop": "write the loop with session.batches",
    "get_train_dataloader": "give train_dataset, and data_collator",
}


def check_training_arguments(args: Any, trial: Any) -> None:
    """Checks that no argument of `TrainingArguments` or `train` is given that has no effect.

    Args:
        args: the trainer's `TrainingArguments`.
        trial: as given to `train`; any is refused.

    Raises:
        UserError: one is given; the error says what to do instead.
    """
    for name, (refused, advice) in ARGUMENTS.items():
        value = getattr(args, name, None)
        if hasattr(args, name) and refused(value):
            raise UserError(f"elasticzero's Trainer takes no {name}={value!r}: {advice}")
    if trial is not None:
        raise UserError("elasticzero's Trainer runs no hyperparameter search: one job, one run")


def check_methods(trainer: transformers.Trainer) -> None:
    """Checks that no method of transformers' `Trainer` is overridden that is not called here.

    Args:
        trainer: the trainer.

    Raises:
        UserError: a subclass or a callback overrides one; the error says what to do instead.
    """
    for name, advice in METHODS.items():
        of_base = getattr(transformers.Trainer, name, None)
        if getattr(type(trainer), name, None) is not of_base:
            raise UserError(
                f"{type(trainer).__name__} overrides {name}, which elasticzero's Trainer does not "
                f"call: {advice}"
            )
    for callback in trainer.callback_handler.callbacks:
        method = getattr(type(callback), "on_pre_optimizer_step", None)
        if method is not TrainerCallback.on_pre_optimizer_step:
            raise UserError(
                f"{type(callback).__name__} has on_pre_optimizer_step, and gradients are not those "
                "of the parameters then: look at them by trainer.session.on_gradients, called in "
                "on_train_begin"
            )
