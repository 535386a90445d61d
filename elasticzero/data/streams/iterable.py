"""Makes streams of torch's `IterableDataset` and of Hugging Face's, which is one of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from elasticzero.torch_internals.tensors import as_data_worker


class WholeDataset:
    """Reads a dataset that is not divided: one shard, in which a resume skips.

    The dataset is told that it is in no data worker, so that it divides nothing itself.
    """

    shards = 1

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def read(self, shard: int, start: int) -> Iterator[Any]:
        return islice(samples_as_worker(self._dataset, shard, 0), start, None)


class WorkerShards:
    """Reads a dataset that divides itself by `torch.utils.data.get_worker_info()`: a shard is what
    one of so many workers gets, in which a resume skips."""

    def __init__(self, dataset: Any, workers: int) -> None:
        self._dataset = dataset
        self.shards = workers

    def read(self, shard: int, start: int) -> Iterator[Any]:
        return islice(samples_as_worker(self._dataset, shard, self.shards), start, None)


class HuggingFaceShards:
    """Reads a `datasets.IterableDataset` by its shards, such as files; a resume skips in a
    shard."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.shards = int(getattr(dataset, "num_shards", None) or dataset.n_shards)

    def read(self, shard: int, start: int) -> Iterator[Any]:
        part = self._dataset.shard(num_shards=self.shards, index=shard)
        return samples_as_worker(part.skip(start) if start else part, 0, 0)


def samples_as_worker(dataset: Any, number: int, workers: int) -> Iterator[Any]:
    """Yields a dataset's samples, while the dataset is told that it is in a data worker.

    Args:
        dataset: The dataset.
        number: The worker's number, from 0.
        workers: Number of data workers; 0: the dataset is told that it is in none.
    """
    as_data_worker(number, workers, dataset)
    samples = iter(dataset)
    while True:
        as_data_worker(number, workers, dataset)
        try:
            sample = next(samples)
        except StopIteration:
            return
        finally:
            as_data_worker(0, 0, None)
        yield sample
