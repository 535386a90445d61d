"""Encodes gradients in fewer bytes for their way between ranks, and decodes them. Pure.

Shapes: E elements of a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from elasticzero.options.settings import Wire

LEAST_ELEMENTS = 1024
"""A smaller parameter's gradient is sent as it is: that costs less than to encode it."""
_GRAIN_BYTES = 16
"""The size of a message is a multiple of this, so that messages may lie end to end."""


class Codec(Protocol):
    """Encodes numbers in bytes."""

    def message_bytes(self, numel: int) -> int:
        """Returns the size of a message with this many elements."""

    def encode(self, values_E: Tensor, message: Tensor) -> None:
        """Writes values to a message, whose size is `message_bytes` of their number or more."""

    def decode(self, message: Tensor, values_E: Tensor) -> None:
        """Writes the values of a message to `values_E`."""

    def add(self, message: Tensor, sums_E: Tensor) -> None:
        """Adds the values of a message to `sums_E`, in the format of these."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Rounds each number to a shorter format."""

    dtype: torch.dtype

    def message_bytes(self, numel: int) -> int:
        return -(-numel * self.dtype.itemsize // _GRAIN_BYTES) * _GRAIN_BYTES

    def encode(self, values_E: Tensor, message: Tensor) -> None:
        self._numbers(message, values_E.numel()).copy_(values_E)

    def decode(self, message: Tensor, values_E: Tensor) -> None:
        values_E.copy_(self._numbers(message, values_E.numel()))

    def add(self, message: Tensor, sums_E: Tensor) -> None:
        sums_E.add_(self._numbers(message, sums_E.numel()))

    def _numbers(self, message: Tensor, numel: int) -> Tensor:
        return message.view(self.dtype)[:numel]


def codec_of(wire: Wire, parameter: Tensor) -> Codec | None:
    """Returns how the gradient of a parameter is encoded; None: it is sent as it is.

    Vectors are, for they are few and a step depends on each of their elements more than on one of a
    matrix. So is what has 16 bits already.
    """
    if wire == "fp32" or parameter.dim() < 2 or parameter.numel() < LEAST_ELEMENTS:
        return None
    return Cast(torch.bfloat16) if parameter.element_size() > torch.bfloat16.itemsize else None
