"""Hides gradients that are partitioned from the script until its step, and gives the script's own
function what it may change of them.

Between `session.backward` and `session.step` a parameter's own gradient is that of one rank, or is
gone already. What a script does to it there (`clip_grad_norm_`, `clip_grad_value_`) would have no
effect, or a wrong one on each rank. So another tensor stands in its place, which refuses every use.
A gradient that no strategy sums, of a parameter that was frozen at first, is refused as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from elasticzero.errors import UserError

REFUSED = (
    "the script uses parameters' gradients between session.backward and session.step, where the "
    "strategies zero1, zero2 and zero3 have them in parts: give session.on_gradients a function, "
    "which looks at them or changes them in every strategy; the session clips them by their norm "
    "with session.step(max_grad_norm=…)"
)

GradientFunction = Callable[[str, Tensor], Tensor | float | None]
"""Takes a parameter's name and the elements of its gradient that are stepped here."""


@dataclass(slots=True)
class GradientHook:
    """Calls the script's function with the gradients of a step; `session.on_gradients` makes it."""

    function: GradientFunction
    step: Callable[[], int]
    """Returns the number of steps applied so far."""
    sums: dict[str, float] = field(default_factory=dict)
    """Values of the function in the newest step, summed over all ranks, by parameter."""

    def call(self, gradients: Mapping[str, tuple[int, Tensor]]) -> dict[str, float]:
        """Calls the function with each gradient, which it may change, and returns its results.

        Random numbers that the function draws from torch are the same on all ranks that have the
        same elements, and those of the script itself are not disturbed.

        Args:
            gradients: The number of this rank's first element, and its elements, by parameter.
        """
        gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        returned: dict[str, Tensor | float | None] = {}
        with torch.random.fork_rng(devices=gpus), torch.no_grad():
            for name, (start, gradient) in gradients.items():
                torch.manual_seed(zlib.crc32(f"{name}/{start}".encode()) << 31 | self.step())
                elements = gradient.reshape(-1)
                returned[name] = self.function(name, elements)
                if not gradient.is_contiguous():  # `elements` is a copy then
                    gradient.copy_(elements.view(gradient.shape))
        return {name: 0.0 if value is None else float(value) for name, value in returned.items()}


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


def check_frozen(frozen: Mapping[str, nn.Parameter]) -> None:
    """Raises `UserError` where one of these, which needed no gradient at first, has one."""
    for name, parameter in frozen.items():
        if parameter.grad is not None:
            raise UserError(
                f"parameter {name!r} has a gradient, but needed none when session.prepare was "
                "called, so it is not summed over the ranks: freeze it after session.prepare, "
                "which every generation calls anew"
            )
