"""Slices, their ranks and their seeds, which no world changes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticzero.data.loader import BatchReader, RankSchedule, Request
from elasticzero.data.position import DataPosition, GlobalBatch
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.data.seeding import SeededRequest
from elasticzero.data.slices import cut, slice_seed, slices_of, slices_of_groups
from elasticzero.errors import UserError
from elasticzero.spans import Span


@given(
    length=st.integers(1, 200),
    size=st.integers(1, 40),
    world_size=st.integers(1, 17),
)
def test_all_worlds_have_the_same_slices(length: int, size: int, world_size: int) -> None:
    """Each slice is computed once, in order over the ranks, and all ranks have as many places."""
    batch = GlobalBatch(epoch=0, start=100, stop=100 + length)
    slices = [part.positions for part in slices_of(batch, 0, 1, size)]
    by_rank = [list(slices_of(batch, rank, world_size, size)) for rank in range(world_size)]
    real = [part for parts in by_rank for part in parts if part.slice is not None]
    assert [part.positions for part in real] == slices
    assert [part.slice for part in real] == list(range(len(slices)))
    assert sum(part.weight for parts in by_rank for part in parts) == length
    assert {len(parts) for parts in by_rank} == {-(-len(slices) // world_size)}
    assert by_rank[0][0].slice == 0
    for parts in by_rank:
        assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
        assert all(part.slices == len(slices) for part in parts)
        fillers = [part for part in parts if part.slice is None]
        assert all(part.weight == 0 and part.positions == slices[0] for part in fillers)


@given(length=st.integers(0, 200), size=st.integers(1, 40))
def test_no_slice_has_one_sample_where_two_are_possible(length: int, size: int) -> None:
    positions = Span(7, 7 + length)
    parts, shorter = cut(positions, size, never_one=True), cut(positions, size)
    assert [p for part in parts for p in range(part.start, part.stop)] == list(range(7, 7 + length))
    assert size == 1 or length == 1 or all(len(part) > 1 for part in parts)
    assert all(len(part) <= size + (size == 2) for part in parts)
    if size == 1 or length % size != 1 or length == 1:
        assert parts == shorter


@given(
    samples=st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(any),
    size=st.integers(1, 5),
    world_size=st.integers(1, 9),
)
def test_slices_of_groups_are_the_same_in_all_worlds(
    samples: list[int], size: int, world_size: int
) -> None:
    batch = GlobalBatch(epoch=1, start=50, stop=50 + sum(samples))
    world_size = min(world_size, len(samples))
    slices = list(slices_of_groups(batch, samples, 0, 1, size))
    rank_parts = [
        list(slices_of_groups(batch, samples, rank, world_size, size)) for rank in range(world_size)
    ]
    real = [part for parts in rank_parts for part in parts if part.slice is not None]
    assert [part.positions for part in real] == [part.positions for part in slices]
    assert [part.slice for part in real] == list(range(slices[0].slices))
    assert [part.weight for part in real] == [len(part.positions) for part in slices]
    assert sum(part.weight for part in slices) == len(batch)
    assert max(part.weight for part in slices) <= size
    assert rank_parts[0][0].slice == 0
    for rank, parts in enumerate(rank_parts):
        assert [part.slice for part in parts if part.slice is not None] == [
            *range(parts[0].runs[rank].start, parts[0].runs[rank].stop)
        ]
        assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len({len(parts) for parts in rank_parts}) == 1
    used = [part.positions for part in slices if part.weight]
    assert [p.start for p in used] == [50, *(p.stop for p in used[:-1])]


def test_every_use_of_every_slice_has_a_seed_of_its_own() -> None:
    seeds = {
        slice_seed(seed, dataset, epoch, start, use)
        for seed in (-1, 0, 1)
        for dataset in range(3)
        for epoch in range(3)
        for start in range(0, 40, 4)
        for use in ("read", "compute", "after")
    }
    assert len(seeds) == 3 * 3 * 3 * 10 * 3
    assert all(0 <= seed < 1 << 64 for seed in seeds)


class Noisy:
    """A dataset that draws from every generator."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [float(index), random.random(), np.random.random(), torch.rand(()).item()]
        return torch.tensor(drawn, dtype=torch.float64)


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.stack(samples), torch.rand(1, 4, dtype=torch.float64)])


def read(world_size: int, workers: int, first: int) -> dict[int, Any]:
    """What all ranks read from step `first` on, by the first sample of each slice."""
    plan = BatchPlan(order=SampleOrder(samples=20), global_batch=6, epochs=1)
    position = DataPosition(offset=6 * first, steps=first)
    by_start: dict[int, Any] = {}
    for rank in range(world_size):
        schedule = RankSchedule(plan=plan, rank=rank, world_size=world_size, virtual_batch=2)
        parts = [part for batch, _ in schedule.steps(position) for part in schedule.parts(batch, 1)]
        reader = BatchReader(
            dataset=Noisy(),  # it is no `Dataset`, as a script's may be
            device=torch.device("cpu"),
            collate_fn=collate,
            num_workers=workers,
            seeded=True,
        )
        for part, data in zip(parts, reader.batches(schedule.requests(position)), strict=True):
            by_start.setdefault(part.positions.start, data)
            assert torch.equal(by_start[part.positions.start], data)
    return by_start


def test_what_is_drawn_while_samples_are_read_is_the_same_in_all_worlds() -> None:
    """So it is with data workers, and where training goes on in mid-epoch."""
    one = read(1, 0, 0)
    assert len(one) == 10
    for world_size, workers in ((3, 0), (1, 2)):
        other = read(world_size, workers, 1)
        assert other.keys() == set(range(6, 20, 2))
        assert all(torch.equal(one[start], data) for start, data in other.items())


def test_a_request_names_what_the_order_says() -> None:
    plan = BatchPlan(order=SampleOrder(samples=20, seed=3), global_batch=6, epochs=1)
    schedule = RankSchedule(plan=plan, rank=0, world_size=1, virtual_batch=3)
    requests: list[Request] = list(schedule.requests(DataPosition(dataset=4)))
    assert all(isinstance(request, SeededRequest) for request in requests)
    asked = [request.indices for request in requests if isinstance(request, SeededRequest)]
    flat = [index for indices in asked for index in indices]
    assert flat == plan.order.indices(0, 0, 20).tolist()
    first = requests[0]
    assert isinstance(first, SeededRequest)
    assert first.seed == slice_seed(3, 4, 0, 0, "read")


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"virtual_batch": 4}, "virtual_batch is 4; global_batch, which is 6, must be a multiple"),
        ({"virtual_batch": 0}, "virtual_batch is 0; global_batch, which is 6, must be a multiple"),
        ({"virtual_batch": 3, "micro_batch": 3}, "leave out micro_batch="),
        ({"micro_batch": 0}, "micro_batch is 0; it must be at least 1"),
        ({}, "smaller than the world of 7 ranks"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, Any], text: str) -> None:
    plan = BatchPlan(order=SampleOrder(samples=20), global_batch=6, epochs=1)
    with pytest.raises(UserError, match=text):
        RankSchedule(plan=plan, rank=0, world_size=7, **sizes)


def test_more_ranks_than_slices_are_allowed() -> None:
    plan = BatchPlan(order=SampleOrder(samples=20), global_batch=6, epochs=1)
    RankSchedule(plan=plan, rank=0, world_size=7, virtual_batch=3)
