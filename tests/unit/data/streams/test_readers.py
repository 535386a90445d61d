"""Readers: shards dealt to them, windows shuffled, and marks from which they go on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from elasticzero.data.position import UNKNOWN
from elasticzero.data.streams.dealing import StreamOrder, default_readers
from elasticzero.data.streams.reader import Reader, ReaderMark, open_readers
from elasticzero.data.streams.source import Mixture, Pack, Stream, stream_order
from elasticzero.errors import UserError

Sample = tuple[int, int]


class Shards:
    """Gives (shard, number) as samples, and counts those that are read."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.read_samples = sizes, 0

    @property
    def shards(self) -> int:
        return len(self.sizes)

    def read(self, shard: int, start: int) -> Iterator[Sample]:
        for number in range(start, self.sizes[shard]):
            self.read_samples += 1
            yield shard, number


def rest(reader: Reader) -> list[Sample]:
    while reader.total == UNKNOWN:
        reader.read_window()
    return [reader.take() for _ in range(reader.waiting)]


def fresh(source: Shards, order: StreamOrder, epoch: int = 0) -> dict[int, Reader]:
    stream = Stream(source)
    marks = dict.fromkeys(range(order.readers), ReaderMark.beginning(stream))
    return open_readers(stream, order, epoch, marks)


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), data=st.data())
@settings(max_examples=200)
def test_readers_have_each_sample_once(sizes: list[int], data: st.DataObject) -> None:
    readers = data.draw(
        st.one_of(st.integers(1, len(sizes)), st.integers(1, 3).map(lambda n: n * len(sizes)))
    )
    order = StreamOrder(
        shards=len(sizes),
        readers=readers,
        window=data.draw(st.integers(1, 5)),
        seed=data.draw(st.integers(-5, 5)),
        shuffle=data.draw(st.booleans()),
    )
    source = Shards(sizes)
    drawn = [sample for reader in fresh(source, order, 3).values() for sample in rest(reader)]
    everything = [(shard, n) for shard, size in enumerate(sizes) for n in range(size)]
    assert sorted(drawn) == everything
    assert source.read_samples == len(everything)  # a shard of several readers is read once


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4), data=st.data())
@settings(max_examples=200)
def test_a_reader_goes_on_from_each_mark(sizes: list[int], data: st.DataObject) -> None:
    readers = data.draw(st.integers(1, 2).map(lambda n: n * len(sizes)))
    order = StreamOrder(
        shards=len(sizes), readers=readers, window=data.draw(st.integers(1, 5)), seed=1
    )
    number = data.draw(st.integers(0, readers - 1))
    whole = rest(fresh(Shards(sizes), order)[number])
    count = data.draw(st.integers(0, len(whole)))
    reader = fresh(Shards(sizes), order)[number]
    while reader.read < count and reader.total == UNKNOWN:
        reader.read_window()
    for _ in range(data.draw(st.integers(0, 2))):
        if reader.total == UNKNOWN:
            reader.read_window()
    mark = reader.mark(count)
    assert mark.count == count
    resumed = open_readers(Stream(Shards(sizes)), order, 0, {number: mark})[number]
    assert rest(resumed) == whole[count:]
    assert resumed.total == len(whole)


def test_windows_and_epochs_have_orders_of_their_own() -> None:
    order = StreamOrder(shards=1, readers=1, window=50, seed=4)
    orders_ = [[n for _, n in rest(fresh(Shards([200]), order, epoch)[0])] for epoch in (0, 1, 0)]
    assert orders_[0] == orders_[2] != orders_[1]
    windows = [orders_[0][i : i + 50] for i in range(0, 200, 50)]
    assert [sorted(w) for w in windows] == [list(range(i, i + 50)) for i in range(0, 200, 50)]
    assert all([n - 50 for n in b] != a for a, b in pairwise(windows))


def test_without_shuffle_shards_keep_their_order() -> None:
    order = StreamOrder(shards=5, readers=2, window=1, shuffle=False)
    readers = fresh(Shards([2, 1, 1, 2, 1]), order)
    assert rest(readers[0]) == [(0, 0), (0, 1), (2, 0), (4, 0)]
    assert rest(readers[1]) == [(1, 0), (3, 0), (3, 1)]


@pytest.mark.parametrize(("shards", "readers"), [(1, 64), (3, 63), (63, 63), (64, 64), (9999, 64)])
def test_readers_unless_told_are_about_64_and_alike(shards: int, readers: int) -> None:
    assert default_readers([shards]) == readers
    StreamOrder(shards=shards, readers=default_readers([shards]), window=1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"shards": 0, "readers": 1, "window": 1}, "no shards"),
        ({"shards": 3, "readers": 0, "window": 1}, "readers is 0"),
        ({"shards": 3, "readers": 3, "window": 0}, "shuffle_window is 0"),
    ],
)
def test_other_orders_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        StreamOrder(**sizes)


def test_readers_that_cannot_be_dealt_the_shards_are_refused() -> None:
    stream = Stream(Shards([5, 5, 5]), readers=4)
    with pytest.raises(UserError, match="at most 3, or a multiple of it"):
        stream_order(stream, 0, True)
    mixed = Stream.mixed({stream: 1, Stream(Shards([5] * 4)): 1}, readers=4)
    with pytest.raises(UserError, match="at most 3, or a multiple of it"):
        stream_order(mixed, 0, True)
    assert stream_order(Stream(Shards([5, 5, 5]), readers=6), 0, True).readers == 6


def test_a_function_of_one_parameter_is_skipped_in() -> None:
    by_skip = Stream([3, 5], lambda size: iter(range(size))).source
    by_seek = Stream([3, 5], lambda size, start: range(start, size)).source
    for source in (by_skip, by_seek):
        assert not isinstance(source, Mixture | Pack)
        assert source.shards == 2
        assert list(source.read(1, 2)) == [2, 3, 4]
    with pytest.raises(UserError, match="a list and no function"):
        Stream([3, 5])


class Row(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def test_a_dataset_is_made_a_stream_with_a_window_of_its_own() -> None:
    stream = Stream(Row(), readers=3, shuffle_window=2)
    assert stream_order(stream, 0, True).window == 2
    source: Any = stream.source
    assert (source.shards, list(source.read(0, 5))) == (1, [5, 6, 7, 8])
