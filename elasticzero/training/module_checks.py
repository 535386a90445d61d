"""Says at `session.prepare` which of a model's modules cannot be trained here, and whose results
depend on the world size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

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


def _sparse(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield name


def batch_norm_note(model: nn.Module, device: torch.device) -> str | None:
    """Returns a sentence on a model whose statistics depend on the world size; None: there are no
    such modules."""
    norms = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
    ]
    if not norms:
        return None
    others = "" if len(norms) == 1 else f" and {len(norms) - 1} more"
    advice = (
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) makes them those of all ranks"
        if device.type == "cuda"
        else "GroupNorm and LayerNorm do not depend on it"
    )
    return (
        f"note: {norms[0]!r}{others} is a BatchNorm: its statistics are of one rank's "
        f"micro-batch, so that results depend on the world size and micro_batch; {advice}"
    )
