"""Keeps what callbacks and a module put into a checkpoint by Lightning's hooks.

`on_save_checkpoint` changes a dict that Lightning would write to a file: averages of weights are
there. What it has added or replaced is the state; tensors of the module itself are named in it, for
they are part of the training state already.
"""

from __future__ import annotations

from collections.abc import Mapping
from json import dumps, loads
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from elasticzero.comm.broadcast_value import broadcast_value
from elasticzero.data.loader import map_tensors
from elasticzero.errors import UserError
from elasticzero.nested import flatten, unflatten

OF_MODULE = "elasticzero.tensor_of_module"
"""Key of a dict that stands for a tensor of the module; its value is the tensor's name."""
SMALL_ELEMENTS = 1024
"""Elements of a tensor up to which rank 0's counts; larger ones must be equal on all ranks."""
OF_LIGHTNING = "lightning.pytorch.callbacks."
"""Beginning of the modules of callbacks whose own state changes only where a checkpoint is saved,
an epoch ends or a validation does."""


def changes_each_step(trainer: pl.Trainer) -> bool:
    """Returns whether callbacks or the module may keep what changes with each step."""
    if _overrides(trainer.lightning_module, pl.LightningModule, "on_save_checkpoint"):
        return True
    return any(
        _overrides(callback, pl.Callback, "on_save_checkpoint")
        or (
            _overrides(callback, pl.Callback, "state_dict")
            and not type(callback).__module__.startswith(OF_LIGHTNING)
        )
        for callback in trainer.callbacks
    )


def _overrides(thing: Any, base: type, name: str) -> bool:
    method = getattr(thing, name)
    return getattr(method, "__func__", None) is not getattr(base, name)


def saved_by_hooks(trainer: pl.Trainer) -> dict[str, Any]:
    """Returns what the hooks have added to a checkpoint, or replaced in it, by their keys."""
    before = _checkpoint(trainer)
    names = {_place(t): name for name, t in before["state_dict"].items() if t.numel()}
    checkpoint = dict(before)
    call._call_callbacks_on_save_checkpoint(trainer, checkpoint)  # noqa: SLF001 - no public name
    trainer.lightning_module.on_save_checkpoint(checkpoint)

    def named(tensor: Tensor) -> Any:
        name = names.get(_place(tensor)) if tensor.numel() else None
        return tensor.detach() if name is None else {OF_MODULE: name}

    changed = {k: v for k, v in checkpoint.items() if k not in before or v is not before[k]}
    return {key: map_tensors(named, value) for key, value in changed.items()}


def load_by_hooks(
    trainer: pl.Trainer, saved: Mapping[str, Any], callbacks: Mapping[str, Any]
) -> None:
    """Gives callbacks and module what their hooks have saved.

    Args:
        trainer: the trainer, whose module is restored.
        saved: as `saved_by_hooks` has returned it.
        callbacks: the states of callbacks, as their `state_dict` has returned them.
    """
    checkpoint = _checkpoint(trainer)
    tensors = checkpoint["state_dict"]

    def resolved(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() == {OF_MODULE}:
                return tensors[value[OF_MODULE]]
            return {key: resolved(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(resolved(entry) for entry in value)
        return value

    checkpoint |= {key: resolved(value) for key, value in saved.items()}
    checkpoint["callbacks"] = dict(callbacks)
    trainer.lightning_module.on_load_checkpoint(checkpoint)
    call._call_callbacks_on_load_checkpoint(trainer, checkpoint)  # noqa: SLF001 - no public name


def _checkpoint(trainer: pl.Trainer) -> dict[str, Any]:
    """Returns the checkpoint that hooks are given, with the tensors of the module itself; under
    zero3, where no rank has them whole, without."""
    module = trainer.lightning_module
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
        "state_dict": {} if isinstance(module, FSDPModule) else module.state_dict(),
    }


def _place(tensor: Tensor) -> tuple[int, Any, Any, Any]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def of_rank_zero(state: dict[str, Any]) -> dict[str, Any]:
    """Returns rank 0's state on all ranks, which call this together, with copies of all that is no
    tensor; of tensors beyond `SMALL_ELEMENTS` it returns this rank's own.

    Args:
        state: that of this rank.

    Raises:
        UserError: a value cannot be stored, or this rank lacks a tensor.
    """
    tensors: dict[str, Tensor] = {}
    json = flatten(state, "lightning", tensors)
    group = dist.group.WORLD
    if group is None:
        return _made(json, tensors)
    small = {name: t.cpu() for name, t in tensors.items() if t.numel() <= SMALL_ELEMENTS}
    text, small = broadcast_value((dumps(json), small), group)
    return _made(loads(text), {**tensors, **small})


def _made(json: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    def tensor_of(name: str) -> Tensor:
        if name not in tensors:
            raise UserError(
                f"rank 0's callbacks keep {name}, and this rank's do not: let callbacks keep the "
                "same tensors on all ranks"
            )
        return tensors[name]

    made: dict[str, Any] = unflatten(json, tensor_of)
    return made
