"""Random streams under random changes of the world: each sample in exactly one committed step, and
the same global batches in every world.

Ranks are threads, which exchange by a sum as real ones do.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from elasticzero.data.loader import RankSchedule
from elasticzero.data.position import DataPosition, GlobalBatch
from elasticzero.data.streams.loader import StreamReader
from elasticzero.data.streams.plan import StreamPlan
from elasticzero.data.streams.reader import ReaderMark, open_readers
from elasticzero.data.streams.source import Stream, stream_order
from elasticzero.errors import UserError
from elasticzero.options.settings import DataChange
from elasticzero.serialization import decode, encode

CPU = torch.device("cpu")
Batches = dict[GlobalBatch, list[Any]]
KINDS = ("plain", "mixed", "packed", "mixed and packed")


def length_of(sample: int) -> int:
    return sample % 4 + 1 if sample % 50 else 30


def samples_in(samples: list[Any]) -> list[int]:
    """The samples of a batch, also where they are packed in lists."""
    return [s for one in samples for s in (one if isinstance(one, list) else [one])]


class Sum:
    """Sums the tables of the ranks of a world, each in a thread of its own."""

    def __init__(self, world_size: int) -> None:
        self._tables: list[list[Tensor]] = [[]]
        """Of each sum so far, and of the next one."""
        self._sums = threading.local()
        self._barrier = threading.Barrier(world_size)
        self._lock = threading.Lock()

    def __call__(self, table: Tensor) -> Tensor:
        number = getattr(self._sums, "number", 0)
        self._sums.number = number + 1
        with self._lock:
            self._tables[number].append(table)
            if len(self._tables) == number + 1:
                self._tables.append([])
        self._barrier.wait(20)
        return torch.stack(self._tables[number]).sum(0)

    def abort(self) -> None:
        self._barrier.abort()


@dataclass
class Job:
    """Trains on a stream, generation by generation; a sample is its number."""

    sizes: list[int]
    readers: int | None
    window: int
    loop: dict[str, Any]
    kind: str = "plain"
    seed: int = 0
    micro_batch: int | None = None
    virtual_batch: int | None = None
    slices: dict[tuple[GlobalBatch, int], list[Any]] = field(default_factory=dict)
    """The samples of every slice, in any world."""
    left_out: frozenset[GlobalBatch] = frozenset()
    allowed: tuple[DataChange, ...] = ()
    position: DataPosition = field(default_factory=DataPosition)
    committed: Batches = field(default_factory=dict)
    ended: bool = False

    def stream(self) -> Stream:
        first = [sum(self.sizes[:s]) for s in range(len(self.sizes))]

        def read(shard: int, start: int) -> Iterator[int]:
            yield from range(first[shard] + start, first[shard] + self.sizes[shard])

        numbers = range(len(self.sizes))
        options: dict[str, Any] = {"readers": self.readers, "shuffle_window": self.window}
        stream = Stream(numbers, read, **options)
        if "mixed" in self.kind:
            # As many shards each, so that both can be dealt to the readers.
            half = len(numbers) // 2
            parts = {Stream(numbers[:half], read): 1.0, Stream(numbers[half:], read): 3.5}
            stream = Stream.mixed(parts, **options)
        return stream.packed(9, length_of) if "packed" in self.kind else stream

    def generation(self, world_size: int, steps: int, kept: int) -> None:
        """Trains so many steps, of which the last ones are lost, except `kept`."""
        add = Sum(world_size)

        def rank_of(rank: int) -> tuple[Batches, list[DataPosition]]:
            try:
                return self._rank(rank, world_size, steps, add)
            except BaseException:
                add.abort()
                raise

        with ThreadPoolExecutor(world_size) as pool:
            futures = [pool.submit(rank_of, rank) for rank in range(world_size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error  # that of a rank which did not only miss the others
        ranks = [future.result() for future in futures]
        positions = ranks[0][1]
        assert all(rank_positions == positions for _, rank_positions in ranks)
        kept = min(kept, len(positions) - 1)
        batches = list(ranks[0][0])
        for batch in batches[:kept]:
            samples = [sample for rank_batches, _ in ranks for sample in rank_batches[batch]]
            if batch not in self.left_out:
                assert len(samples) == len(batch)
            self.committed[batch] = samples
        self.ended = kept == len(batches) < steps
        stored = json.loads(json.dumps(encode(positions[kept])))
        self.position = decode(DataPosition, stored)

    def _rank(
        self, rank: int, world_size: int, steps: int, add: Sum
    ) -> tuple[Batches, list[DataPosition]]:
        plan = StreamPlan(order=stream_order(self.stream(), self.seed, True), **self.loop)
        schedule = RankSchedule(
            plan=plan,
            rank=rank,
            world_size=world_size,
            micro_batch=self.micro_batch,
            virtual_batch=self.virtual_batch,
            left_out=self.left_out,
        )
        position = plan.start(self.position, 0, allowed=self.allowed)
        reader = StreamReader(
            dataset=None, stream=self.stream(), device=CPU, sum_over_ranks=add, collate_fn=list
        )
        data = reader.open(schedule, position)
        batches: Batches = {}
        positions = [position]
        for batch, after in schedule.steps(position):
            if len(batches) == steps:
                break
            data.look_ahead(batch, after)
            batches[batch] = []
            for part in schedule.parts(batch, 1) if batch not in self.left_out else ():
                samples = next(data)
                assert len(samples) == (part.weight or schedule.filler_samples)
                batches[batch] += samples if part.weight else []
                if self.virtual_batch is not None and part.slice is not None and part.weight:
                    assert len(samples) <= self.virtual_batch
                    assert self.slices.setdefault((batch, part.slice), samples) == samples
            positions.append(after)
        data.close()
        return batches, positions


def random_job(random: Random) -> Job:
    sizes = [random.choice((0, 1, random.randrange(40))) for _ in range(random.randint(1, 9))]
    sizes[random.randrange(len(sizes))] += 1
    several = random.random() < 0.3
    kind = random.choice(KINDS)
    if "mixed" in kind:
        sizes += [random.randrange(20) for _ in sizes]
    part_shards = len(sizes) // 2 if "mixed" in kind else len(sizes)
    readers = part_shards * random.randint(2, 3) if several else random.randint(1, part_shards)
    loop: dict[str, Any] = {"global_batch": random.randint(4, 24)}
    loop["epochs"] = random.choice((1, 2, 3))
    if random.random() < 0.3:
        loop["steps"] = random.randint(1, 12)
    return Job(
        sizes,
        readers,
        random.choice((1, 3, 8)),
        loop,
        kind,
        seed=random.randrange(99),
        micro_batch=random.choice((None, 2, 5)),
    )


def undisturbed(job: Job) -> Job:
    alone = replace(job, committed={}, position=DataPosition())
    alone.generation(1, 10_000, 10_000)
    assert alone.ended
    return alone


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 20))]
)
def test_each_sample_is_in_one_committed_step_in_every_world(part: int) -> None:
    """1,000 schedules in all, of which `make test` has 50."""
    for number in range(50):
        random = Random(part * 50 + number)
        job = random_job(random)
        expected = undisturbed(job)
        most = min(5, job.readers or 1, job.loop["global_batch"])
        while not job.ended:
            steps = random.randint(0, 7)
            job.generation(random.randint(1, most), steps, random.randint(0, steps))
        assert list(job.committed) == list(expected.committed)
        for batch, samples in job.committed.items():
            assert sorted(samples) == sorted(expected.committed[batch]), (number, batch)
        if "steps" not in job.loop:
            uses = Counter(s for samples in job.committed.values() for s in samples_in(samples))
            assert set(uses.values()) == {job.loop["epochs"]}
            assert len(uses) == sum(job.sizes)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 15))]
)
def test_slices_have_the_same_samples_in_every_world(part: int) -> None:
    """In the same order too, also where readers have ended, and a slice has none."""
    for number in range(20):
        random = Random(f"slices {part} {number}")
        job = random_job(random)
        groups = random.randint(1, 5)
        job.micro_batch, job.virtual_batch = None, random.randint(1, 5)
        job.loop["global_batch"] = groups * job.virtual_batch
        shards = len(job.sizes) // (2 if "mixed" in job.kind else 1)
        few = groups <= shards and random.random() < 0.5
        job.readers = groups if few else groups * shards
        expected = undisturbed(job)
        slices = dict(job.slices)
        while not job.ended:
            steps = random.randint(0, 7)
            job.generation(random.randint(1, groups), steps, random.randint(0, steps))
        assert job.committed == expected.committed, number
        assert job.slices == slices and len(slices) >= len(job.committed)


def test_a_packed_batch_has_lists_of_at_most_the_length() -> None:
    job = Job([40, 70], 2, 4, {"global_batch": 8, "epochs": 1}, "packed")
    lists = [pack for samples in undisturbed(job).committed.values() for pack in samples]
    lengths = [sum(map(length_of, pack)) for pack in lists]
    assert all(length <= 9 or len(pack) == 1 for length, pack in zip(lengths, lists, strict=True))
    assert max(map(len, lists)) > 1
    assert sum(lengths) / 9 > 0.6 * len(lists)


def numbers(first: int) -> Callable[[int, int], Iterator[int]]:
    """Reads shards of 50 samples, the first of which has this number."""

    def read(shard: int, start: int) -> Iterator[int]:
        yield from range(first + 50 * shard + start, first + 50 * (shard + 1))

    return read


def test_a_mixture_draws_by_weight_and_repeats_what_has_ended() -> None:
    order = {"readers": 2, "shuffle_window": 1}
    small, large = Stream(range(2), numbers(0)), Stream(range(40), numbers(1000))
    mixed = Stream.mixed({small: 1, large: 3}, repeat=True, **order)
    readers = open_readers(
        mixed,
        stream_order(mixed, 5, True),
        0,
        {v: ReaderMark.beginning(mixed) for v in range(2)},
    )
    drawn = [reader.take() for reader in readers.values() for _ in range(600)]
    of_small = [sample for sample in drawn if sample < 1000]
    assert 230 < len(of_small) < 370
    uses = Counter(of_small)
    assert set(uses) == set(range(100))
    # Each epoch has each of them once, and readers begin the next one at their own pace.
    assert max(uses.values()) - min(uses.values()) <= 2
    large_uses = Counter(sample for sample in drawn if sample >= 1000)
    assert set(large_uses.values()) == {1}


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_are_none_are_refused(weight: float) -> None:
    with pytest.raises(UserError, match="give positive"):
        Stream.mixed({Stream([1], numbers(0)): weight})


def test_a_left_out_batch_is_read_over() -> None:
    job = Job([30, 20, 25], 3, 4, {"global_batch": 8, "epochs": 1})
    expected = undisturbed(job).committed
    batches = list(expected)
    job.left_out = frozenset(batches[3:5])
    job.generation(3, 99, 99)
    expected |= {batch: [] for batch in job.left_out}
    assert {b: sorted(s) for b, s in job.committed.items()} == {
        b: sorted(s) for b, s in expected.items()
    }


def test_drop_last_leaves_out_what_makes_no_whole_batch() -> None:
    job = Job([30, 20, 25], 3, 4, {"global_batch": 8, "epochs": 2, "drop_last": True})
    job.generation(2, 99, 99)
    assert job.ended
    assert [len(batch) for batch in job.committed] == [8] * 18
    assert {batch.epoch for batch in job.committed} == {0, 1}


def test_a_larger_world_than_readers_is_refused() -> None:
    job = Job([30, 20], 2, 4, {"global_batch": 8, "epochs": 1})
    with pytest.raises(UserError, match="2 readers, and the world 3 ranks"):
        job.generation(3, 1, 1)


@pytest.mark.parametrize(
    ("readers", "world", "message"),
    [(6, 2, "6 readers, and virtual_batch cuts .* 4 slices"), (8, 5, "the world has 5 ranks")],
)
def test_slices_that_readers_cannot_have_are_refused(
    readers: int, world: int, message: str
) -> None:
    job = Job([30, 20], readers, 4, {"global_batch": 8, "epochs": 1}, virtual_batch=2)
    with pytest.raises(UserError, match=message):
        job.generation(world, 1, 1)


def test_a_stream_without_samples_is_refused() -> None:
    job = Job([0, 0], 2, 4, {"global_batch": 8, "epochs": 1})
    with pytest.raises(UserError, match="no sample at all"):
        job.generation(2, 1, 1)


def test_a_shard_that_shrank_is_said() -> None:
    job = Job([30, 20], 2, 4, {"global_batch": 8, "epochs": 1})
    job.generation(2, 4, 4)
    job.sizes = [5, 5]
    with pytest.raises(UserError, match="fewer samples than before"):
        job.generation(2, 1, 1)


def test_another_order_in_mid_epoch_is_refused() -> None:
    job = Job([30, 20], 2, 4, {"global_batch": 8, "epochs": 1})
    job.generation(2, 4, 4)
    job.seed = 7
    with pytest.raises(UserError, match="in the middle of an epoch"):
        job.generation(2, 1, 1)
