"""Defines what a stream is to a training script: shards, and a way to read each from any sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from elasticzero.data.streams.dealing import DEFAULT_READERS, StreamOrder, default_readers
from elasticzero.data.streams.iterable import WorkerShards
from elasticzero.errors import UserError

SHUFFLE_WINDOW = 16


class ShardSource(Protocol):
    """Gives the samples of a stream, shard by shard, in the same order each time."""

    @property
    def shards(self) -> int:
        """Number of shards, the same for the whole job."""

    def read(self, shard: int, start: int) -> Iterator[Any]:
        """Yields the samples of a shard from its sample number `start` on."""


class Stream:
    """Presents samples that have no index to `session.batches`.

    A stream is read by `readers`, whose number is fixed for the job and which are dealt to whatever
    ranks there are. Each reads a share of the shards. Global batches draw from them in turn.
    """

    def __init__(
        self,
        shards: Sequence[Any] | ShardSource,
        read: Callable[..., Iterable[Any]] | None = None,
        *,
        readers: int | None = None,
        shuffle_window: int = SHUFFLE_WINDOW,
    ) -> None:
        """Makes a stream of shards, or of an object with `shards` and `read`.

        shards: such as paths of files; or an object with `shards`, their number, and `read(shard,
        start)`, where `shard` is a number. read: `read(shard, start)` yields the samples of a shard
        from sample `start` on, the same ones in the same order each time; with one parameter,
        `read(shard)` yields all of them, and a resume skips. readers: between the number of ranks
        and that of shards, or a multiple of that, in which case several readers share a shard;
        default: about 64. shuffle_window: number of samples of a reader that `shuffle=True`
        shuffles among each other, besides the order of shards.
        """
        if read is None and not hasattr(shards, "read"):
            raise UserError(
                f"ez.Stream was given a {type(shards).__name__} and no function: give it shards "
                "and read=, a function read(shard, start) that yields the samples of a shard"
            )
        self.source: ShardSource = shards if read is None else _Shards(shards, read)  # type: ignore[assignment, arg-type]
        self.readers = readers
        self.shuffle_window = shuffle_window

    @classmethod
    def of_workers(
        cls, dataset: Any, *, readers: int = DEFAULT_READERS, shuffle_window: int = SHUFFLE_WINDOW
    ) -> Stream:
        """Makes a stream of an `IterableDataset` that divides itself among data workers.

        dataset: `torch.utils.data.get_worker_info()` tells it of `readers` workers, of which each
        reader is one. A resume skips. The other arguments are those of `Stream`.
        """
        source = WorkerShards(dataset, readers)
        return cls(source, readers=readers, shuffle_window=shuffle_window)


def stream_order(stream: Stream, seed: int, shuffle: bool) -> StreamOrder:
    """Returns what the order of a stream's samples depends on."""
    shards = stream.source.shards
    return StreamOrder(
        shards=shards,
        readers=default_readers(shards) if stream.readers is None else stream.readers,
        window=stream.shuffle_window if shuffle else 1,
        seed=seed,
        shuffle=shuffle,
    )


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
    kinds = [p.kind for p in inspect.signature(read).parameters.values()]
    positional = [k for k in kinds if k.name in ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")]
    return len(positional) > 1 or any(k.name == "VAR_POSITIONAL" for k in kinds)
