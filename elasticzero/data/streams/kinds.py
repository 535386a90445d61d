"""Finds out which datasets are streams, by the names of their classes: none of the packages that
define them is imported."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from elasticzero.data.streams.indexed import IndexedShards, chunks_of_litdata, shards_of_mosaic
from elasticzero.data.streams.iterable import HuggingFaceShards, WholeDataset
from elasticzero.data.streams.webdataset import TarFiles
from elasticzero.errors import UserError


def class_names(thing: Any) -> set[str]:
    """Returns the full names of an object's class and of those that it is derived from."""
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(thing).__mro__}


DatasetSource = HuggingFaceShards | IndexedShards | TarFiles | WholeDataset


def source_of(dataset: Any) -> DatasetSource | None:
    """Returns what reads the shards of a dataset; None: it is not known as a stream.

    Raises `UserError` for one that would not give each sample once.
    """
    kinds = class_names(dataset)
    if "datasets.iterable_dataset.IterableDataset" in kinds:
        return HuggingFaceShards(dataset)
    if "webdataset.pipeline.DataPipeline" in kinds:
        return TarFiles(dataset)
    if "litdata.streaming.dataset.StreamingDataset" in kinds:
        return chunks_of_litdata(dataset)
    if "litdata.utilities.base._BaseStreamingDatasetWrapper" in kinds:
        raise UserError(
            f"a litdata.{type(dataset).__name__} divides itself by the ranks of the moment: give a "
            "litdata.StreamingDataset, or ez.Stream.mixed of several in ez.Stream(dataset) each"
        )
    if "streaming.base.dataset.StreamingDataset" in kinds:
        return shards_of_mosaic(dataset)
    if isinstance(dataset, IterableDataset):
        return WholeDataset(dataset)
    return None
