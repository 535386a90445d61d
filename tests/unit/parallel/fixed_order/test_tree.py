"""The fixed tree gives the same sum, bracket by bracket, for every way to deal its leaves."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticzero.data.slices import run_of
from elasticzero.parallel.fixed_order.tree import PartialSums, largest_nodes
from elasticzero.spans import Span


def bracketed(left: str, right: str) -> str:
    return f"({left}+{right})"


def by_halves(start: int, stop: int) -> str:
    """The tree from its definition: the left child is the largest power of two that leaves a
    rest."""
    if stop - start == 1:
        return str(start)
    width = 1 << (stop - start - 1).bit_length() - 1
    return bracketed(by_halves(start, start + width), by_halves(start + width, stop))


def sums_of(run: Span, slices: int) -> PartialSums[str]:
    sums = PartialSums(slices, bracketed)
    for index in range(run.start, run.stop):
        sums.put(Span(index, index + 1), str(index))
    return sums


@given(slices=st.integers(1, 90), world_size=st.integers(1, 40))
def test_every_world_adds_in_the_same_brackets(slices: int, world_size: int) -> None:
    whole = PartialSums(slices, bracketed)
    for rank in range(world_size):
        run = run_of(slices, rank, world_size)
        sums = sums_of(run, slices)
        nodes = [node for node, _ in sums.nodes]
        assert nodes == largest_nodes(run, slices)
        assert sum(len(node) for node in nodes) == len(run)
        assert len(nodes) <= 2 * max(1, slices.bit_length())
        for node, value in sums.nodes:
            assert value == by_halves(node.start, node.stop)
            whole.put(node, value)
    assert whole.total() == by_halves(0, slices)


@given(slices=st.integers(1, 300))
def test_one_rank_holds_few_sums_at_a_time(slices: int) -> None:
    sums = PartialSums(slices, partial(int.__add__))
    for index in range(slices):
        sums.put(Span(index, index + 1), 1)
        assert len(sums.nodes) <= slices.bit_length()
    assert sums.total() == slices


def test_a_missing_slice_is_an_error() -> None:
    sums = sums_of(Span(0, 3), 4)
    with pytest.raises(ValueError, match="not the whole tree of 4"):
        sums.total()
