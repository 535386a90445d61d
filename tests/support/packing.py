"""Optimizers that pack what they keep, as torchao's do: in tensors that wrap other ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Blocks(Tensor):
    """Wraps codes of 8 bits, with a scale for each block of them."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, most: int) -> Blocks:
        made: Blocks = Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )
        return made

    def __init__(self, codes: Tensor, scale: Tensor, most: int) -> None:
        self.codes, self.scale, self.most = codes, scale, most

    @classmethod
    def of(cls, values: Tensor, block: int, most: int = 100) -> Blocks:
        rows = values.reshape(-1, block)
        scale = rows.abs().amax(1) / most
        codes = (rows / scale.clip(1e-12)[:, None]).round().to(torch.int8)
        return cls(codes.view(values.shape), scale, most)

    def values(self) -> Tensor:
        rows = self.codes.reshape(len(self.scale), -1) * self.scale[:, None]
        return rows.view(self.codes.shape)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, int]]:
        return ["codes", "scale"], {"most": self.most}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Tensor], options: Mapping[str, int], size: Any, stride: Any
    ) -> Blocks:
        return cls(inner["codes"], inner["scale"], **options)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, *arguments: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


class Packing(torch.optim.Optimizer):
    """Keeps a momentum, packed where a parameter has `least` elements or more."""

    def __init__(self, parameters: Any, block: int = 2, least: int = 1) -> None:
        super().__init__(parameters, {"lr": 0.1, "block": block, "least": least})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    def update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        state["steps"] = state.get("steps", 0) + 1
        kept, new = state.get("momentum"), parameter.grad
        assert new is not None
        if kept is not None:
            new = 0.9 * (kept.values() if isinstance(kept, Blocks) else kept) + new
        packs = new.numel() >= group["least"] and new.numel() % group["block"] == 0
        state["momentum"] = Blocks.of(new, group["block"]) if packs else new.clone()
        parameter -= group["lr"] * new


class LargePacking(Packing):
    """Packs as torchao does: not for parameters as small as dummies are."""

    __module__ = "torchao.optim.adam"

    def __init__(self, parameters: Any, block: int = 4) -> None:
        super().__init__(parameters, block, least=16)
