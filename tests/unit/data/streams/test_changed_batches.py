"""Random streams whose batch size changes between generations: each sample in one committed step,
and the same global batches in every world."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from elasticzero.data.position import DataPosition
from elasticzero.errors import UserError
from tests.unit.data.streams.test_schedules import Job, random_job, samples_in, undisturbed

Run = tuple[int, int, int]
"""Batch size, steps, and how many of them are kept."""


def play(job: Job, runs: list[Run], worlds: list[int]) -> Job:
    """Trains with each size in turn, and with the last one to the end."""
    played = replace(job, committed={}, position=DataPosition(), allowed=("batch",))
    for (size, steps, kept), world in zip(runs, worlds, strict=True):
        if not played.ended:
            played.loop = job.loop | {"global_batch": size}
            played.generation(world, steps, kept)
    while not played.ended:
        played.allowed = ()  # the position has the size of the last generation by now
        played.generation(worlds[-1], 10_000, 10_000)
    return played


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 5))]
)
def test_each_sample_of_a_stream_is_used_once_whatever_the_batch_size(part: int) -> None:
    for number in range(60):
        random = Random(part * 100 + number)
        job = random_job(random)
        runs = []
        for _ in range(random.randint(2, 5)):
            steps = random.randint(0, 7)
            runs.append((random.randint(4, 24), steps, random.randint(0, steps)))
        most = min(4, job.readers or 1, *(size for size, _, _ in runs))
        alone = play(job, runs, [1] * len(runs))
        played = play(job, runs, [random.randint(1, most) for _ in runs])
        assert list(played.committed) == list(alone.committed)
        for batch, samples in played.committed.items():
            assert sorted(samples) == sorted(alone.committed[batch]), (number, batch)
        if "steps" not in job.loop:
            uses = Counter(s for samples in played.committed.values() for s in samples_in(samples))
            assert set(uses.values()) == {job.loop["epochs"]}
            assert len(uses) == sum(job.sizes)


def test_the_order_of_a_stream_does_not_depend_on_the_batch_size() -> None:
    job = Job([30, 20, 25], 3, 4, {"global_batch": 8, "epochs": 2})
    orders = []
    for size in (8, 5):
        played = play(job, [(8, 3, 3), (size, 4, 4)], [1, 1])
        orders.append([s for batch in played.committed.values() for s in sorted(batch)])
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0][:24] == orders[1][:24]


def test_a_larger_batch_drops_what_is_left_of_a_stream() -> None:
    """With `drop_last` the rest of the epoch may make no batch of the new size."""
    job = Job([30, 20, 25], 3, 4, {"global_batch": 8, "epochs": 2, "drop_last": True})
    job.generation(2, 8, 8)
    job.loop |= {"global_batch": 20}
    job.allowed = ("batch",)
    job.generation(3, 99, 99)
    assert job.ended
    assert [(batch.epoch, len(batch)) for batch in job.committed] == [(0, 8)] * 8 + [(1, 20)] * 3


def test_another_size_of_a_streams_batches_is_refused() -> None:
    job = Job([30, 20], 2, 4, {"global_batch": 8, "epochs": 1})
    job.generation(2, 2, 2)
    job.loop |= {"global_batch": 9}
    with pytest.raises(UserError, match="with global_batch 8, and the script now has 9"):
        job.generation(2, 1, 1)


def test_with_other_shards_the_epoch_begins_anew() -> None:
    job = Job([30, 20, 25], 3, 4, {"global_batch": 8, "epochs": 2})
    job.generation(2, 4, 4)
    assert not job.ended
    larger = replace(job, sizes=[30, 20, 25, 10], committed={}, allowed=("dataset",))
    larger.generation(3, 99, 99)
    assert larger.ended
    expected = undisturbed(replace(larger, allowed=())).committed
    assert {batch: sorted(samples) for batch, samples in larger.committed.items()} == {
        batch: sorted(samples) for batch, samples in expected.items()
    }
    uses = Counter(sample for samples in larger.committed.values() for sample in samples)
    assert len(uses) == 85 and set(uses.values()) == {2}
