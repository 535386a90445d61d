"""Makes a model whole again after training, where the strategy has divided it."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from elasticzero.session import Session

OF_FSDP = "_is_fsdp_managed_module"
"""The mark that FSDP2 leaves in a model. transformers generates together with the other ranks by
it, of which there are none after training."""


class WholeModel:
    """Keeps the form of a model, without its values, from before it is divided.

    zero3 makes parts of a model's parameters, and other classes of its modules. The lines of a
    script that follow training work with the model alone, so that each rank needs it as it was.
    """

    def __init__(self, session: Session, model: nn.Module) -> None:
        self._model = model
        self._form: nn.Module | None = None
        self._gathered = False
        if session._assignment.strategy not in ("zero3", "auto"):  # noqa: SLF001 - our own
            return
        empty = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in model.parameters()
        }
        self._form = copy.deepcopy(model, dict(empty))

    def gather(self, session: Session) -> None:
        """Gathers all values on each rank if the model is divided; all ranks call this together, at
        the end of training."""
        if self._form is None or not any(isinstance(p, DTensor) for p in self._model.parameters()):
            return
        state = session.state_dict()
        for name, tensor in self._form.state_dict().items():
            value = state.get(name, torch.empty(tensor.shape, dtype=tensor.dtype))
            if dist.is_initialized():
                value = value.to(session.device)
                dist.broadcast(value, src=0)
            state[name] = value.cpu()
        self._form.load_state_dict(state, assign=True)
        if (tie_weights := getattr(self._form, "tie_weights", None)) is not None:
            tie_weights()
        self._form.to(session.device)
        self._gathered = True

    def restore(self) -> None:
        """Gives the model its own class, modules and values back, once the generation is over."""
        if not self._gathered or self._form is None:
            return
        model, form = self._model, self._form
        model.__class__ = type(form)
        for name, value in list(model.__dict__.items()):
            if name in nn.Module().__dict__ and isinstance(value, dict):
                model.__dict__[name] = form.__dict__[name]  # parameters, modules, hooks
            elif name == OF_FSDP or (name not in form.__dict__ and hasattr(type(form), name)):
                del model.__dict__[name]  # a mark, or a method that gathers the parameters
        self._form = None
