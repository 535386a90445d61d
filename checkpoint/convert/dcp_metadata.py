"""Reads the metadata of a torch.distributed.checkpoint directory without running anything in it.

torch writes the directory's `.metadata` as a pickle, and a pickle can name any function for its
reader to call. `pickle_reader` looks names up in a short table of inert stand-ins and refuses all
others, so that reading can make strings, numbers, containers and records and do nothing else. It is
the one place in this project that reads a pickle; none is written.
"""

from __future__ import annotations

import re
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pickle import UnpicklingError  # noqa: TID251
from typing import Any

from elasticzero.checkpoint.convert.pickle_reader import (
    InertRecord,
    Mapped,
    Size,
    StandIn,
    read_pickle,
)
from elasticzero.checkpoint.format.coverage import check_cover
from elasticzero.checkpoint.storage.base import Readable, read_small
from elasticzero.errors import CheckpointDamaged, UserError

METADATA_NAME = ".metadata"
_LIMIT_BYTES = 1 << 28
_MAX_DIMS = 64
"""Maximum number of dimensions of a tensor, and of keys in a path."""

__all__ = ["UnpicklingError"]  # raised by torch for an item with a name that `weights_only` forbids

KeyPath = tuple[str | int, ...]
"""Keys from the root of the state dict to a value; a number is a position in a list."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Locates something that `torch.save` wrote within a file."""

    file: str
    start: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Box:
    """Describes a part of a tensor: the elements from `offsets` on, `sizes` of them in each
    dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: StoredItem


@dataclass(frozen=True, slots=True)
class StoredTensor:
    dtype: str
    """The dtype's name in torch."""
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    """The parts of the tensor, which hold each of its elements once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Lists a directory's tensors and other values by their paths."""

    tensors: Mapping[KeyPath, StoredTensor]
    values: Mapping[KeyPath, StoredItem]


def read_contents(
    storage: Readable, names: Mapping[tuple[str, str], StandIn] | None = None
) -> Contents:
    """Returns the contents of the directory, as its `.metadata` lists them.

    Args:
        storage: The directory.
        names: Stand-ins for names of the program that wrote it; None: it has none.

    Raises `UserError` if there is no `.metadata` or if it asks for code to be run, and
    `CheckpointDamaged` if it cannot be parsed.
    """
    where = f"{storage.where}/{METADATA_NAME}"
    table = {**_TABLE, **(names or {})}
    try:
        data = read_small(storage, METADATA_NAME, _LIMIT_BYTES)
    except FileNotFoundError:
        raise UserError(
            f"{where} does not exist: {storage.where} is no directory of "
            "torch.distributed.checkpoint"
        ) from None

    def find(module: str, name: str) -> StandIn:
        if (module, name) in table:
            return table[module, name]
        if module == "torch" and _DTYPE.fullmatch(name):
            return name
        raise UserError(
            f"{where} asks for {module[:80]!a}.{name[:80]!a}, which no checkpoint of torch needs: "
            "reading it could run code of whoever wrote it, so it is not read"
        )

    try:
        return _contents(read_pickle(data, find))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise CheckpointDamaged(f"{where} makes no sense: {_shown(error)}") from None


def _shown(value: object) -> str:
    """Returns a short text of a value, however large the value is."""
    if isinstance(value, Exception):
        return f"{type(value).__name__}({', '.join(map(_shown, value.args))})"
    short = reprlib.Repr()
    short.maxlevel, short.maxtuple, short.maxlist, short.maxdict = 2, 8, 8, 4
    short.maxstring, short.maxother, short.maxlong = 200, 60, 60
    return short.repr(value)[:300]


class _Tensor(InertRecord):
    """Stands for `TensorStorageMetadata`."""


class _Value(InertRecord):
    """Stands for `BytesStorageMetadata`."""


_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_METADATA, "Metadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PureWindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
_TABLE: Mapping[tuple[str, str], StandIn] = {
    **dict.fromkeys(_RECORDS, InertRecord),
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Value,
    ("torch", "Size"): Size,
    ("collections", "OrderedDict"): Mapped,
}
_DTYPE = re.compile(r"bool|(?:u?int|float|bfloat|complex)\d{1,3}(?:_e\dm\d\w{0,6})?")
"""Matches the names of torch's dtypes, including those that safetensors lacks."""


def _contents(metadata: Any) -> Contents:
    described: Mapping[str, Any] = metadata.state_dict_metadata
    paths: Mapping[str, Any] = metadata.planner_data or {}
    places: dict[tuple[str, tuple[int, ...] | None], StoredItem] = {}
    for index, info in metadata.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise UserError(
                f"{_shown(info.relative_path)} is compressed "
                f"({_shown(info.transform_descriptors)}): save it "
                "without extensions to import it"
            )
        offset = getattr(index, "offset", None)
        if not isinstance(index.fqn, str):
            raise TypeError(f"{_shown(index.fqn)} is not a name")
        places[index.fqn, None if offset is None else _whole(offset)] = _item(info)
    tensors, values = {}, {}
    for name, about in described.items():
        if not isinstance(name, str):
            raise TypeError(f"{_shown(name)} is not a name")
        path = _path(paths.get(name, (name,)))
        if isinstance(about, _Tensor):
            tensors[path] = _tensor(name, about, places)
        elif isinstance(about, _Value):
            values[path] = places[name, None]
        else:
            raise ValueError(f"{_shown(name)} is neither a tensor nor a value")
    if len(tensors) + len(values) != len(described):
        raise ValueError("two entries have the same path")
    return Contents(tensors=tensors, values=values)


def _tensor(name: str, about: Any, places: Mapping[Any, StoredItem]) -> StoredTensor:
    shape = _whole(about.size)
    properties = about.properties
    dtype = properties.parts[0] if properties.parts else properties.dtype
    boxes = []
    for chunk in about.chunks:
        offsets, sizes = _whole(chunk.offsets), _whole(chunk.sizes)
        if (name, offsets) not in places:
            raise ValueError(f"nothing says where the part of {name!r} at {list(offsets)} is")
        boxes.append(Box(offsets, sizes, places[name, offsets]))
    check_cover(name, shape, [(box.offsets, box.sizes) for box in boxes])
    return StoredTensor(str(dtype), shape, tuple(boxes))


def _whole(numbers: Any) -> tuple[int, ...]:
    """Returns a tuple of non-negative integers; raises `ValueError` for anything else."""
    if not isinstance(numbers, tuple | list) or len(numbers) > _MAX_DIMS:
        raise ValueError(f"{_shown(numbers)} is not a shape of up to {_MAX_DIMS} dimensions")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{_shown(numbers)} is not a shape")
    return tuple(numbers)


def _item(info: Any) -> StoredItem:
    file, (start, size) = info.relative_path, _whole((info.offset, info.length))
    if not isinstance(file, str) or "/" in file or "\0" in file or file in ("", ".", ".."):
        raise ValueError(f"{_shown(file)} is not the name of a file beside it")
    return StoredItem(file, start, size)


def _path(parts: Any) -> KeyPath:
    if not isinstance(parts, tuple | list) or not 0 < len(parts) <= _MAX_DIMS:
        raise ValueError(f"{_shown(parts)} is not a path of up to {_MAX_DIMS} keys")
    if any(not isinstance(part, str | int) for part in parts):
        raise ValueError(f"{_shown(parts)} is not a path")
    return tuple(parts)
