"""Makes streams of litData's and mosaicml-streaming's datasets, whose files have samples with an
index: a resume seeks.

Their own division among ranks and data workers, and their own shuffle, take place where they are
iterated. They are not iterated here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from elasticzero.errors import UserError


class IndexedShards:
    """Reads a dataset that is indexed by number, shard by shard."""

    def __init__(self, dataset: Any, sizes: Sequence[int]) -> None:
        """Takes the dataset, and the number of samples of each shard, in the order of the index."""
        self._dataset = dataset
        self._ends = list(accumulate(map(int, sizes)))

    @property
    def shards(self) -> int:
        return len(self._ends)

    def read(self, shard: int, start: int) -> Iterator[Any]:
        first = self._ends[shard - 1] if shard else 0
        return map(self._dataset.__getitem__, range(first + start, self._ends[shard]))


def chunks_of_litdata(dataset: Any) -> IndexedShards:
    """Returns the chunks of a `litdata.StreamingDataset` as shards."""
    alone = copy.copy(dataset)
    # As of one process: otherwise its length is that of this rank's part.
    alone.distributed_env = type(dataset.distributed_env)(world_size=1, global_rank=0, num_nodes=1)
    alone.cache = alone.shuffler = None
    alone.set_shuffle(False)
    alone.set_drop_last(False)
    if len(alone) == 0:  # which makes what knows the chunks
        raise UserError("the litdata.StreamingDataset has no samples: check its input_dir")
    chunks = alone.shuffler.cache.get_chunk_intervals()
    return IndexedShards(alone, [stop - start for _, start, stop, _ in chunks])


def shards_of_mosaic(dataset: Any) -> IndexedShards:
    """Returns the shards of a `streaming.StreamingDataset`; raises `UserError` if an epoch of it is
    to have samples more than once, or not at all."""
    chosen = [int(stream.choose) for stream in dataset.streams]
    if chosen != [int(samples) for samples in dataset.samples_per_stream]:
        raise UserError(
            "the streaming.StreamingDataset weights its streams, by proportion=, repeat=, choose= "
            "or epoch_size=, and an epoch of the session has each sample once: leave these out, "
            "and weight by ez.Stream.mixed, with one dataset for each stream"
        )
    return IndexedShards(dataset, dataset.samples_per_shard)
