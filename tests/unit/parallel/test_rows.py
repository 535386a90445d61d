"""Rows are divided as FSDP2 divides them, over as many ranks as there are, and with memory for as
many as the first one has."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticzero.parallel.fsdp.rows import division, room
from elasticzero.spans import fsdp_rows
from elasticzero.state.model import Spec

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@given(SHAPES, st.integers(1, 9))
def test_each_rank_has_the_rows_that_fsdp2_gives_it(shape: tuple[int, ...], ranks: int) -> None:
    specs = {"weight": Spec(dtype=torch.float32, shape=shape)}
    divided = division(specs, ranks)
    for rank in range(ranks):
        assert divided.span(rank, "weight") == fsdp_rows(shape, ranks, rank)
    first = torch.chunk(torch.empty(shape), ranks)[0]
    assert room(specs, ranks, lambda name: first)["weight"].shape == (first.numel(),)
    assert sum(len(divided.span(rank, "weight")) for rank in range(ranks)) == math.prod(shape)
