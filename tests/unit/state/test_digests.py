"""Digests of tensors: what changes them, on the CPU and as a GPU takes them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from elasticzero.state.digests import (
    COLUMNS,
    change_marks,
    combined,
    digests,
    of_value,
    same_bits,
    sums_of,
)

LENGTHS = [0, 1, 3, 4, 5, 4 * COLUMNS - 1, 4 * COLUMNS, 4 * COLUMNS + 3, 40 * COLUMNS + 5]


def word(data: Tensor) -> int:
    return int(sums_of(data).item())


@pytest.mark.parametrize("length", LENGTHS)
def test_every_changed_bit_changes_a_gpu_s_digest(length: int) -> None:
    data = torch.randint(0, 256, (length,), dtype=torch.uint8)
    before, draw = word(data), random.Random(length)
    assert word(data.clone()) == before
    for _ in range(min(64, 8 * length)):
        at, bit = draw.randrange(length), draw.randrange(8)
        data[at] ^= 1 << bit
        assert word(data) != before, (at, bit)
        data[at] ^= 1 << bit


def test_exchanged_words_and_equal_changes_change_a_gpu_s_digest() -> None:
    """A plain sum would miss both."""
    exchanged = torch.arange(4 * COLUMNS, dtype=torch.int32)
    before = word(exchanged.view(torch.uint8))
    for one, other in [(0, 1), (3, 3 + COLUMNS), (5, 9 + 2 * COLUMNS)]:
        exchanged[one], exchanged[other] = exchanged[other].item(), exchanged[one].item()
        assert word(exchanged.view(torch.uint8)) != before
        exchanged[one], exchanged[other] = exchanged[other].item(), exchanged[one].item()
        exchanged[one] += 7
        exchanged[other] -= 7
        assert word(exchanged.view(torch.uint8)) != before
        exchanged[one] -= 7
        exchanged[other] += 7
        top = torch.tensor(-(1 << 31), dtype=torch.int32)
        exchanged[one] ^= top
        exchanged[other] ^= top
        assert word(exchanged.view(torch.uint8)) != before
        exchanged[one] ^= top
        exchanged[other] ^= top
    assert word(exchanged.view(torch.uint8)) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_any_tensor_has_a_digest_of_its_elements(dtype: torch.dtype) -> None:
    whole = torch.arange(24).view(4, 6).to(dtype)
    odd = {
        "transposed": whole.t().contiguous().t(),
        "part": torch.cat([whole, whole])[4:],
        "itself": whole,
    }
    assert len(set(digests(odd).values())) == 1
    assert digests({"scalar": torch.tensor(1.0), "none": torch.empty(0)}).keys() == {
        "scalar",
        "none",
    }


def test_a_table_s_number_does_not_depend_on_its_order() -> None:
    """It depends on its names and values."""
    one = combined({"a": 1, "b": 2})
    assert one == combined({"b": 2, "a": 1})
    assert len({one, combined({"a": 2, "b": 1}), combined({"a": 1}), combined({})}) == 4
    assert 0 <= one < 1 << 62
    assert of_value({"x": [1, 2.5, None]}) != of_value({"x": [1, 2.5, 0]})


def changed(tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> bool:
    before = change_marks({"t": tensor})
    assert change_marks({"t": tensor}) == before
    change(tensor)
    return change_marks({"t": tensor}) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("size", [1, 1000, 100_003])
@pytest.mark.parametrize("start", [0, 1])
def test_a_mark_shows_what_torch_counts_and_what_is_long_enough(
    dtype: torch.dtype, size: int, start: int
) -> None:
    tensor = torch.zeros(size + start, dtype=dtype)[start:]
    assert changed(tensor, lambda t: t[-1:].fill_(1))
    assert changed(tensor, lambda t: t.data.logical_not_())
    many = 1024 // tensor.element_size()
    for first in range(0, max(1, size - many), 997):
        assert changed(tensor, lambda t: t.data[first : first + many].logical_not_())  # noqa: B023
    with torch.no_grad():
        assert changed(tensor, lambda t: setattr(t, "data", t.clone()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("start", [0, 1, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 64])
def test_bits_are_compared_and_not_values(dtype: torch.dtype, start: int, count: int) -> None:
    """Whatever the first byte's place in memory, and the number of bytes."""
    whole = (torch.arange(80) % 2).to(dtype)
    first, second = whole[start : start + count], whole.clone()[start : start + count]
    assert same_bits(first, second)
    if count:
        second[-1] = ~second[-1] if dtype is torch.bool else second[-1] + 1
        assert not same_bits(first, second)


def test_bits_of_unusual_tensors() -> None:
    numbers = torch.tensor([float("nan"), 0.0])
    assert same_bits(numbers, numbers.clone())
    assert not same_bits(numbers, torch.tensor([float("nan"), -0.0]))
    square = torch.arange(16.0).reshape(4, 4)
    assert same_bits(square.t(), square.t().contiguous())
    assert same_bits(torch.tensor(1.0), torch.tensor(1.0))
    waves = torch.tensor([1 + 2j, 3 - 1j])
    assert same_bits(waves.conj(), torch.tensor([1 - 2j, 3 + 1j]))
    assert not same_bits(waves.conj(), waves)
