"""Gives each rank the whole model after training, where the strategy has divided it."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from elasticzero.session import Session


class WholeModel:
    """Keeps the form of a model, without its values, from before it is divided."""

    def __init__(self, session: Session, model: nn.Module) -> None:
        self._form = model
        if session._assignment.strategy not in ("zero3", "auto"):  # noqa: SLF001 - our own
            return
        empty = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in model.parameters()
        }
        self._form = copy.deepcopy(model, dict(empty))

    def after_training(self, session: Session, model: nn.Module) -> nn.Module:
        """Returns `model`, or its form with all values if its parameters are divided; all ranks
        call this together."""
        if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return model
        state, form = session.state_dict(), self._form
        wanted = form.state_dict()
        for name, tensor in wanted.items():
            value = state.get(name, torch.empty(tensor.shape, dtype=tensor.dtype))
            if dist.is_initialized():
                value = value.to(session.device)
                dist.broadcast(value, src=0)
            state[name] = value.cpu()
        form.load_state_dict(state, assign=True)
        if (tie_weights := getattr(form, "tie_weights", None)) is not None:
            tie_weights()
        return form.to(session.device)
