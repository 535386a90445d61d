"""Defines what a stream is to a training script: shards, and a way to read each from any sample."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import IterableDataset

from elasticzero.data.hashing import mix64
from elasticzero.data.streams.dealing import DEFAULT_READERS, StreamOrder, default_readers
from elasticzero.data.streams.iterable import WorkerShards
from elasticzero.data.streams.kinds import source_of
from elasticzero.errors import UserError

SHUFFLE_WINDOW = 16


class ShardSource(Protocol):
    """Gives the samples of a stream, shard by shard, in the same order each time."""

    @property
    def shards(self) -> int:
        """Returns the number of shards, the same for the whole job."""

    def read(self, shard: int, start: int) -> Iterator[Any]:
        """Yields the samples of a shard.

        Args:
            shard: The shard's number, from 0.
            start: Number of its samples that are left out at the beginning.
        """


class Stream:
    """Presents samples that have no index to `session.batches`.

    A stream is read by `readers`, whose number is fixed for the job and which are dealt to whatever
    ranks there are. Each reads a share of the shards. Global batches draw from them in turn.
    """

    def __init__(
        self,
        shards: Sequence[Any] | ShardSource | IterableDataset[Any],
        read: Callable[..., Iterable[Any]] | None = None,
        *,
        readers: int | None = None,
        shuffle_window: int = SHUFFLE_WINDOW,
    ) -> None:
        """Makes a stream of shards, of an object with `shards` and `read`, or of a dataset.

        Args:
            shards: Such as paths of files; or an object with `shards`, their number, and
                `read(shard, start)`, where `shard` is a number; or a dataset that
                `session.batches` takes as a stream, to give it another window, or a part in a
                mixture.
            read: `read(shard, start)` yields the samples of a shard from sample `start` on, the
                same ones in the same order each time; with one parameter, `read(shard)` yields all
                of them, and a resume skips.
            readers: Between the number of ranks and that of shards, or a multiple of that, in which
                case several readers share a shard; default: about 64.
            shuffle_window: Number of samples of a reader that `shuffle=True` shuffles among each
                other, besides the order of shards.

        Raises:
            UserError: `shards` has no `read`, and no `read` was given.
        """
        data: Any = shards
        source: Any = _Shards(data, read) if read is not None else source_of(data) or data
        if not hasattr(source, "read"):
            raise UserError(
                f"ez.Stream was given a {type(shards).__name__} and no function: give it shards "
                "and read=, a function read(shard, start) that yields the samples of a shard"
            )
        self.source: ShardSource | Mixture | Pack = source
        self.readers = readers
        self.shuffle_window = shuffle_window

    @classmethod
    def of_workers(
        cls, dataset: Any, *, readers: int = DEFAULT_READERS, shuffle_window: int = SHUFFLE_WINDOW
    ) -> Stream:
        """Makes a stream of an `IterableDataset` that divides itself among data workers.

        A resume skips the samples that are used.

        Args:
            dataset: `torch.utils.data.get_worker_info()` tells it of `readers` workers, of which
                each reader is one.
            readers: Number of readers, as of `Stream`.
            shuffle_window: Number of samples that are shuffled among each other, as of `Stream`.
        """
        source = WorkerShards(dataset, readers)
        return cls(source, readers=readers, shuffle_window=shuffle_window)

    @classmethod
    def mixed(
        cls,
        streams: Mapping[Stream, float],
        *,
        repeat: bool = False,
        readers: int | None = None,
        shuffle_window: int = SHUFFLE_WINDOW,
    ) -> Stream:
        """Makes a stream that draws each sample from one of several, at random by their weights.

        Args:
            streams: Each with its weight, a positive number; readers and windows are those of the
                mixture.
            repeat: A stream that has ended begins again, in another order, so that an epoch has no
                end and the loop needs `steps=`; by default it drops out, and an epoch has each
                sample of all of them once.
            readers: Number of readers of the mixture, as of `Stream`.
            shuffle_window: Number of samples that are shuffled among each other, as of `Stream`.

        Raises:
            UserError: A weight is not positive, or there is no stream.
        """
        for weight in streams.values():
            if not (0 < weight < math.inf):
                raise UserError(
                    f"ez.Stream.mixed was given the weight {weight}: give positive ones"
                )
        if not streams:
            raise UserError("ez.Stream.mixed was given no stream")
        mixture = Mixture(tuple(streams), tuple(map(float, streams.values())), repeat)
        return cls._of(mixture, readers, shuffle_window)

    def packed(self, length: int, size: Callable[[Any], int] = len) -> Stream:
        """Returns a stream of lists of this one's samples, each list together at most so long.

        A list has samples that follow each other in one reader; one that is longer than `length` by
        itself is a list of its own. `collate_fn` gets a list of these lists.

        Args:
            length: The most that the samples of a list may have together, such as a number of
                tokens.
            size: Gives the length of a sample.

        Raises:
            UserError: The length is below 1.
        """
        if length < 1:
            raise UserError(f"Stream.packed was given the length {length}; it must be at least 1")
        return self._of(Pack(self, length, size), self.readers, self.shuffle_window)

    @classmethod
    def _of(cls, source: Any, readers: int | None, shuffle_window: int) -> Stream:
        made = cls.__new__(cls)
        made.source, made.readers, made.shuffle_window = source, readers, shuffle_window
        return made


@dataclass(frozen=True, slots=True)
class Mixture:
    """Draws each sample from one of several streams."""

    streams: tuple[Stream, ...]
    weights: tuple[float, ...]
    repeat: bool


@dataclass(frozen=True, slots=True)
class Pack:
    """Joins the samples of a stream to lists that are together at most so long."""

    stream: Stream
    length: int
    size: Callable[[Any], int]


def stream_order(stream: Stream, seed: int, shuffle: bool) -> StreamOrder:
    """Returns what the order of a stream's samples depends on.

    Args:
        stream: The stream.
        seed: The seed of the order.
        shuffle: Whether shards and samples are shuffled.

    Raises:
        UserError: The number of readers is above that of shards, and no multiple of it.
    """
    shards = _shards_of(stream)
    readers = default_readers(shards) if stream.readers is None else stream.readers
    for count in shards:
        if count and readers > count and readers % count:
            raise UserError(
                f"readers is {readers}, and the stream has {count} shards: give at most {count}, "
                "or a multiple of it"
            )
    return StreamOrder(
        shards=min(shards),
        readers=readers,
        window=stream.shuffle_window,
        seed=seed,
        shuffle=shuffle,
        contents=_contents(stream),
    )


def component_order(stream: Stream, order: StreamOrder, number: int) -> StreamOrder:
    """Returns the order of a component of a mixture, by its number.

    Args:
        stream: The component.
        order: The order of the mixture.
        number: The component's number, which gives it a seed of its own.
    """
    shards = min(_shards_of(stream))
    return replace(order, shards=shards, seed=mix64(order.seed + mix64(number)))


def _shards_of(stream: Stream) -> list[int]:
    """Returns the number of shards of each source in a stream."""
    match stream.source:
        case Mixture() as mixture:
            return [count for component in mixture.streams for count in _shards_of(component)]
        case Pack() as pack:
            return _shards_of(pack.stream)
        case source:
            return [source.shards]


def _contents(stream: Stream) -> str:
    """Describes what a stream consists of, for comparison with that of another run."""
    match stream.source:
        case Mixture() as mixture:
            parts = zip(mixture.weights, mixture.streams, strict=True)
            text = ", ".join(f"{weight:g} of ({_contents(part)})" for weight, part in parts)
            return text + (", repeated" if mixture.repeat else "")
        case Pack() as pack:
            return f"packed to {pack.length}: {_contents(pack.stream)}"
        case source:
            return f"{source.shards} shards"


class _Shards:
    """Makes a source of a sequence of shards and a function that reads one."""

    def __init__(self, shards: Sequence[Any], read: Callable[..., Iterable[Any]]) -> None:
        self._shards = shards
        self._read = read
        self._seeks = _takes_start(read)

    @property
    def shards(self) -> int:
        return len(self._shards)

    def read(self, shard: int, start: int) -> Iterator[Any]:
        if self._seeks:
            return iter(self._read(self._shards[shard], start))
        return islice(self._read(self._shards[shard]), start, None)


def _takes_start(read: Callable[..., Any]) -> bool:
    """Returns whether the function takes a second positional argument."""
    try:
        inspect.signature(read).bind(None, 0)
    except TypeError:
        return False
    return True
