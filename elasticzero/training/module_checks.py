"""Says at `session.prepare` which of a model's modules cannot be trained here, and whose results
depend on the world size."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from elasticzero.errors import UserError
from elasticzero.state.model import called_parts


def check_modules(model: nn.Module, strategy: str, device: torch.device, *, alone: bool) -> None:
    """Checks that each module of a model can be trained.

    Args:
        model: The model.
        strategy: The strategy's name.
        device: The rank's device.
        alone: Whether no other rank takes part, now or later.

    Raises:
        UserError: A module cannot be trained; the error has its name.
    """
    if strategy == "zero3":
        for name in _sparse(model):
            raise UserError(
                f"module {name!r} is an embedding with sparse=True, and zero3 sums no sparse "
                "gradients, for FSDP2 does not: build it with sparse=False, or use ddp, zero1 or "
                "zero2, which make its gradient dense"
            )
        _check_parts(model)
    if strategy != "ddp":
        _check_memory(model, strategy)
    if strategy == "zero3" or not alone:
        for name in _renormalizing(model):
            raise UserError(
                f"module {name!r} is an embedding with max_norm=, whose forward changes the rows "
                "that it looks up, on one rank alone: build it without max_norm=, and after "
                "session.step() scale all rows of its weight, as torch.renorm(weight, 2, 0, "
                "max_norm) does, under ddp, zero1 or zero2"
            )
    if device.type == "cpu" and not (alone and strategy != "zero3"):
        for name, module in model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise UserError(
                    f"module {name!r} is a SyncBatchNorm, which torch has for GPUs only, and this "
                    "rank trains on the CPU: use BatchNorm, whose statistics are of one rank's "
                    "micro-batch, or GroupNorm"
                )


def _check_parts(model: nn.Module) -> None:
    """Raises `UserError` for a parameter that no part which a script calls has to itself."""
    owners: dict[int, str] = {}
    parts = set(called_parts(model))
    for name, module in model.named_modules():
        if module in parts:
            for parameter in module.parameters():
                if (other := owners.setdefault(id(parameter), name)) != name:
                    raise UserError(
                        f"the model has no forward, and its parts {other!r} and {name!r} share a "
                        "parameter, which zero3 gathers for one of them only: give the model a "
                        "forward that calls them, or use ddp, zero1 or zero2"
                    )
    for name, parameter in model.named_parameters():
        if id(parameter) not in owners:
            raise UserError(
                f"parameter {name!r} is in no part of the model with a forward, and zero3 gathers "
                "parameters where such a part is called: give the module that has it a forward, or "
                "use ddp, zero1 or zero2"
            )


def _check_memory(model: nn.Module, strategy: str) -> None:
    """Checks that no two parameters are parts of the same memory.

    Args:
        model: The model.
        strategy: A strategy that lays parameters anew, each by itself.

    Raises:
        UserError: Two parameters have elements in common, as a weight and its transpose do.
    """
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel() and not parameter.is_meta and type(parameter.data) is Tensor:
            steps = zip(parameter.shape, parameter.stride(), strict=True)
            first = int(parameter.storage_offset())
            last = first + sum((int(size) - 1) * int(stride) for size, stride in steps)
            storage = parameter.untyped_storage().data_ptr()
            size_bytes = int(parameter.element_size())
            span = (first * size_bytes, (last + 1) * size_bytes, name)
            spans.setdefault(storage, []).append(span)
    for of_one in spans.values():
        for (_, stop, name), (start, _, other) in pairwise(sorted(of_one)):
            if start < stop:
                raise UserError(
                    f"parameters {name!r} and {other!r} share memory, and {strategy} would train "
                    "each by itself: make them one parameter that the forward uses twice, "
                    "transposed there where it needs to be, or use ddp"
                )


def _renormalizing(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            yield name


def _sparse(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield name


def batch_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules, with their names, whose statistics are of one rank's micro-batch."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            yield name, module


def watch_batch_norms(model: nn.Module) -> None:
    """Has a BatchNorm that is to compute the variance of one value raise `UserError`, where torch
    raises an error that does not say what to do."""
    for name, module in batch_norms(model):
        module.register_forward_pre_hook(partial(_check_values, name))


def _check_values(name: str, module: nn.Module, inputs: Any) -> None:
    if torch.compiler.is_compiling() or not inputs or not isinstance(inputs[0], Tensor):
        return
    shape = inputs[0].shape
    computes = module.training or getattr(module, "running_mean", None) is None
    if computes and len(shape) > 1 and shape[0] and math.prod((shape[0], *shape[2:])) == 1:
        raise UserError(
            f"module {name!r}, a BatchNorm, has one value of each channel, from a micro-batch of "
            "one sample, and a variance needs two: where a global batch has two samples no "
            "micro-batch has one, so give session.batches drop_last=True, a global_batch= that "
            "leaves two at an epoch's end, or a larger micro_batch="
        )


def refuse_wrappers(model: nn.Module) -> None:
    """Has a DistributedDataParallel around this model raise `UserError` when the script makes it,
    which would average gradients a second time."""
    prepared = weakref.ref(model)

    def check(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(parent, DistributedDataParallel) and child is prepared():
            raise UserError(
                "the model that session.prepare has returned is given to a "
                "DistributedDataParallel, which would average gradients once more: leave it out, "
                "for the session sums them"
            )

    weakref.finalize(model, register_module_module_registration_hook(check).remove)


def batch_norm_note(model: nn.Module, device: torch.device) -> str | None:
    """Returns a sentence on a model whose statistics depend on the world size, unless its batches
    are cut into slices; None: there are no such modules."""
    norms = [name for name, _ in batch_norms(model)]
    if not norms:
        return None
    which = f"{norms[0]!r} is a BatchNorm: its"
    if len(norms) > 1:
        which = f"{norms[0]!r} and {len(norms) - 1} more are BatchNorms: their"
    advice = (
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) makes them those of all ranks"
        if device.type == "cuda"
        else "GroupNorm and LayerNorm do not depend on it"
    )
    return (
        f"note: {which} statistics are of one rank's micro-batch, so that results depend on the "
        f"world size and micro_batch; with virtual_batch= in session.batches they do not, and "
        f"{advice}"
    )
