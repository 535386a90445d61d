"""Reads one reader's samples of an epoch, and marks where each can be read again from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from elasticzero.data.streams.dealing import StreamOrder
from elasticzero.data.streams.source import ShardSource
from elasticzero.data.streams.turn import UNKNOWN
from elasticzero.errors import UserError


@dataclass(frozen=True, slots=True)
class ReaderMark:
    """Says from where a reader goes on so that it gives its sample number `count` next."""

    count: int = 0
    part: int = 0
    """Number of the part of the reader in which the window of that sample begins."""
    offset: int = 0
    """Number of samples of that part before the window."""
    skip: int = 0
    """Number of samples of the shuffled window that come before."""


class SharedShard:
    """Reads a shard once for all readers of this process that have every so many-th sample of
    it."""

    def __init__(
        self, source: ShardSource, shard: int, strides: int, offsets: Mapping[int, int]
    ) -> None:
        """offsets: for each reader, named by its first sample, the number of its samples that it
        does not need."""
        self._strides = strides
        self._from = {first: offset * strides + first for first, offset in offsets.items()}
        self._at = min(self._from.values())
        self._samples = source.read(shard, self._at)
        self._waiting: dict[int, deque[Any]] = {first: deque() for first in offsets}

    def of(self, first: int) -> Iterator[Any]:
        """Yields the samples of one reader."""
        mine = self._waiting[first]
        while True:
            while not mine:
                if not self._advance():
                    return
            yield mine.popleft()

    def _advance(self) -> bool:
        for sample in self._samples:
            owner = self._at % self._strides
            if self._at >= self._from.get(owner, self._at + 1):
                self._waiting[owner].append(sample)
            self._at += 1
            return True
        return False


class Reader:
    """Reads the samples of one reader of a stream in an epoch, window by window."""

    def __init__(
        self,
        source: ShardSource,
        order: StreamOrder,
        number: int,
        epoch: int,
        mark: ReaderMark,
        shared: SharedShard | None = None,
    ) -> None:
        """mark: where to go on. shared: the shard of which this reader has a part, if others have
        parts of it too."""
        self._source = source
        self._order = order
        self._number = number
        self._epoch = epoch
        self._shared = shared
        self._parts = islice(order.parts(number, epoch), mark.part, None)
        self._part, self._offset = mark.part - 1, mark.offset
        """The part that is read, from that of the mark on, and the number of its samples that were
        read."""
        self._samples: Iterator[Any] = iter(())
        self._next_part(mark.offset)
        self._skip = mark.skip
        """Number of samples of the next window that are left out."""
        self._ready: deque[Any] = deque()
        """Samples that were read and not taken."""
        self._windows: deque[ReaderMark] = deque()
        """The marks of the windows that were read, from the oldest that may be asked for."""
        self.read = mark.count
        self.total = UNKNOWN
        """Number of samples of the epoch; unknown until they are read."""

    @property
    def waiting(self) -> int:
        """Returns the number of samples that were read and not taken."""
        return len(self._ready)

    def read_window(self) -> None:
        """Reads the next window, or finds that there is none."""
        size = self._order.window
        part, offset = self._part, self._offset
        samples: list[Any] = []
        while len(samples) < size:
            found = list(islice(self._samples, size - len(samples)))
            samples += found
            self._offset += len(found)
            if len(samples) < size and not self._next_part(0):
                break
        mark = ReaderMark(self.read, part, offset, self._skip)
        if len(samples) <= self._skip:
            self.total = self.read
            self._windows.append(mark)
            return
        # A window is known by its beginning, since its number is not known after a resume.
        order = self._order.window_order(
            self._number, self._epoch, part << 40 | offset, len(samples)
        )
        self._ready.extend([samples[place] for place in order.tolist()[self._skip :]])
        self.read += len(samples) - self._skip
        self._windows.append(mark)
        self._skip = 0

    def take(self) -> Any:
        """Returns the next sample. Raises `UserError` if there is none, although there was one when
        the ranks last read so far."""
        while not self._ready and self.total == UNKNOWN:
            self.read_window()
        if not self._ready:
            raise UserError(
                f"reader {self._number} of the stream has {self.total} samples in epoch "
                f"{self._epoch}, and had more before: a shard has fewer samples than before. Go on "
                "with the same data, or start afresh in another checkpoint directory"
            )
        return self._ready.popleft()

    def mark(self, count: int) -> ReaderMark:
        """Returns from where sample number `count` can be read again; none before it is asked for
        later. count: at most `read`."""
        while len(self._windows) > 1 and self._windows[1].count <= count:
            self._windows.popleft()
        if not self._windows or count == self.read:
            return ReaderMark(self.read, self._part, self._offset, self._skip)
        first = self._windows[0]
        return ReaderMark(count, first.part, first.offset, first.skip + count - first.count)

    def _next_part(self, offset: int) -> bool:
        """Goes on to the next part of the reader, if there is one, at a sample of it."""
        part = next(self._parts, None)
        if part is None:
            return False
        self._part, self._offset = self._part + 1, offset
        self._samples = (
            self._shared.of(part.first)
            if self._shared is not None
            else self._source.read(part.shard, offset)
        )
        return True


def batches_of_readers(
    source: ShardSource, order: StreamOrder, numbers: Iterable[int], size: int
) -> Iterator[tuple[int, list[Any]]]:
    """Yields the samples of these readers in batches of at most `size`, each of one reader, with
    its number."""
    for number, reader in open_readers(
        source, order, 0, {v: ReaderMark() for v in numbers}
    ).items():
        while reader.total == UNKNOWN:
            while reader.total == UNKNOWN and reader.waiting < size:
                reader.read_window()
            while reader.waiting >= size or (reader.waiting and reader.total != UNKNOWN):
                yield number, [reader.take() for _ in range(min(size, reader.waiting))]


def any_sample(source: ShardSource, order: StreamOrder) -> Any:
    """Returns the stream's first sample; raises `UserError` if it has none."""
    for shard in range(order.shards):
        for sample in source.read(shard, 0):
            return sample
    raise UserError("the stream gave no sample at all: check its shards")


def open_readers(
    source: ShardSource, order: StreamOrder, epoch: int, marks: Mapping[int, ReaderMark]
) -> dict[int, Reader]:
    """Returns the readers of one process in an epoch, by number, with a mark for each to go on
    from."""
    shared = _shared_shards(source, order, epoch, marks)
    return {
        number: Reader(source, order, number, epoch, mark, shared.get(number))
        for number, mark in marks.items()
    }


def _shared_shards(
    source: ShardSource, order: StreamOrder, epoch: int, marks: Mapping[int, ReaderMark]
) -> dict[int, SharedShard]:
    """Returns the shard of each reader, where several readers have parts of one."""
    if order.readers <= order.shards:
        return {}
    parts = {number: next(order.parts(number, epoch)) for number in marks}
    offsets: dict[int, dict[int, int]] = {}
    for number, part in parts.items():
        offsets.setdefault(part.shard, {})[part.first] = marks[number].offset
    strides = order.readers // order.shards
    opened = {shard: SharedShard(source, shard, strides, of) for shard, of in offsets.items()}
    return {number: opened[part.shard] for number, part in parts.items()}
