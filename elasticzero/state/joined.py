"""Lays tensors of one dtype end to end, and cuts them apart again.

It stands alone for what it depends on: which formats torch joins, and what a view is.
A model with many BatchNorms has thousands of small buffers, which are sent in each step. Several
calls of torch for each take longer than the message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_COMMON = frozenset(
    {
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    }
)
"""Formats of which torch joins tensors on all devices."""


def join(tensors: Iterable[Tensor]) -> Tensor:
    """Returns a copy of the elements of tensors of one dtype and device, end to end; of one at
    least."""
    flat = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]
    with torch.no_grad():
        if (dtype := flat[0].dtype) in _COMMON:
            return torch.cat(flat).resolve_conj().resolve_neg()
        plain = [part.resolve_conj().resolve_neg().contiguous() for part in flat]
        return torch.cat([part.view(torch.uint8) for part in plain]).view(dtype)


def cut(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Returns the tensors of these shapes whose elements lie end to end; they share its memory."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [
        part if len(shape) == 1 else part.view(shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]
