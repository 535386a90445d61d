"""Hides gradients that are partitioned from the script until its step.

Between `session.backward` and `session.step` a parameter's own gradient is that of one rank, or is
gone already. What a script does to it there (`clip_grad_norm_`, `clip_grad_value_`) would have no
effect, or a wrong one on each rank. So another tensor stands in its place, which refuses every use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from elasticzero.errors import UserError

REFUSED = (
    "the script uses parameters' gradients between session.backward and session.step, where the "
    "strategies zero1, zero2 and zero3 have them in parts: leave it to the session, which clips "
    "them by their norm with session.step(max_grad_norm=…); what else is to be done to them needs "
    "strategy ddp"
)


class Refusing(Tensor):
    """Raises `UserError` at any use."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UserError(REFUSED)


class HiddenGradients:
    """Hides the gradients of a model's parameters, and shows them again."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._refusing: list[Tensor] = [
            torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape).as_subclass(Refusing)
            for p in self._parameters
        ]
        self._hidden: list[Tensor | None] | None = None

    def hide(self) -> None:
        self._hidden = [parameter.grad for parameter in self._parameters]
        for parameter, refusing in zip(self._parameters, self._refusing, strict=True):
            parameter.grad = refusing

    def show(self) -> None:
        """Puts back what `hide` has hidden."""
        if self._hidden is None:
            return
        for parameter, gradient in zip(self._parameters, self._hidden, strict=True):
            parameter.grad = gradient
        self._hidden = None
