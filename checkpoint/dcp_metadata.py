"""What stands in a torch.distributed.checkpoint directory, read without running anything in it.

torch writes the directory's `.metadata` as a pickle, and a pickle can name any function for its
reader to call. This reader looks names up in a short table of inert stand-ins and refuses all
others, so that reading can make strings, numbers, containers and records and do nothing else. It is
the one place in this project that reads a pickle; none is written.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticzero.checkpoint.storage import Readable, read_small
from elasticzero.errors import CheckpointDamaged, UserError

METADATA_NAME = ".metadata"
_LIMIT_BYTES = 1 << 30

Refused = pickle.UnpicklingError
"""What torch raises as well for an item that names what `weights_only` does not allow."""

KeyPath = tuple[str | int, ...]
"""Keys from the root of the state dict to a value; numbers are positions in lists."""


@dataclass(frozen=True, slots=True)
class Item:
    """Something that `torch.save` wrote, within a file."""

    file: str
    start: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: the elements from `offsets` on, `sizes` of them in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item


@dataclass(frozen=True, slots=True)
class StoredTensor:
    dtype: str
    """By its name in torch."""
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    """Which make up the whole of it, each element once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A directory's tensors and other values, by their paths."""

    tensors: Mapping[KeyPath, StoredTensor]
    values: Mapping[KeyPath, Item]


def read_contents(storage: Readable) -> Contents:
    """What the directory's `.metadata` says is in it.

    Raises `UserError` if there is none or if it asks for code to be run, and `CheckpointDamaged` if
    it makes no sense.
    """
    where = f"{storage.where}/{METADATA_NAME}"
    try:
        data = read_small(storage, METADATA_NAME, _LIMIT_BYTES)
    except FileNotFoundError:
        raise UserError(
            f"{where} does not exist: {storage.where} is no directory of "
            "torch.distributed.checkpoint"
        ) from None
    try:
        return _contents(_Reader(io.BytesIO(data), where).load())
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointDamaged(f"{where} makes no sense: {error!r:.200}") from None


class _Record:
    """Stands for an object of torch's: keeps what it was made of and does nothing."""

    def __init__(self, *parts: object) -> None:
        self.parts = parts

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.parts = state if isinstance(state, tuple) else (state,)


class _Tensor(_Record):
    """Stands for `TensorStorageMetadata`."""


class _Value(_Record):
    """Stands for `BytesStorageMetadata`."""


def _size(sizes: Iterable[int] = ()) -> tuple[int, ...]:
    return tuple(sizes)


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
_TABLE: Mapping[tuple[str, str], Any] = {
    **dict.fromkeys(_RECORDS, _Record),
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Value,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): dict,
}
_DTYPE = re.compile(r"bool|(?:u?int|float|bfloat|complex)\d{1,3}(?:_e\dm\d\w{0,4})?")
"""Names of dtypes in torch, those included that safetensors has not."""


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file)
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _TABLE:
            return _TABLE[module, name]
        if module == "torch" and _DTYPE.fullmatch(name):
            return name
        raise UserError(
            f"{self._where} asks for {module}.{name}, which no checkpoint of torch needs: reading "
            "it could run code of whoever wrote it, so it is not read"
        )


def _contents(metadata: Any) -> Contents:
    described: Mapping[str, Any] = metadata.state_dict_metadata
    paths: Mapping[str, Any] = metadata.planner_data or {}
    places: dict[tuple[str, tuple[int, ...] | None], Item] = {}
    for index, info in metadata.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise UserError(
                f"{info.relative_path} is compressed ({info.transform_descriptors}): save it "
                "without extensions to import it"
            )
        offset = getattr(index, "offset", None)
        places[index.fqn, None if offset is None else _whole(offset)] = _item(info)
    tensors, values = {}, {}
    for name, about in described.items():
        path = _path(paths.get(name, (name,)))
        if isinstance(about, _Tensor):
            tensors[path] = _tensor(name, about, places)
        elif isinstance(about, _Value):
            values[path] = places[name, None]
        else:
            raise ValueError(f"{name} is neither a tensor nor a value")
    if len(tensors) + len(values) != len(described):
        raise ValueError("two entries have the same path")
    return Contents(tensors=tensors, values=values)


def _tensor(name: str, about: Any, places: Mapping[Any, Item]) -> StoredTensor:
    shape = _whole(about.size)
    properties = about.properties
    dtype = properties.parts[0] if properties.parts else properties.dtype
    boxes = []
    for chunk in about.chunks:
        offsets, sizes = _whole(chunk.offsets), _whole(chunk.sizes)
        if (name, offsets) not in places:
            raise ValueError(f"nothing says where the part of {name} at {list(offsets)} is")
        boxes.append(Box(offsets, sizes, places[name, offsets]))
    _check_cover(name, shape, boxes)
    return StoredTensor(str(dtype), shape, tuple(boxes))


def _check_cover(name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Raise `ValueError` unless the boxes make up the whole tensor, each element once."""
    for box in boxes:
        ranks = {len(shape), len(box.offsets), len(box.sizes)}
        ends = zip(box.offsets, box.sizes, shape, strict=False)
        if len(ranks) != 1 or any(o + s > most for o, s, most in ends):
            raise ValueError(f"a part of {name} lies outside of it")
    full = [box for box in boxes if _numel(box.sizes)]
    if sum(_numel(box.sizes) for box in full) != _numel(shape):
        raise ValueError(f"the parts of {name} are not the whole of it")
    full.sort(key=lambda box: box.offsets)
    for i, box in enumerate(full):
        for other in full[i + 1 :]:
            if shape and other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break  # so do all that follow
            if all(
                a < c + d and c < a + b
                for a, b, c, d in zip(
                    box.offsets, box.sizes, other.offsets, other.sizes, strict=True
                )
            ):
                raise ValueError(f"two parts of {name} overlap")


def _numel(sizes: tuple[int, ...]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _whole(numbers: Any) -> tuple[int, ...]:
    """A tuple of numbers from 0 on; `ValueError` for anything else."""
    found = tuple(numbers)
    if any(not isinstance(number, int) or number < 0 for number in found):
        raise ValueError(f"{found!r:.80} is not a shape")
    return found


def _item(info: Any) -> Item:
    file, (start, size) = info.relative_path, _whole((info.offset, info.length))
    if not isinstance(file, str) or "/" in file or "\0" in file or file in ("", ".", ".."):
        raise ValueError(f"{file!r:.80} is not the name of a file beside it")
    return Item(file, start, size)


def _path(parts: Any) -> KeyPath:
    found = tuple(parts)
    if not found or any(not isinstance(part, str | int) for part in found):
        raise ValueError(f"{found!r:.80} is not a path")
    return found
