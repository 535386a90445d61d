"""Numbered samples as datasets of other packages, made as scripts make them.

The packages are imported where they are used: only `make integrations` has them. `STREAM_DATA` in
the environment names the folder of the files that `write` has written.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

SIZES = (50, 3, 97, 61, 80, 40)
"""Samples of each tar file."""
SAMPLES = sum(SIZES)
Sample = tuple[Tensor, Tensor, int]


class Numbered(Dataset[Sample]):
    """Gives each sample of a dataset of `x` and `y` with its number."""

    def __init__(self, data: TensorDataset) -> None:
        assert len(data) == SAMPLES
        self._data = data

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        x, y = self._data[index]
        return x, y, index


@dataclass(frozen=True)
class Kind:
    dataset: Callable[[Numbered], Any]
    """Makes what a script gives `session.batches`."""
    write: Callable[[Numbered, Path], None] = lambda _, to: None


def folder() -> str:
    return os.environ["STREAM_DATA"]


class Stateful(IterableDataset[Sample]):
    """Has what `StatefulDataLoader` asks for, of which the session needs nothing."""

    def __init__(self, data: Numbered) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Sample]:
        return (self._data[number] for number in range(len(self._data)))

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("the session asked for the dataset's position")

    def load_state_dict(self, _: dict[str, Any]) -> None:
        raise AssertionError("the session gave the dataset a position")


def stateful_loader(data: Numbered) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Stateful(data), batch_size=5, num_workers=2)


def indexed_loader(data: Numbered) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, batch_size=5, shuffle=True, num_workers=2)


def write_tars(_: Numbered, to: Path) -> None:
    first = 0
    for file, size in enumerate(SIZES):
        with tarfile.open(to / f"{file}.tar", "w") as tar:
            for number in range(first, first + size):
                text = json.dumps(number).encode()
                info = tarfile.TarInfo(f"{number:06}.json")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))
        first += size


def tar_files(data: Numbered) -> Any:
    import webdataset

    urls = f"{folder()}/{{0..{len(SIZES) - 1}}}.tar"
    dataset = webdataset.WebDataset(urls, shardshuffle=False)
    return dataset.decode().map(lambda sample: data[sample["json"]])


def write_parquet(_: Numbered, to: Path) -> None:
    import datasets

    first = 0
    for file, size in enumerate(SIZES):
        rows = [{"number": number} for number in range(first, first + size)]
        datasets.Dataset.from_list(rows).to_parquet(str(to / f"{file}.parquet"), batch_size=16)
        first += size


def parquet_files(data: Numbered) -> Any:
    import datasets

    files = sorted(map(str, Path(folder()).glob("*.parquet")))
    # Each node writes its own description of the files, as machines do.
    cache = tempfile.mkdtemp()
    dataset = datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=True, cache_dir=cache
    )
    return dataset.map(lambda row: dict(zip("xy", data[row["number"]], strict=False)))


def write_chunks(data: Numbered, to: Path) -> None:
    from litdata.streaming import Cache

    cache = Cache(str(to), chunk_size=41)
    for number in range(len(data)):
        cache[number] = data[number]
    cache.done()
    cache.merge()


def chunks(_: Numbered) -> Any:
    from litdata import StreamingDataset

    return StreamingDataset(folder())


def mosaic() -> Any:
    """mosaicml-streaming without its part for pictures, which needs torchvision: PyPI's wheels of
    that need torch for CUDA."""
    sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
    import streaming

    return streaming


def write_mds(data: Numbered, to: Path) -> None:

    columns = {"x": "ndarray:float64", "y": "ndarray:float64", "number": "int"}
    with mosaic().MDSWriter(out=str(to), columns=columns, size_limit=4096) as out:
        for x, y, number in (data[number] for number in range(len(data))):
            out.write({"x": x.numpy(), "y": y.numpy(), "number": number})


def clean_after_killed_workers() -> None:
    """As docs/data.md tells scripts with `remote=`."""
    from streaming.base.util import clean_stale_shared_memory

    if os.environ.get("LOCAL_RANK", "0") == "0":
        for left in Path(tempfile.gettempdir()).glob("0*_filelock"):
            left.unlink()
    clean_stale_shared_memory()


def mds(_: Numbered) -> Any:
    class Transformed(mosaic().StreamingDataset):  # type: ignore[misc]
        """Makes of a row what training needs, as scripts do."""

        def __getitem__(self, at: Any) -> Any:
            row = super().__getitem__(at)
            return row["x"], row["y"], row["number"]

    if cache := os.environ.get("STREAM_CACHE"):  # a node's own folder
        clean_after_killed_workers()
        return Transformed(remote=folder(), local=cache, batch_size=5)
    return Transformed(local=folder(), batch_size=5)


KINDS = {
    "stateful-loader": Kind(stateful_loader),
    "indexed-loader": Kind(indexed_loader),
    "huggingface": Kind(parquet_files, write_parquet),
    "webdataset": Kind(tar_files, write_tars),
    "litdata": Kind(chunks, write_chunks),
    "mosaic": Kind(mds, write_mds),
}
