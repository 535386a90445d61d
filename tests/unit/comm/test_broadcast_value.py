"""How a value goes from one rank to the others: never as a pickle."""

from __future__ import annotations

import json
import random
from pathlib import PurePath
from typing import Any

import numpy as np
import pytest
import torch

from elasticzero.comm.broadcast_value import _packed, _unpacked
from elasticzero.errors import UserError

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64)


def received(value: Any) -> Any:
    """The value as another rank has it."""
    head, tensors = _packed(value)
    data = torch.cat([torch.zeros(0, dtype=torch.uint8), *tensors])
    return _unpacked(head, data, CPU)


def drawn_tensor(draw: random.Random) -> torch.Tensor:
    shape = [draw.randrange(4) for _ in range(draw.randrange(3))]
    tensor = torch.randn(shape).mul(3).to(draw.choice(DTYPES))
    return tensor.t() if tensor.dim() == 2 and draw.random() < 0.5 else tensor


def drawn(draw: random.Random, depth: int = 3) -> Any:
    plain = [None, True, -1, 1 << 80, 2.5, float("-inf"), "", "text/ü", "$tensor"]
    kinds = 3 if depth else 0
    match draw.randrange(-3, kinds):
        case 0:
            return [drawn(draw, depth - 1) for _ in range(draw.randrange(3))]
        case 1:
            return tuple(drawn(draw, depth - 1) for _ in range(draw.randrange(3)))
        case 2:
            keys = draw.sample(["a", "$b", 3, (1, "x"), None], draw.randrange(4))
            return {key: drawn(draw, depth - 1) for key in keys}
        case -1:
            return drawn_tensor(draw)
        case -2:
            return np.arange(draw.randrange(5), dtype=np.float32)[::-1]
        case _:
            return draw.choice(plain)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    match one:
        case torch.Tensor():
            assert one.dtype == other.dtype and torch.equal(one, other)
        case np.ndarray():
            assert one.dtype == other.dtype and np.array_equal(one, other)
        case list() | tuple():
            assert len(one) == len(other)
            for pair in zip(one, other, strict=True):
                assert_same(*pair)
        case dict():
            assert [*one] == [*other]
            for key in one:
                assert_same(one[key], other[key])
        case _:
            assert one == other


@pytest.mark.parametrize("seed", range(200))
def test_a_value_comes_as_it_was(seed: int) -> None:
    torch.manual_seed(seed)
    value = drawn(random.Random(seed))
    assert_same(value, received(value))


def test_a_view_comes_with_its_values_alone() -> None:
    whole = torch.arange(1000.0)
    head, tensors = _packed([whole[3:5], whole.to(torch.complex64)[:2].conj()])
    assert sum(tensor.numel() for tensor in tensors) == 2 * 4 + 2 * 8
    view, conjugate = _unpacked(head, torch.cat(tensors), CPU)
    assert view.untyped_storage().nbytes() == 8
    assert torch.equal(conjugate, torch.tensor([0j, 1 + 0j]))


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", PurePath("x"), len, [lambda: 1]])
def test_what_only_a_pickle_could_hold_is_refused(value: Any) -> None:
    with pytest.raises(UserError):
        _packed(value)


@pytest.mark.parametrize("dtype", ["load", "os", "ops", "Tensor"])
def test_a_message_names_nothing_but_dtypes(dtype: str) -> None:
    head = json.dumps([{"$tensor": "x"}, [["x", dtype, [1], True]]]).encode()
    with pytest.raises((ValueError, AttributeError)):
        _unpacked(head, torch.zeros(8, dtype=torch.uint8), CPU)
