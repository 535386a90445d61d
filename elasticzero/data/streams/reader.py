"""Reads one reader's samples of an epoch, shuffles them in windows, and marks where each can be
read again from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticzero.data.hashing import mix64
from elasticzero.data.position import UNKNOWN
from elasticzero.data.streams.dealing import StreamOrder
from elasticzero.data.streams.sequence import (
    Place,
    SampleSequence,
    SharedShard,
    open_sequence,
    place_width,
)
from elasticzero.data.streams.source import Mixture, Pack, Stream
from elasticzero.errors import UserError


@dataclass(frozen=True, slots=True)
class ReaderMark:
    """Says from where a reader goes on so that it gives its sample number `count` next."""

    count: int
    skip: int
    """Number of samples of the shuffled window that come before."""
    place: Place
    """Place in the reader's sequence at which the window begins."""

    @classmethod
    def beginning(cls, stream: Stream) -> ReaderMark:
        return cls(0, 0, (0,) * place_width(stream))


def mark_of(row: Sequence[int]) -> ReaderMark:
    """Returns the mark in a row of `plan.py`."""
    _, count, skip, *place = row
    return ReaderMark(count, skip, tuple(place))


class Reader:
    """Reads the samples of one reader of a stream in an epoch, window by window."""

    def __init__(
        self,
        sequence: SampleSequence,
        order: StreamOrder,
        number: int,
        epoch: int,
        mark: ReaderMark,
    ) -> None:
        """Begins to read where a mark says.

        Args:
            sequence: The reader's samples, from the place of `mark` on.
            order: What the order of the stream's samples depends on.
            number: The reader's number.
            epoch: The epoch.
            mark: Where the reader goes on.
        """
        self._sequence = sequence
        self._order = order
        self._number = number
        self._epoch = epoch
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
        place = self._sequence.place
        samples = self._sequence.take(self._order.window)
        if len(samples) <= self._skip:
            self.total = self.read
            return
        # A window is known by its beginning, since its number is not known after a resume.
        window = 0
        for number in place:
            window = mix64(window + mix64(number))
        order = self._order.window_order(self._number, self._epoch, window, len(samples))
        self._ready.extend([samples[index] for index in order.tolist()[self._skip :]])
        self._windows.append(ReaderMark(self.read, self._skip, place))
        self.read += len(samples) - self._skip
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
        later.

        Args:
            count: A number of samples, at most `read`.
        """
        while len(self._windows) > 1 and self._windows[1].count <= count:
            self._windows.popleft()
        if not self._windows or count == self.read:
            return ReaderMark(self.read, self._skip, self._sequence.place)
        first = self._windows[0]
        return ReaderMark(count, first.skip + count - first.count, first.place)


def batches_of_readers(
    stream: Stream, order: StreamOrder, numbers: Iterable[int], size: int
) -> Iterator[tuple[int, list[Any]]]:
    """Yields (a reader's number, samples of it) until these readers have ended.

    Args:
        stream: The stream, which is read from the beginning of epoch 0.
        order: What the order of the stream's samples depends on.
        numbers: The readers' numbers.
        size: The most samples of a batch.
    """
    marks = {number: ReaderMark.beginning(stream) for number in numbers}
    for number, reader in open_readers(stream, order, 0, marks).items():
        while reader.total == UNKNOWN:
            while reader.total == UNKNOWN and reader.waiting < size:
                reader.read_window()
            while reader.waiting >= size or (reader.waiting and reader.total != UNKNOWN):
                yield number, [reader.take() for _ in range(min(size, reader.waiting))]


def any_sample(stream: Stream, order: StreamOrder) -> Any:
    """Returns a sample of the stream; raises `UserError` if it has none."""
    for number in range(order.readers):
        mark = ReaderMark.beginning(stream)
        for sample in open_sequence(stream, order, number, 0, mark.place).take(1):
            return sample
    raise UserError("the stream gave no sample at all: check its shards")


def open_readers(
    stream: Stream, order: StreamOrder, epoch: int, marks: Mapping[int, ReaderMark]
) -> dict[int, Reader]:
    """Returns the readers of one process in an epoch, by number.

    Args:
        stream: The stream.
        order: What the order of the stream's samples depends on.
        epoch: The epoch.
        marks: Where each reader goes on, by its number.
    """
    shared = _shared_shards(stream, order, epoch, marks)
    return {
        number: Reader(
            open_sequence(stream, order, number, epoch, mark.place, shared.get(number)),
            order,
            number,
            epoch,
            mark,
        )
        for number, mark in marks.items()
    }


def _shared_shards(
    stream: Stream, order: StreamOrder, epoch: int, marks: Mapping[int, ReaderMark]
) -> dict[int, SharedShard]:
    """Returns the shard of each reader, where several readers have parts of one.

    Args:
        stream: The stream.
        order: What the order of the stream's samples depends on.
        epoch: The epoch.
        marks: Where each reader of this process goes on, by its number.
    """
    source = stream.source
    while isinstance(source, Pack):
        source = source.stream.source
    if isinstance(source, Mixture) or order.readers <= order.shards:
        return {}
    parts = {number: next(order.parts(number, epoch)) for number in marks}
    offsets: dict[int, dict[int, int]] = {}
    for number, part in parts.items():
        offsets.setdefault(part.shard, {})[part.first] = marks[number].place[1]
    strides = order.readers // order.shards
    opened = {shard: SharedShard(source, shard, strides, of) for shard, of in offsets.items()}
    return {number: opened[part.shard] for number, part in parts.items()}
