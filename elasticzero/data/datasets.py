"""Finds out what kind of dataset a script has given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

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
    if isinstance(dataset, DataLoader):
        raise UserError(
            "session.batches was given a DataLoader: give its dataset, and what else it was told, "
            "session.batches(loader.dataset, global_batch=…, collate_fn=loader.collate_fn, "
            "num_workers=…)"
        )
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
