"""How much a resume reads again of what was used, as docs/data.md states it for each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from torch.utils.data import Dataset

from elasticzero.data.loader import BatchReader, RankSchedule
from elasticzero.data.position import UNKNOWN, DataPosition
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.data.streams.source import Stream, stream_order
from tests.unit.data.streams.test_schedules import Job


@dataclass
class Counting(Job):
    """A job whose source writes down each sample that it reads."""

    seeks: bool = True
    reads: list[int] = field(default_factory=list)

    def stream(self) -> Stream:
        first = [sum(self.sizes[:s]) for s in range(len(self.sizes))]

        def seek(shard: int, start: int) -> Iterator[int]:
            for number in range(first[shard] + start, first[shard] + self.sizes[shard]):
                self.reads.append(number)
                yield number

        def skip(shard: int) -> Iterator[int]:
            yield from seek(shard, 0)

        read = seek if self.seeks else skip
        numbers = range(len(self.sizes))
        return Stream(numbers, read, readers=self.readers, shuffle_window=self.window)

    def resume(self, world_size: int) -> list[int]:
        """Goes on for one step; returns what was read again of what had been used."""
        used = {sample for samples in self.committed.values() for sample in samples}
        self.reads.clear()
        self.generation(world_size, 1, 0)
        return [sample for sample in self.reads if sample in used]

    def shard_of(self, sample: int) -> int:
        return next(s for s in range(len(self.sizes)) if sample < sum(self.sizes[: s + 1]))


def jobs(seeks: bool) -> Iterator[tuple[Random, Counting]]:
    """Jobs of at least as many shards as readers, stopped anywhere within an epoch."""
    for number in range(60):
        random = Random(number)
        sizes = [random.randrange(5, 60) for _ in range(random.randint(3, 12))]
        readers, size = random.randint(2, min(6, len(sizes))), random.randint(4, 16)
        loop = {"global_batch": size, "epochs": 1}
        job = Counting(sizes, readers, random.choice((1, 4, 8)), loop, seed=number, seeks=seeks)
        steps = random.randint(1, max(1, sum(sizes) // size - 1))
        job.generation(random.randint(1, 2), steps, steps)
        yield random, job


def bound(job: Counting, running: int) -> int:
    """What docs/data.md says of each reader of a stream of shards."""
    size: int = job.loop["global_batch"]
    return -(-8 * size // running) + 2 * job.window + 3


def readers_of_shards(job: Counting) -> dict[int, int]:
    """The reader of each shard."""
    order = stream_order(job.stream(), job.seed, True)
    return {part.shard: v for v in range(order.readers) for part in order.parts(v, 0)}


def test_a_seek_reads_again_no_more_than_the_bound() -> None:
    """By reader: what was used since the last exchange, and the beginning of its window."""
    nearest = 0.0
    for random, job in jobs(seeks=True):
        assert job.position.stream is not None
        running = sum(row[0] == UNKNOWN for row in job.position.stream)
        again = job.resume(random.randint(1, 2))
        assert max(Counter(again).values(), default=1) == 1  # once each
        reader_of = readers_of_shards(job)
        by_reader = Counter(reader_of[job.shard_of(sample)] for sample in again)
        for count in by_reader.values():
            assert count <= bound(job, max(1, running)), (job, by_reader)
            nearest = max(nearest, count / bound(job, max(1, running)))
    assert nearest > 0.5  # the bound is not far from what happens


def test_a_skip_reads_again_the_shards_in_use_and_no_finished_one() -> None:
    skipped = sought = finished = 0
    for _, job in jobs(seeks=False):
        rows = job.position.stream
        assert rows is not None
        order = stream_order(job.stream(), job.seed, True)
        in_use = {
            part.shard
            for v, row in enumerate(rows)
            for part in order.parts(v, 0, row[3])  # from the one on in which its mark is
        }
        again = job.resume(1)
        assert {job.shard_of(sample) for sample in again} <= in_use
        assert max(Counter(again).values(), default=1) == 1
        skipped += len(again)
        finished += len(job.sizes) - len(in_use)
    for _, job in jobs(seeks=True):
        sought += len(job.resume(1))
    assert skipped > 1.3 * sought > 0 < finished


class Indexed(Dataset[int]):
    """Writes down each index that it is asked for."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 331

    def __getitem__(self, index: int) -> int:
        self.reads.append(index)
        return index


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_dataset_with_an_index_is_read_once(world_size: int) -> None:
    """Also across a resume in another world."""
    order = SampleOrder(samples=331, seed=2, shuffle=True)
    plan = BatchPlan(order=order, global_batch=10, epochs=1)
    data = Indexed()
    reader = BatchReader(dataset=data, device=torch.device("cpu"))
    whole = RankSchedule(plan=plan, rank=0, world_size=1)
    position = plan.start(DataPosition(), 0)
    batches = reader.open(whole, position)
    for _, after in list(whole.steps(position))[:7]:
        next(batches)
        position = after
    used, data.reads = data.reads, []
    assert len(used) == 70
    for rank in range(world_size):
        rest = RankSchedule(plan=plan, rank=rank, world_size=world_size)
        opened = reader.open(rest, position)
        for batch, _ in rest.steps(position):
            for _ in rest.parts(batch, 1):
                next(opened)
    assert not set(used) & set(data.reads)
    assert set(used) | set(data.reads) == set(range(331))
