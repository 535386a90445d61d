"""Finds out what kind of dataset a script has given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from elasticzero.data.streams.iterable import HuggingFaceShards, WholeDataset
from elasticzero.data.streams.source import Stream
from elasticzero.errors import UserError


def as_stream(dataset: Any) -> Stream | None:
    """Returns the dataset as a stream; None: it is none, since its samples have an index, or
    nothing that can be read."""
    if isinstance(dataset, Stream):
        return dataset
    if _is_hugging_face(dataset):
        return Stream(HuggingFaceShards(dataset))
    if isinstance(dataset, IterableDataset):
        return Stream(WholeDataset(dataset))
    return None


def _is_hugging_face(dataset: Any) -> bool:
    kinds = [(kind.__module__, kind.__name__) for kind in type(dataset).__mro__]
    return ("datasets.iterable_dataset", "IterableDataset") in kinds


def length_of(dataset: Any) -> int:
    """Returns the number of samples; raises `UserError` for a dataset that is not indexed by
    number."""
    if isinstance(dataset, Mapping):
        names = ", ".join(map(repr, list(dataset)[:4]))
        raise UserError(
            f"session.batches was given a {type(dataset).__name__} with the keys {names}: give one "
            "dataset of it"
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            f"{type(dataset).__name__} has no __len__ and __getitem__: give a dataset whose "
            "samples are reached by index, an IterableDataset, or an ez.Stream of shards"
        )
    return len(dataset)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderParts:
    """Says what a `DataLoader` was made of."""

    dataset: Any
    batch_size: int
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int
    drop_last: bool
    shuffle: bool
    seed: int | None
    """Seed of its sampler; None: it has none."""
    sampler: Any
    """A sampler of the script's own; None: the order is all samples, shuffled or not."""


def parts_of(loader: DataLoader[Any]) -> LoaderParts:
    """Returns what a loader was made of; raises `UserError` for what the session cannot take
    over."""
    if loader.batch_size is None:
        raise UserError(
            "session.batches was given a DataLoader that makes its batches by batch_sampler=, or "
            "none: give it batch_size= and, for another order of samples, sampler="
        )
    if loader.worker_init_fn is not None:
        raise UserError(
            "session.batches was given a DataLoader with worker_init_fn=, but data workers are the "
            "session's: leave it out, and seed what is random by the sample's index"
        )
    sampler = loader.sampler
    known = isinstance(sampler, (DistributedSampler, SequentialSampler)) or (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
    streamed = isinstance(loader.dataset, IterableDataset)
    shuffled = isinstance(sampler, RandomSampler) or getattr(sampler, "shuffle", False)
    return LoaderParts(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        collate_fn=None if loader.collate_fn is default_collate else loader.collate_fn,
        num_workers=loader.num_workers,
        drop_last=loader.drop_last,
        shuffle=streamed or bool(shuffled),
        seed=getattr(sampler, "seed", None) if known else None,
        sampler=None if known or streamed else sampler,
    )
