"""Deals the shards of a stream to its readers, the readers to ranks and their processes, and keys
the shuffle of samples. Pure.

Rules:
 I1  A stream of at least as many shards as readers is read shard by shard: reader v has the shards
     at places v, v + V, v + 2V, ... of the epoch's order. With fewer shards, V is a multiple of
     their number S, and reader v has every (V/S)th sample of one shard.
 I2  The samples of a reader are shuffled within windows: runs of so many samples, the last of an
     epoch shorter. What is drawn depends on the seed, the epoch, the reader and the window alone.
 I3  A reader belongs to one rank, and there to one process, by its number alone.
 I4  Where global batches are cut into slices, the readers v, v + G, v + 2G, ... are a group, and a
     rank and a process have whole groups: the samples of a slice are all of one group. While no
     reader has ended, a batch has equally many samples of each group, for G divides V.

Shapes: V readers, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elasticzero.data.hashing import mix64, mix64_each
from elasticzero.data.sampling import Indices, permuted
from elasticzero.data.slices import run_of
from elasticzero.errors import UserError

DEFAULT_READERS = 64
_PLACES = 64
"""Number of places of the order of shards that are computed at once."""


@dataclass(frozen=True, slots=True)
class Part:
    """Names the samples that a reader reads of one shard: every `stride`th one from `first` on."""

    shard: int
    first: int = 0
    stride: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """Describes what the order of a stream's samples depends on, besides the samples."""

    shards: int
    readers: int
    window: int
    """Number of samples that are read at once, and shuffled among each other."""
    seed: int = 0
    shuffle: bool = True
    contents: str = ""
    """Describes what the stream consists of."""

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise UserError("the stream has no shards: give it at least one")
        if self.window < 1:
            raise UserError(f"shuffle_window is {self.window}; it must be at least 1")
        if self.readers < 1:
            raise UserError(f"readers is {self.readers}; it must be at least 1")

    @property
    def described(self) -> dict[str, Any]:
        """Returns what the order depends on, by name."""
        return {
            "stream": self.contents,
            "readers": self.readers,
            "shuffle_window": self.window,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    @property
    def inputs(self) -> list[Any]:
        """Returns what the order depends on, as the position in the data has it."""
        return [*self.described.values()]

    def parts(self, reader: int, epoch: int, start: int = 0) -> Iterator[Part]:
        """Yields what a reader reads in an epoch, in order, from part number `start` on (I1).

        Args:
            reader: The reader's number.
            epoch: The epoch, which has an order of shards of its own.
            start: Number of parts that are left out at the beginning.
        """
        if self.readers > self.shards:
            place = reader % self.shards
            for shard in self._at(range(place, place + 1)[start:], epoch):
                yield Part(shard, reader // self.shards, self.readers // self.shards)
            return
        places = range(reader, self.shards, self.readers)[start:]
        for first in range(0, len(places), _PLACES):
            for shard in self._at(places[first : first + _PLACES], epoch):
                yield Part(shard)

    def _at(self, places: range, epoch: int) -> list[int]:
        """Returns the shards at these places of the epoch's order."""
        if not self.shuffle:
            return list(places)
        shards = permuted(np.array(places, np.uint64), self.shards, self.seed, epoch)
        return [int(shard) for shard in shards]

    def window_order(self, reader: int, epoch: int, window: int, samples: int) -> Indices:
        """Returns the order of the samples of a window of one reader (I2).

        Args:
            reader: The reader's number.
            epoch: The epoch.
            window: A number that stands for the window.
            samples: Number of samples in it.
        """
        if not self.shuffle or samples < 2:
            return np.arange(samples)
        key = mix64(self.seed + 0x8CB92BA72F3D8DD7)
        for number in (epoch, reader, window):
            key = mix64(key + mix64(number + 0x9E3779B97F4A7C15))
        drawn = mix64_each(np.arange(samples, dtype=np.uint64) + np.uint64(key))
        return np.argsort(drawn, kind="stable")


def default_readers(shards: Sequence[int]) -> int:
    """Returns the number of readers of a stream for which none was given: the most up to 64 that
    can be dealt the shards of each of its sources."""
    for readers in range(DEFAULT_READERS, 1, -1):
        if all(readers <= count or readers % max(1, count) == 0 for count in shards):
            return readers
    return 1


def check_groups(readers: int, groups: int, world_size: int) -> None:
    """Checks that a stream's readers can be dealt in groups, and the groups to the ranks (I4).

    Args:
        readers: Number of readers.
        groups: Number of groups, one for each slice of a global batch.
        world_size: Number of ranks.

    Raises:
        UserError: The readers are no multiple of the groups, or there are more ranks than groups.
    """
    if readers % groups:
        raise UserError(
            f"the stream has {readers} readers, and virtual_batch cuts a global batch into "
            f"{groups} slices: give ez.Stream readers=, a multiple of {groups}"
        )
    if world_size > groups:
        raise UserError(
            f"virtual_batch cuts a global batch of the stream into {groups} slices, and the world "
            f"has {world_size} ranks, each of which needs one: run on {groups} ranks at most "
            "(--nnodes), or make more slices from the start of a job"
        )


def group_sums(counts_V: Indices, groups: int) -> list[int]:
    """Returns the sums of what is counted of each reader, by group (I4)."""
    sums_G: list[int] = counts_V.reshape(-1, groups).sum(0).tolist()
    return sums_G


def units_of(rank: int, world_size: int, readers: int, groups: int | None) -> list[range]:
    """Returns the readers of a rank in units that one process has: groups, or single readers.

    Args:
        rank: The rank.
        world_size: Number of ranks.
        readers: Number of readers of the stream.
        groups: Number of groups of readers; None: global batches are not cut into slices.
    """
    if groups is None:
        return [range(v, v + 1) for v in readers_of(rank, world_size, readers)]
    run = run_of(groups, rank, world_size)
    return [range(g, readers, groups) for g in range(run.start, run.stop)]


def readers_of(rank: int, world_size: int, readers: int) -> range:
    """Returns the readers of a rank (I3).

    Args:
        rank: The rank.
        world_size: Number of ranks.
        readers: Number of readers of the stream.
    """
    return range(rank, readers, world_size)


def units_of_process(units: Sequence[range], process: int, processes: int) -> Sequence[range]:
    """Returns the units of one of a rank's processes that load data (I3, I4).

    They follow each other in the turn, so that a batch smaller than a round has its samples of few
    processes.

    Args:
        units: The rank's units.
        process: Number of the process on its rank, from 0.
        processes: Number of processes of the rank that load data.
    """
    count = len(units)
    return units[process * count // processes : (process + 1) * count // processes]
