"""Finds out what kind of dataset a script has given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    default_collate,
)

from elasticzero.data.streams.kinds import class_names, source_of
from elasticzero.data.streams.source import Stream
from elasticzero.errors import UserError

RANDOM_SAMPLERS = {
    "torch.utils.data.sampler.RandomSampler",
    "torchdata.stateful_dataloader.sampler.RandomSampler",
}
"""Names of the classes of samplers that shuffle."""


def as_stream(dataset: Any) -> Stream | None:
    """Returns the dataset as a stream; None: it is none, since its samples have an index, or
    nothing that can be read."""
    if isinstance(dataset, Stream):
        return dataset
    source = source_of(dataset)
    return None if source is None else Stream(source)


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
    sampler: Any = loader.sampler
    random = bool(class_names(sampler) & RANDOM_SAMPLERS)
    follows_order = isinstance(sampler, (DistributedSampler, SequentialSampler)) or (
        random and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )
    streamed = isinstance(loader.dataset, IterableDataset)
    shuffled = random or getattr(sampler, "shuffle", False)
    return LoaderParts(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        collate_fn=None if loader.collate_fn is default_collate else loader.collate_fn,
        num_workers=loader.num_workers,
        drop_last=loader.drop_last,
        shuffle=streamed or bool(shuffled),
        seed=getattr(sampler, "seed", None) if follows_order else None,
        sampler=None if follows_order or streamed else sampler,
    )


def check_unused(loader: DataLoader[Any]) -> None:
    """Raises `UserError` for a loader with a position of its own that is not the beginning, as
    torchdata's `StatefulDataLoader` and its samplers have."""
    if getattr(loader, "next_iter_state", None) or getattr(loader.sampler, "next_yielded", None):
        done = "was given a state by load_state_dict"
    elif hasattr(loader, "next_iter_state") and getattr(loader, "_iterator", None) is not None:
        done = "has been iterated already"
    else:
        return
    raise UserError(
        f"session.batches was given a {type(loader).__name__} that {done}, but the session keeps "
        "the position in the data itself, and restores it: give a new one, and leave out its "
        "state_dict and load_state_dict"
    )
