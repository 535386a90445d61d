"""A loop that goes on with another batch size or other data: each sample once, or a refusal."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticzero.data.changes import change_text, needed_changes
from elasticzero.data.loader import RankSchedule
from elasticzero.data.position import DataPosition
from elasticzero.data.sampler_order import order_by
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.data.streams.dealing import StreamOrder
from elasticzero.data.streams.plan import StreamPlan
from elasticzero.errors import UserError
from elasticzero.options.settings import DataChange, data_changes
from elasticzero.serialization import decode, encode

BATCH: tuple[DataChange, ...] = ("batch",)
DATASET: tuple[DataChange, ...] = ("dataset",)
STREAM = StreamOrder(shards=2, readers=2, window=4, contents="2 shards")


def plan_of(samples: int, size: int, epochs: int | None = 3, **others: Any) -> BatchPlan:
    seed = others.pop("seed", 0)
    order = SampleOrder(samples=samples, seed=seed)
    return BatchPlan(order=order, global_batch=size, epochs=epochs, **others)


def stored(position: DataPosition) -> DataPosition:
    """The position as the next generation reads it."""
    return decode(DataPosition, json.loads(json.dumps(encode(position))))


def stepped(plan: BatchPlan, position: DataPosition, steps: int) -> DataPosition:
    for _ in range(steps):
        next_batch = plan.next(position)
        assert next_batch is not None
        position = next_batch[1]
    return stored(position)


def used_by(plan: BatchPlan, position: DataPosition, world_size: int) -> tuple[int, list[int]]:
    """The epoch of a step, and the samples of all ranks in it, as their readers get them."""
    next_batch = plan.next(position)
    assert next_batch is not None
    one_step = replace(plan, epochs=None, steps=position.steps + 1)
    samples: list[int] = []
    for rank in range(world_size):
        schedule = RankSchedule(plan=one_step, rank=rank, world_size=world_size)
        for part, request in zip(
            schedule.parts(next_batch[0], 1), schedule.requests(position), strict=True
        ):
            assert isinstance(request, list)
            samples += request if part.weight else []
    return next_batch[0].epoch, samples


runs = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=8
)
"""Batch size, steps and ranks of each start."""


@settings(max_examples=60)
@given(
    samples=st.integers(1, 120),
    seed=st.integers(0, 99),
    epochs=st.integers(1, 3),
    runs=runs,
    drop_last=st.booleans(),
)
def test_each_sample_is_used_once_whatever_the_batch_size(
    samples: int, seed: int, epochs: int, runs: list[tuple[int, int, int]], drop_last: bool
) -> None:
    """Against a list for each epoch, of whose front every step takes its batch."""
    position, steps = DataPosition(), 0
    order = SampleOrder(samples=samples, seed=seed)
    left = [order.indices(epoch, 0, samples).tolist() for epoch in range(epochs)]
    at, dropped = 0, 0
    for number, (size, most, ranks) in enumerate(runs):
        last = number == len(runs) - 1
        size = min(size, samples)
        plan = plan_of(samples, size, epochs, seed=seed, drop_last=drop_last)
        position = plan.start(position, 0, allowed=BATCH)
        expected, done = plan.steps_from(position), 0
        while (next_batch := plan.next(position)) is not None and (last or done < most):
            ranks = min(ranks, len(next_batch[0]))
            epoch, samples_used = used_by(plan, position, ranks)
            while len(left[at]) < (size if drop_last else 1):
                at, dropped = at + 1, dropped + len(left[at])
            assert epoch == at
            assert samples_used == left[at][:size]
            left[at] = left[at][size:]
            position, done, steps = next_batch[1], done + 1, steps + 1
        assert done == expected or not last
        assert position.steps == steps
        position = stored(position)
        assert needed_changes(plan, position) == ()
    assert sum(map(len, left[:at])) == dropped
    assert len(left[at]) < (size if drop_last else 1) and not sum(map(len, left[at + 1 :]))


@given(
    samples=st.integers(1, 60),
    added=st.integers(0, 20),
    size=st.integers(1, 9),
    steps=st.integers(0, 40),
    another_size=st.integers(1, 9),
)
def test_with_another_dataset_the_epoch_begins_anew(
    samples: int, added: int, size: int, steps: int, another_size: int
) -> None:
    """So each sample of the new dataset is used once in each epoch that was not over."""
    before = plan_of(samples, size)
    at = before.start(DataPosition(), 0)
    steps = min(steps, before.steps_from(at))
    at = stepped(before, at, steps)
    ended = before.wrapped(at).epoch
    after = plan_of(samples + added, another_size, seed=1)
    position = after.start(at, 0, allowed=("batch", "dataset"))
    assert (position.epoch, position.offset, position.steps) == (ended, 0, steps)
    used: list[int] = []
    while (next_batch := after.next(position)) is not None:
        used += used_by(after, position, 1)[1]
        position = next_batch[1]
    every = [after.order.indices(epoch, 0, samples + added) for epoch in range(ended, 3)]
    assert used == [int(index) for indices in every for index in indices]
    assert position.steps == steps + after.steps_from(
        after.start(at, 0, allowed=("batch", *DATASET))
    )


def test_a_limit_of_steps_counts_what_was_done() -> None:
    at = stepped(before := plan_of(40, 4, None, steps=9), before.start(DataPosition(), 0), 5)
    for after in (plan_of(40, 8, None, steps=9), plan_of(50, 8, None, steps=9)):
        assert after.steps_from(after.start(at, 0, allowed=("batch", "dataset"))) == 4


@pytest.mark.parametrize(
    ("after", "allowed", "phrases"),
    [
        (
            plan_of(40, 8),
            DATASET,
            [
                "stopped in a loop with global_batch 4, and the script now has 8",
                "--allow-data-change batch, or",
                "ELASTICZERO_ALLOW_DATA_CHANGE=batch: the epoch goes on from the same sample",
                "give global_batch=4 again",
            ],
        ),
        (
            plan_of(50, 4, seed=1),
            BATCH,
            [
                "in the middle of an epoch",
                "samples 50 in place of 40 and seed 1 in place of 0: some samples would be used",
                "--allow-data-change dataset, or",
                "the epoch begins anew",
                "give the same dataset and seed",
            ],
        ),
        (
            plan_of(50, 8),
            DATASET,
            ["global_batch 4, and", "samples 50 in", "--allow-data-change batch,dataset, or"],
        ),
    ],
)
def test_a_change_that_nobody_asked_for_is_refused(
    after: BatchPlan, allowed: tuple[DataChange, ...], phrases: list[str]
) -> None:
    before = plan_of(40, 4)
    at = stepped(before, before.start(DataPosition(), 0), 3)
    for changes in ((), allowed):
        with pytest.raises(UserError) as refused:
            after.start(at, 0, allowed=changes)
        assert [word for word in phrases if word not in str(refused.value)] == []


def test_the_next_generations_need_no_permission() -> None:
    before = plan_of(40, 4)
    at = stepped(before, before.start(DataPosition(), 0), 3)
    for after in (plan_of(40, 8), plan_of(50, 4), plan_of(50, 8)):
        changed = stored(after.start(at, 0, allowed=("batch", "dataset")))
        assert after.start(changed, 0) == changed
        assert needed_changes(after, changed) == () and change_text(after, changed, 3) == ""


@pytest.mark.parametrize(
    ("steps", "after", "message"),
    [
        (3, plan_of(40, 4), ""),
        (0, plan_of(50, 8), ""),
        (30, plan_of(40, 8), ""),  # the loop is over
        (
            3,
            plan_of(40, 8),
            "after step 3 the loop goes on with global_batch 8 in place of 4, as "
            "--allow-data-change batch allows: epoch 0 goes on after its first 12 samples",
        ),
        (
            10,
            plan_of(40, 8),
            "after step 10 the loop goes on with global_batch 8 in place of 4, as "
            "--allow-data-change batch allows: epoch 1 begins",
        ),
        (
            8,
            plan_of(40, 9, drop_last=True),
            "after step 8 the loop goes on with global_batch 9 in place of 4, as "
            "--allow-data-change batch allows: epoch 1 begins",
        ),
        (
            3,
            plan_of(50, 4),
            "after step 3 the loop goes on with samples 50 in place of 40, as "
            "--allow-data-change dataset allows: epoch 0 begins anew",
        ),
        (
            10,
            plan_of(50, 4),
            "after step 10 the loop goes on with samples 50 in place of 40: epoch 1 begins",
        ),
        (
            13,
            plan_of(50, 8, seed=2),
            "after step 13 the loop goes on with global_batch 8 in place of 4 and samples 50 in "
            "place of 40 and seed 2 in place of 0, as --allow-data-change batch,dataset allows: "
            "epoch 1 begins anew",
        ),
        (
            3,
            BatchPlan(order=order_by([3, 1, 2], 0), global_batch=4, epochs=3),
            "after step 3 the loop goes on with samples 3, seed 0, sampler list, digest of its "
            f"first epoch {order_by([3, 1, 2], 0).inputs[3]} in place of 40, 0, True, as "
            "--allow-data-change dataset allows: epoch 0 begins anew",
        ),
        (
            3,
            StreamPlan(order=STREAM, global_batch=4, epochs=3),
            "after step 3 the loop goes on with stream 2 shards, readers 2, shuffle_window 4, seed "
            "0, shuffle True in place of 40, 0, True, as --allow-data-change dataset allows: epoch "
            "0 begins anew",
        ),
    ],
)
def test_a_change_is_said(steps: int, after: BatchPlan | StreamPlan, message: str) -> None:
    before = plan_of(40, 4)
    at = stepped(before, before.start(DataPosition(), 0), steps)
    started = after.start(at, 0, allowed=("batch", "dataset"))
    assert (started.global_batch, started.order) == (after.global_batch, after.order.inputs)
    assert change_text(after, at, steps) == message


def test_a_stream_gives_way_to_a_dataset_with_an_index() -> None:
    rows = [[-1, 3, 0, 0], [-1, 3, 0, 0]]
    at = DataPosition(epoch=1, offset=6, steps=9, order=STREAM.inputs, global_batch=2, stream=rows)
    after = plan_of(20, 2)
    with pytest.raises(UserError, match="in the middle of an epoch"):
        after.start(at, 0, allowed=BATCH)
    started = after.start(at, 0, allowed=DATASET)
    assert (started.epoch, started.offset, started.steps, started.stream) == (1, 0, 9, None)


def test_a_state_of_the_release_before_may_have_any_batch_size() -> None:
    """It does not say with which size it was made."""
    at = DataPosition(offset=12, steps=3, order=[40, 0, True])
    after = plan_of(40, 8)
    assert needed_changes(after, at) == ()
    assert after.start(at, 0) == replace(at, global_batch=8)


def test_another_loop_may_have_any_batch_size() -> None:
    """A script may raise it from loop to loop; what it says is the same at each start."""
    before = plan_of(40, 4)
    at = stepped(before, before.start(DataPosition(), 0), 3)
    started = plan_of(40, 8).start(at, 1)
    assert (started.loop, started.offset, started.global_batch) == (1, 12, 8)


def test_the_words_of_the_option() -> None:
    assert data_changes("--x", None) == ()
    assert data_changes("--x", "dataset,batch") == ("batch", "dataset")
    for text in ("all", "batch,", "batch dataset", ""):
        with pytest.raises(UserError, match=f"--x {text}: batch, dataset or batch,dataset is"):
            data_changes("--x", text)
