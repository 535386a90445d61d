"""Spans and the rules that deal them, against lists of single elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticzero.spans import (
    EMPTY,
    Span,
    chunk,
    chunks_within,
    covering,
    even,
    fsdp_rows,
    intersect,
)

spans = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda p: Span(min(p), max(p)))
worlds = st.integers(1, 9)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2)])
def test_a_span_that_is_no_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"{start}, {stop}"):
        Span(start, stop)


@given(spans, spans)
def test_intersection_is_the_common_elements(a: Span, b: Span) -> None:
    common = set(range(a.start, a.stop)) & set(range(b.start, b.stop))
    both = intersect(a, b)
    assert set(range(both.start, both.stop)) == common
    assert bool(both) == bool(common)
    assert len(both) == len(common)


@given(st.integers(0, 50), worlds)
def test_chunks_are_ceil_sized_and_in_order(total: int, world: int) -> None:
    chunks = [chunk(total, world, rank) for rank in range(world)]
    size = -(-total // world)
    assert [i for c in chunks for i in range(c.start, c.stop)] == list(range(total))
    assert all(len(c) == size for c in chunks if c and c.stop < total)


@given(st.integers(0, 50), worlds, worlds, spans)
def test_the_ranks_at_one_place_of_all_rows_divide_its_chunk(
    total: int, row: int, replicas: int, within: Span
) -> None:
    world = row * replicas
    parts = {rank: chunk(total, world, rank, replicas) for rank in range(world)}
    for place in range(row):
        whole = chunk(total, row, place)
        pieces = [parts[rank] for rank in range(place, world, row)]
        indices = [i for part in pieces for i in range(part.start, part.stop)]
        assert indices == list(range(whole.start, whole.stop))
    within = intersect(within, Span(0, total))
    expected = {rank: part for rank, part in parts.items() if intersect(part, within)}
    assert dict(chunks_within(total, world, replicas, within)) == expected


@given(st.lists(st.integers(0, 9), max_size=6), worlds)
def test_even_cuts_the_tensors_laid_end_to_end(numels: list[int], world: int) -> None:
    flat = [(index, i) for index, numel in enumerate(numels) for i in range(numel)]
    size = -(-len(flat) // world)
    for rank in range(world):
        elements = [(i, e) for i, s in even(numels, world, rank) for e in range(s.start, s.stop)]
        assert elements == flat[rank * size : (rank + 1) * size]


@given(st.lists(st.integers(0, 6), max_size=3), worlds)
def test_fsdp_rows_cuts_rows_as_ceil_sized_chunks(shape: list[int], world: int) -> None:
    elements = np.arange(math.prod(shape)).reshape(shape)
    size = -(-shape[0] // world) if shape else 1
    for rank in range(world):
        span = fsdp_rows(shape, world, rank)
        rows = np.atleast_1d(elements)[rank * size : (rank + 1) * size]
        assert list(range(span.start, span.stop)) == rows.ravel().tolist()


@given(spans, st.lists(st.tuples(st.integers(0, 3), spans), max_size=6))
def test_covering_takes_each_element_from_its_first_holder(
    target: Span, held: list[tuple[int, Span]]
) -> None:
    first = {
        e: next((h for h, s in held if s.start <= e < s.stop), None)
        for e in range(target.start, target.stop)
    }
    lost = [e for e, holder in first.items() if holder is None]
    if lost:
        with pytest.raises(ValueError, match=f"nobody holds elements .{lost[0]},"):
            covering(target, held)
        return
    parts = covering(target, held)
    assert {e: h for h, s in parts for e in range(s.start, s.stop)} == first
    assert sum(len(s) for _, s in parts) == len(target)


def test_nothing_wanted_needs_nobody() -> None:
    assert covering(EMPTY, []) == []
