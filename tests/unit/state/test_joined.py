"""Tensors that are laid end to end are those that were joined."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elasticzero.state.joined import cut, join

DTYPES = [torch.float32, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2, torch.uint16]


def bytes_of(tensor: Tensor) -> list[int]:
    numbers: list[int] = (
        tensor.detach().resolve_conj().reshape(-1).contiguous().view(torch.uint8).tolist()
    )
    return numbers


@st.composite
def alike(draw: Any) -> list[Tensor]:
    """Tensors of one dtype, of any shapes and of every layout."""
    made = []
    dtype = draw(st.sampled_from(DTYPES))
    for index in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        count = torch.Size(shape).numel()
        numbers = torch.arange(count, dtype=torch.float32).reshape(shape)
        tensor = (numbers + index).to(dtype)
        kind = draw(st.sampled_from(["plain", "transposed", "conjugated", "parameter"]))
        if kind == "transposed":
            tensor = tensor.movedim(0, -1) if tensor.dim() > 1 else tensor
        elif kind == "conjugated" and dtype.is_complex:
            tensor = (tensor * 1j).conj()
        elif kind == "parameter" and dtype is torch.float32:
            tensor = nn.Parameter(tensor)
        made.append(tensor)
    return made


@given(alike())
def test_what_is_cut_apart_is_what_was_joined(tensors: list[Tensor]) -> None:
    flat = join(tensors)
    assert flat.dim() == 1 and not flat.requires_grad and not flat.is_conj()
    parts = cut(flat, [tuple(tensor.shape) for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        assert part.dtype == tensor.dtype and part.shape == tensor.shape
        assert bytes_of(part) == bytes_of(tensor)
        if tensor.numel():
            assert part.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
