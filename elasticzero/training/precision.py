"""Makes a model compute in another number format, or compiled: `precision=` and `compile=` of
`session.prepare`.

Parameters, gradients and optimizer state keep their own format. The model stays the script's
object, with the same names in its state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from elasticzero.data.loader import map_tensors
from elasticzero.errors import UserError
from elasticzero.state.model import called_parts

FORMATS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The values of `precision`, each with the format of the forward pass; None: the parameters'."""
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""The modes of `torch.compile`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Says how a model's forward and backward are computed."""

    precision: str = "fp32"
    """One of `FORMATS`."""
    compiled: bool | str = False
    """True if `torch.compile` is applied; a text is its mode."""

    def __post_init__(self) -> None:
        if self.precision not in FORMATS:
            raise UserError(
                f"session.prepare got precision={self.precision!r}; it must be one of "
                f"{', '.join(FORMATS)}"
            )
        if not isinstance(self.compiled, bool) and self.compiled not in MODES:
            raise UserError(
                f"session.prepare got compile={self.compiled!r}; it must be False, True or a mode "
                f"of torch.compile: {', '.join(MODES)}"
            )

    @property
    def dtype(self) -> torch.dtype | None:
        """Returns the 16-bit format of the forward pass; None: it has that of the parameters."""
        return FORMATS[self.precision]

    def described(self) -> dict[str, str]:
        """Returns what must be equal on all ranks, by its name."""
        return {"precision": self.precision, "compile": str(self.compiled)}

    def check(self, parameters: Mapping[str, nn.Parameter], strategy: str) -> None:
        """Raises `UserError` for parameters that this precision cannot have."""
        if self.dtype is None:
            return
        refused = {torch.float64: "the forward pass would stay in 64 bits"}
        if self.precision == "fp16" and strategy == "ddp":
            refused[torch.float16] = "gradients of 16 bits would be lost when their scale is undone"
        for name, parameter in parameters.items():
            if (why := refused.get(parameter.dtype)) is not None:
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise UserError(
                    f"session.prepare got precision={self.precision!r}, but parameter {name!r} is "
                    f"{dtype}, and {why}: give a model of 32-bit parameters (model.float())"
                )

    def apply(self, model: nn.Module, device: torch.device, strategy: str) -> None:
        """Makes the model's forward compute so, in place.

        Under `zero3` each block is compiled by itself, because parameters are gathered and dropped
        in Python between them.

        Args:
            model: The model as it is laid over the ranks.
            device: Its device.
            strategy: The strategy's name.
        """
        mode = self.compiled if isinstance(self.compiled, str) else None
        entries = list(called_parts(model))
        if self.dtype is not None:
            for module in entries:
                _compute_in(module, device.type, self.dtype)
        if self.compiled and strategy == "zero3":
            for module in (block for entry in entries for block in _blocks_of_fsdp(entry)):
                module.__dict__["forward"] = torch.compile(module.forward, mode=mode)
        elif self.compiled:
            for module in entries:
                module.compile(mode=mode)


def _blocks_of_fsdp(part: nn.Module) -> list[nn.Module]:
    """Returns the modules that FSDP2 gathers by themselves in what a script calls, or the latter if
    there are none."""
    from torch.distributed.fsdp import FSDPModule

    inner: list[nn.Module] = [
        m for m in part.modules() if isinstance(m, FSDPModule) and m is not part
    ]
    return inner or [part]


def _compute_in(module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Replaces the module's forward by one under autocast, whose results have 32 bits.

    The replacement is a bound method: a deep copy of the module has one of its own.

    Args:
        module: The module.
        device_type: The type of its device, as `torch.autocast` takes it.
        dtype: The 16-bit format of the forward.
    """
    original = module.forward
    function: Callable[..., Any] = getattr(original, "__func__", original)
    is_method = getattr(original, "__self__", None) is module

    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            arguments = (self, *args) if is_method else args
            output = function(*arguments, **kwargs)
        return map_tensors(_to_float32, output)

    module.__dict__["forward"] = MethodType(forward, module)


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
