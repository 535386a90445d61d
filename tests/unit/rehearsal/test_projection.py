"""What stands for a value in a record: the same bits have the same digest, and the distance of two
values is known about."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elasticzero.rehearsal.projection import CHUNK, PROJECTIONS, leaves, live_value, projections
from elasticzero.rehearsal.records import LiveValue

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def of(value: Any) -> LiveValue:
    return live_value("buffer", "b", value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_changed_element_changes_the_digest(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(5, 7, generator=generator).to(dtype)
    other = tensor.clone()
    assert of(tensor) == of(other)
    other[4, 6] = not other[4, 6] if dtype is torch.bool else other[4, 6] + 1
    assert of(tensor).digest != of(other).digest


def test_shape_and_type_are_part_of_the_digest() -> None:
    zeros = torch.zeros(4)
    digests = [of(t).digest for t in (zeros, zeros.view(2, 2), zeros.to(torch.int32), zeros[:0])]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1:],
        lambda t: t.to_sparse(),
        lambda t: t.clone().requires_grad_(),
        lambda t: torch.view_as_complex(t.reshape(-1, 2)).conj(),
    ],
)
def test_a_view_counts_as_its_elements(view: Any) -> None:
    tensor = view(torch.arange(24.0).reshape(6, 4))
    with torch.no_grad():
        whole = tensor.to_dense() if tensor.is_sparse else tensor.resolve_conj().contiguous()
    assert of(tensor) == of(whole.clone())


def test_the_digest_reads_a_tensor_and_changes_nothing() -> None:
    before = torch.get_rng_state()
    tensor = torch.ones(3, requires_grad=True)
    of(tensor)
    assert torch.equal(torch.get_rng_state(), before)
    assert tensor._version == 0


@pytest.mark.parametrize("count", [1, 100, CHUNK + 17])
def test_sums_tell_the_distance_of_two_tensors(count: int) -> None:
    """The mean square of the differences is the squared distance, on average over the signs; for
    eight sums it lies within a factor of four of it, as good as always."""
    generator = torch.Generator().manual_seed(count)
    first = torch.randn(count, generator=generator, dtype=torch.float64)
    change = torch.randn(count, generator=generator, dtype=torch.float64) * 1e-6
    sums = [torch.tensor(projections("w", t)) for t in (first, first + change)]
    estimate = float((sums[1] - sums[0]).square().mean().sqrt())
    distance = float(change.norm())
    assert distance / 4 < estimate < distance * 4


def test_signs_belong_to_a_name_and_a_place() -> None:
    tensor = torch.ones(CHUNK * 2)
    assert projections("w", tensor) == projections("w", tensor.clone())
    assert projections("w", tensor) != projections("v", tensor)
    assert len(set(projections("w", tensor))) > 1
    one = torch.zeros(CHUNK * 2)
    one[CHUNK + 3] = 1
    assert {abs(number) for number in projections("w", one)} == {1.0}
    assert len(projections("w", one)) == PROJECTIONS


@pytest.mark.parametrize("value", [True, None, "text", b"x", torch.tensor([True])], ids=repr)
def test_what_is_no_number_has_no_sums(value: Any) -> None:
    assert of(value).projections == ()


@pytest.mark.parametrize("number", [6, 0.1, math.inf, math.nan, 10**400])
def test_plain_numbers_have_sums(number: float) -> None:
    live = of(number)
    assert len(live.projections) == PROJECTIONS
    assert live.text == repr(number) or live.text.endswith("...")
    assert of(number).digest == live.digest


def test_texts_are_short() -> None:
    assert of(torch.zeros(3, 4)).text == "float32[3, 4]"
    assert of(torch.tensor(6)).text == "6"
    assert of(torch.tensor([0.5])).text == "0.5"
    assert of(None).text == "None"
    assert len(of("x" * 500).text) <= 60


def test_the_order_of_a_set_counts_for_nothing() -> None:
    """That of texts differs between processes, and that of numbers by what came first."""
    other = {8}
    other.add(0)
    assert list(other) != list({0, 8})
    assert of(other).digest == of({0, 8}).digest
    assert of(other).digest != of({0, 9}).digest


class Thing:
    """An object of the script's own."""


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=3), inside),
    max_leaves=12,
)


@given(TREES, TREES)
def test_two_trees_have_the_same_leaves_only_if_they_are_equal(first: Any, second: Any) -> None:
    def flat(tree: Any) -> list[LiveValue]:
        return [live_value("tracked", name, leaf) for name, leaf in leaves("t", tree)]

    same = {(v.name, v.digest) for v in flat(first)} == {(v.name, v.digest) for v in flat(second)}
    assert same == (repr(first) == repr(second))


def test_leaves_are_named_as_python_reaches_them() -> None:
    tensor = torch.zeros(2)
    tree = {"a": [1, {"b": tensor}], 3: (None,), "d": deque([2.0]), "e": OrderedDict(), "f": []}
    named = dict(leaves("t", tree))
    assert named["t['a'][1]['b']"] is tensor
    assert named["t['a'][0]"] == 1
    assert named["t[3][0]"] is None
    assert named["t['d'][0]"] == 2.0
    assert named["t['e']"] == "empty dict"
    assert named["t['f']"] == "empty list"


def test_a_long_list_of_numbers_is_one_leaf() -> None:
    assert [name for name, _ in leaves("history", list(range(1000)))] == ["history"]
    assert len(list(leaves("history", list(range(5))))) == 5


def test_arrays_and_numbers_of_numpy_are_leaves() -> None:
    named = dict(leaves("t", {"a": np.arange(3), "n": np.float32(0.5)}))
    assert isinstance(named["t['a']"], Tensor)
    assert type(named["t['n']"]) is float


def test_an_object_counts_as_its_class() -> None:
    """Its address is another in each process."""
    [(_, leaf)] = leaves("t", Thing())
    assert of(leaf).digest == of(Thing()).digest


def test_a_value_that_contains_itself_has_an_end() -> None:
    endless: list[Any] = []
    endless.append(endless)
    [(name, _)] = leaves("t", endless)
    assert name.count("[0]") > 10
