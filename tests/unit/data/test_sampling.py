"""The order of samples and how it is dealt: each sample once, whatever the world."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticzero.data.loader import RankSchedule
from elasticzero.data.position import DataPosition, GlobalBatch
from elasticzero.data.sampling import (
    BatchPlan,
    SampleOrder,
    micro_batches,
    permuted,
    share,
    share_of,
)
from elasticzero.errors import UserError
from elasticzero.options.settings import DataChange
from elasticzero.serialization import decode, encode

sizes = st.integers(1, 2000)
seeds = st.integers(-(2**70), 2**70)
BATCH: tuple[DataChange, ...] = ("batch",)


def walk(plan: BatchPlan, position: DataPosition) -> list[GlobalBatch]:
    batches = []
    while (next_batch := plan.next(position)) is not None:
        batch, position = next_batch
        batches.append(batch)
    return batches


@given(samples=sizes, seed=seeds, epoch=st.integers(0, 2**40))
def test_every_epoch_is_a_permutation(samples: int, seed: int, epoch: int) -> None:
    indices = SampleOrder(samples=samples, seed=seed).indices(epoch, 0, samples)
    assert sorted(indices.tolist()) == list(range(samples))


@given(samples=sizes, seed=seeds, data=st.data())
def test_any_part_is_computed_by_itself(samples: int, seed: int, data: st.DataObject) -> None:
    order = SampleOrder(samples=samples, seed=seed)
    start = data.draw(st.integers(0, samples))
    stop = data.draw(st.integers(start, samples))
    whole = order.indices(3, 0, samples)
    assert order.indices(3, start, stop).tolist() == whole[start:stop].tolist()


def test_a_huge_dataset_needs_no_table() -> None:
    samples = 10**15
    indices = permuted(np.array([0, 1, samples - 1], dtype=np.uint64), samples, 0, 0)
    assert len(set(indices.tolist())) == 3
    assert all(0 <= index < samples for index in indices.tolist())


def test_seed_and_epoch_change_the_order_and_it_looks_random() -> None:
    order = SampleOrder(samples=1000, seed=1)
    first = order.indices(0, 0, 1000)
    assert first.tolist() != order.indices(1, 0, 1000).tolist()
    assert first.tolist() != SampleOrder(samples=1000, seed=2).indices(0, 0, 1000).tolist()
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.15
    assert abs(np.corrcoef(first, order.indices(1, 0, 1000))[0, 1]) < 0.15


def test_the_order_never_changes_between_versions() -> None:
    assert SampleOrder(samples=10, seed=7).indices(2, 0, 10).tolist() == ORDER_OF_10


ORDER_OF_10 = [0, 8, 1, 3, 4, 9, 5, 2, 6, 7]


def test_without_shuffle_the_order_is_the_datasets() -> None:
    assert SampleOrder(samples=5, shuffle=False).indices(9, 1, 4).tolist() == [1, 2, 3]


@given(
    start=st.integers(0, 100),
    size=st.integers(1, 200),
    world_size=st.integers(1, 17),
    micro=st.one_of(st.none(), st.integers(1, 9)),
)
def test_ranks_share_a_batch_evenly(
    start: int, size: int, world_size: int, micro: int | None
) -> None:
    batch = GlobalBatch(epoch=0, start=start, stop=start + size)
    shares = [share(batch, rank, world_size) for rank in range(world_size)]
    assert [p for s in shares for p in range(s.start, s.stop)] == list(range(start, start + size))
    lengths = [len(s) for s in shares]
    assert max(lengths) - min(lengths) <= 1
    counts = set()
    for rank in range(world_size):
        parts = list(micro_batches(batch, shares[rank], max(lengths), micro))
        counts.add(len(parts))
        real = [part for part in parts if part.weight]
        positions = [p for m in real for p in range(m.positions.start, m.positions.stop)]
        assert positions == list(range(shares[rank].start, shares[rank].stop))
        assert all(len(part.positions) >= 1 for part in parts)
        assert all(len(part.positions) <= (micro or size) for part in parts)
        assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(counts) == 1


@given(
    samples=st.integers(1, 200),
    total=st.integers(1, 60),
    world_size=st.integers(1, 17),
    micro=st.one_of(st.none(), st.integers(2, 9)),
)
def test_no_rank_has_one_sample_where_two_are_possible(
    samples: int, total: int, world_size: int, micro: int | None
) -> None:
    """Each sample counts once all the same, and all ranks have as many micro-batches."""
    total = max(total, world_size)
    order = SampleOrder(samples=samples)
    plan = BatchPlan(order=order, global_batch=total, epochs=1, never_one=True)
    ranks = [
        RankSchedule(plan=plan, rank=rank, world_size=world_size, micro_batch=micro)
        for rank in range(world_size)
    ]
    used: list[int] = []
    for batch, _ in ranks[0].steps(DataPosition()):
        parts = [schedule.parts(batch, 1) for schedule in ranks]
        assert len({len(of_rank) for of_rank in parts}) == 1
        for part in (part for of_rank in parts for part in of_rank):
            if part.weight:
                assert part.weight == len(part.positions) <= (micro or total) + (micro == 2)
                used += range(part.positions.start, part.positions.stop)
            assert len(part.positions) == len(batch) == 1 or len(part.positions) > 1
    assert used == list(range(samples))


@settings(max_examples=50)
@given(
    samples=st.integers(1, 300),
    batches=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    epochs=st.integers(1, 3),
)
def test_a_changed_batch_size_goes_on_from_the_same_sample(
    samples: int, batches: list[int], epochs: int
) -> None:
    order = SampleOrder(samples=samples, seed=5)
    position, used = DataPosition(), []
    for i, size in enumerate(batches):
        plan = BatchPlan(order=order, global_batch=size, epochs=epochs)
        position = plan.start(position, 0, allowed=BATCH)
        steps = 0
        while (next_batch := plan.next(position)) is not None and (
            steps < 3 or i == len(batches) - 1
        ):
            batch, position = next_batch
            used += [(batch.epoch, p) for p in range(batch.start, batch.stop)]
            steps += 1
    assert used == [(epoch, p) for epoch in range(epochs) for p in range(samples)]


@given(samples=st.integers(1, 100), size=st.integers(1, 30), epochs=st.integers(1, 4))
def test_total_steps_counts_what_the_loop_does(samples: int, size: int, epochs: int) -> None:
    order = SampleOrder(samples=samples)
    plan = BatchPlan(order=order, global_batch=size, epochs=epochs)
    assert plan.steps_from(DataPosition()) == len(walk(plan, DataPosition()))
    both = replace(plan, steps=7)
    assert both.steps_from(DataPosition()) == len(walk(both, DataPosition())) <= 7
    if size <= samples:
        short = replace(plan, drop_last=True)
        batches = walk(short, DataPosition())
        assert short.steps_from(DataPosition()) == len(batches)
        assert {len(batch) for batch in batches} == {size}


def test_steps_alone_runs_over_as_many_epochs_as_it_takes() -> None:
    plan = BatchPlan(order=SampleOrder(samples=10), global_batch=4, steps=7)
    assert [(b.epoch, b.start, b.stop) for b in walk(plan, DataPosition())] == [
        (0, 0, 4), (0, 4, 8), (0, 8, 10),
        (1, 0, 4), (1, 4, 8), (1, 8, 10),
        (2, 0, 4),
    ]  # fmt: skip


def test_more_epochs_go_on_where_fewer_ended() -> None:
    order = SampleOrder(samples=10)
    ended = DataPosition()
    plan = BatchPlan(order=order, global_batch=4, epochs=1)
    while (next_batch := plan.next(ended)) is not None:
        ended = next_batch[1]
    longer = BatchPlan(order=order, global_batch=4, epochs=2)
    assert [batch.epoch for batch in walk(longer, longer.start(ended, 0))] == [1, 1, 1]


def test_another_order_in_mid_epoch_is_refused() -> None:
    plan = BatchPlan(order=SampleOrder(samples=10, seed=0), global_batch=4, epochs=2)
    next_batch = plan.next(plan.start(DataPosition(), 0))
    assert next_batch is not None
    other = BatchPlan(order=SampleOrder(samples=10, seed=1), global_batch=4, epochs=2)
    with pytest.raises(UserError, match="some samples would be used twice"):
        other.start(next_batch[1], 0)
    after = other.start(next_batch[1], 1)
    assert (after.epoch, after.offset, after.first_epoch, after.order) == (1, 0, 1, [10, 1, True])


def test_another_order_after_a_whole_epoch_is_taken() -> None:
    """`[…] stopped in the middle of an epoch`, it said of an epoch that was complete."""
    ended = DataPosition(epoch=0, offset=10, steps=3, order=[10, 0, True])
    longer = BatchPlan(order=SampleOrder(samples=12, seed=0), global_batch=4, epochs=2)
    position = longer.start(ended, 0)
    assert [(b.epoch, b.start) for b in walk(longer, position)] == [(1, 0), (1, 4), (1, 8)]


@given(
    samples=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    loops=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(1, 9),
            st.one_of(st.none(), st.integers(1, 3)),
            st.one_of(st.none(), st.integers(0, 12)),
            st.integers(1, 1000),
        ),
        min_size=1,
        max_size=8,
    ),
    broken=st.lists(st.integers(0, 60), max_size=4),
)
def test_loops_use_each_sample_once_an_epoch(
    samples: list[int],
    loops: list[tuple[int, int, int | None, int | None, int]],
    broken: list[int],
) -> None:
    """Over the same datasets in turn, with steps, epochs and breaks, and begun again anywhere."""
    used: dict[int, list[tuple[int, int]]] = {}
    position, count = DataPosition(), 0
    for number, (dataset, size, epochs, steps, breaks_after) in enumerate(loops):
        dataset %= len(samples)
        if epochs is None and steps is None:
            epochs = 1
        order = SampleOrder(samples=samples[dataset])
        plan = BatchPlan(order=order, global_batch=size, epochs=epochs, steps=steps)
        position = plan.start(position, number, dataset)
        expected, done = plan.steps_from(position), 0
        while (next_batch := plan.next(position)) is not None and done < breaks_after:
            batch, after = next_batch
            position = plan.wrapped(after) if number % 2 else after
            into = used.setdefault(dataset, [])
            into += [(batch.epoch, p) for p in range(batch.start, batch.stop)]
            done, count = done + 1, count + 1
            if count in broken:  # another generation
                position = decode(DataPosition, json.loads(json.dumps(encode(position))))
                position = plan.start(position, number, dataset)
            assert plan.steps_from(position) == expected - done
        assert done == min(expected, breaks_after)
    for dataset, places in used.items():
        length = samples[dataset]
        assert places == [divmod(i, length) for i in range(len(places))]


def test_another_seed_begins_another_epoch() -> None:
    by_hand = [
        BatchPlan(order=SampleOrder(samples=10, seed=seed), global_batch=4, steps=2)
        for seed in range(3)
    ]
    position, seen = DataPosition(), []
    for loop, plan in enumerate(by_hand):
        position = plan.start(position, loop)
        for batch in walk(plan, position):
            seen.append((batch.epoch, batch.start))
        position = replace(position, offset=8, steps=2)
    assert seen == [(0, 0), (0, 4), (1, 0), (1, 4), (2, 0), (2, 4)]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"global_batch": 0}, "at least 1"),
        ({"epochs": None}, "epochs=… or steps=…"),
        ({"global_batch": 11, "drop_last": True}, "nothing to do"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change: dict[str, object], complaint: str) -> None:
    plan = BatchPlan(order=SampleOrder(samples=10), global_batch=4, epochs=1)
    with pytest.raises(UserError, match=complaint):
        replace(plan, **change)  # type: ignore[arg-type]


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(UserError, match="0 samples"):
        SampleOrder(samples=0)


@given(batches=st.integers(0, 50), world_size=st.integers(1, 9))
def test_an_evaluation_counts_each_batch_once(batches: int, world_size: int) -> None:
    hands = [list(share_of(batches, rank, world_size)) for rank in range(world_size)]
    assert len({len(hand) for hand in hands}) == 1
    counted = sorted(index for hand in hands for index, counts in hand if counts)
    assert counted == list(range(batches))


@given(samples=sizes, size=sizes, drop_last=st.booleans())
def test_a_completed_epoch_is_not_stopped_in_the_middle(
    samples: int, size: int, drop_last: bool
) -> None:
    """After whole epochs another dataset, or another seed, was refused as "stopped in the
    middle of an epoch"."""
    size = min(size, samples)
    before = BatchPlan(
        order=SampleOrder(samples=samples), global_batch=size, epochs=2, drop_last=drop_last
    )
    position = before.start(DataPosition(), 0)
    next_batch = before.next(position)
    while next_batch is not None:
        position = next_batch[1]
        next_batch = before.next(position)
    other = SampleOrder(samples=samples + 1, seed=7)
    after = BatchPlan(order=other, global_batch=size, epochs=3, drop_last=drop_last)
    started = after.start(position, 0)
    assert (started.epoch, started.offset, started.steps) == (2, 0, position.steps)
    assert started.order == [samples + 1, 7, True]
    if samples > size:
        with pytest.raises(UserError, match="in the middle of an epoch"):
            after.start(replace(position, offset=1), 0)
