"""Gives the values in a file of `torch.save`, with descriptions in the places of tensors.

Names in the pickle become stand-ins from a table. What no checkpoint holds becomes `Opaque`: a name
without contents. A name in no table becomes one too, and is refused by whoever keeps it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from elasticzero.checkpoint.convert.pickle_reader import (
    Constructor,
    InertRecord,
    Mapped,
    Opaque,
    Size,
    StandIn,
    read_pickle,
)
from elasticzero.checkpoint.convert.pickled.archive import Archive
from elasticzero.checkpoint.convert.pickled.leaves import (
    ArchivedTensor,
    ForeignTensor,
    HeldTensor,
    JoinedTensor,
)
from elasticzero.checkpoint.format.dtypes import spelling_of
from elasticzero.checkpoint.format.layout import TensorSpec
from elasticzero.errors import CheckpointDamaged, UserError

_MAX_DIMS = 64
_MOST_EXPANDED_BYTES = 1 << 30
"""Maximum size of a tensor that is larger than the storage it is a view of."""
_COPIES_PER_BYTE = 16
"""Maximum number of bytes of arrays and bytes that are made for each byte of the pickle."""

_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}  # fmt: skip
"""The dtype in torch of each class of storages."""
_DTYPE = re.compile(r"bool|(?:u?int|float|bfloat|complex)\d{1,3}(?:_e\dm\d\w{0,4})?")
_NUMERIC = re.compile(r"b1|[iu][1248]|f[248]")


@dataclass(frozen=True, slots=True)
class _Storage:
    """Describes a storage beside the pickle."""

    key: str
    dtype: torch.dtype
    numel: int


class _Namespace(InertRecord):
    """Stands for an object that is nothing but its attributes."""


class _Dtype(InertRecord):
    """Stands for a dtype of numpy: its code, and the order of its bytes."""

    order = "="

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[1], str):
            raise ValueError("a dtype without an order of bytes")
        self.order = state[1].replace("|", "=")


class _Array(InertRecord):
    """Stands for an array of numpy."""

    value: Any = Opaque("numpy.ndarray")

    def __init__(self, spend: Callable[[int], None]) -> None:
        self._spend = spend

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise ValueError("an array without a state")
        _, shape, dtype, by_columns, data = state
        code = _numeric(dtype)
        if code is None or not isinstance(data, bytes):
            return
        self._spend(len(data))
        flat = np.frombuffer(data, code).astype(code.newbyteorder("="))
        self.value = flat.reshape(_numbers(shape), order="F" if by_columns else "C")


def _numeric(dtype: Any) -> np.dtype[Any] | None:
    """Returns numpy's dtype of real numbers or truth values; None: it is of something else."""
    if not isinstance(dtype, _Dtype) or not dtype.parts or dtype.order not in "<>=":
        return None
    code = dtype.parts[0]
    if not isinstance(code, str) or not _NUMERIC.fullmatch(code):
        return None
    return np.dtype(dtype.order + code)


def _numbers(values: Any) -> tuple[int, ...]:
    """Returns a tuple of whole numbers; raises `ValueError` for anything else."""
    if type(values) is not tuple or len(values) > _MAX_DIMS:
        raise ValueError("no tuple of sizes")
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError("a size that is no number")
    return values


class _Text(InertRecord):
    """Stands for an object that is a text in effect: a path, a device."""

    separator: ClassVar[str] = ":"

    def __setstate__(self, state: object) -> None:
        raise ValueError("a path or a device with a state")


class _Path(_Text):
    """Stands for a path of pathlib, which is pickled as its parts."""

    separator = "/"


def is_tensor(value: Any) -> bool:
    """Returns whether a value stands for a tensor."""
    return isinstance(value, ArchivedTensor | HeldTensor | ForeignTensor | JoinedTensor)


def plain(value: Any) -> Any:
    """Returns a stand-in as a dict, a text or an array, where it is one in effect."""
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, _Namespace):
        return dict(vars(value))
    if isinstance(value, _Text):
        if not all(isinstance(part, str | int) for part in value.parts):
            raise ValueError("a path or a device that is no text")
        return type(value).separator.join(map(str, value.parts)).replace("//", "/", 1)
    return value


_PLAIN: dict[tuple[str, str], StandIn] = {
    ("collections", "OrderedDict"): Mapped,
    ("collections", "defaultdict"): Mapped,
    ("lightning.fabric.utilities.data", "AttributeDict"): Mapped,
    ("lightning_fabric.utilities.data", "AttributeDict"): Mapped,
    ("lightning.pytorch.utilities.parsing", "AttributeDict"): Mapped,
    ("pytorch_lightning.utilities.parsing", "AttributeDict"): Mapped,
    ("torch", "Size"): Size,
    ("torch", "device"): _Text,
    ("numpy", "dtype"): _Dtype,
    ("argparse", "Namespace"): _Namespace,
    ("types", "SimpleNamespace"): _Namespace,
    ("pathlib", "PosixPath"): _Path,
    ("pathlib", "PurePosixPath"): _Path,
    ("pathlib._local", "PosixPath"): _Path,
    ("pathlib._local", "PurePosixPath"): _Path,
}
_LEFT_OUT = {
    *(("builtins", name) for name in (
        "set", "frozenset", "complex", "bytearray", "bytes", "list", "dict", "int", "float", "str",
        "tuple", "bool", "slice", "range", "object",
    )),
    ("collections", "deque"), ("collections", "Counter"), ("numpy", "ndarray"),
    ("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer"),
    ("datetime", "datetime"), ("datetime", "date"), ("datetime", "timedelta"),
    ("datetime", "timezone"), ("decimal", "Decimal"), ("fractions", "Fraction"),
    ("uuid", "UUID"), ("_io", "BytesIO"), ("_io", "StringIO"),
}  # fmt: skip
"""Names of objects that no checkpoint holds, and that nothing is lost of which training needs."""


def read_values(archive: Archive, names: Mapping[tuple[str, str], StandIn] | None = None) -> Any:
    """Returns what was saved, with an `ArchivedTensor` for each tensor.

    Arrays are numpy's. All else that is neither a container, a number nor a text is `Opaque`.

    Args:
        archive: The file.
        names: Stand-ins for names of the program that wrote it; None: it has none.

    Raises:
        UserError: The pickle has a tensor that no checkpoint can hold.
        CheckpointDamaged: The pickle makes no sense.
    """
    data = archive.pickle()
    reader = _Reader(archive, len(data), names or {})
    try:
        return read_pickle(data, reader.find, reader.storage)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise CheckpointDamaged(
            f"{archive.where}: its pickle makes no sense: {type(error).__name__}: {error!s:.150}"
        ) from None


class _Reader:
    """Makes the values of one pickle."""

    def __init__(
        self, archive: Archive, pickle_bytes: int, names: Mapping[tuple[str, str], StandIn]
    ) -> None:
        self._archive = archive
        self._copies_left = _COPIES_PER_BYTE * pickle_bytes + 1000
        view2, parameter = Constructor(self._tensor), Constructor(lambda data, *_: data)
        array, scalar = Constructor(lambda *_: _Array(self.spend)), Constructor(self._scalar)
        buffer = Constructor(self._array_of_buffer)
        self._table: dict[tuple[str, str], StandIn] = {
            **_PLAIN,
            **names,
            ("torch._utils", "_rebuild_tensor"): view2,
            ("torch._utils", "_rebuild_tensor_v2"): view2,
            ("torch._utils", "_rebuild_tensor_v3"): Constructor(self._tensor_of_dtype),
            ("torch._utils", "_rebuild_parameter"): parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): parameter,
            ("torch._tensor", "_rebuild_from_type_v2"): Constructor(self._subclass),
            ("numpy.core.multiarray", "_reconstruct"): array,
            ("numpy._core.multiarray", "_reconstruct"): array,
            ("numpy.core.multiarray", "scalar"): scalar,
            ("numpy._core.multiarray", "scalar"): scalar,
            ("numpy.core.numeric", "_frombuffer"): buffer,
            ("numpy._core.numeric", "_frombuffer"): buffer,
            ("_codecs", "encode"): Constructor(self._encoded),
        }

    def find(self, module: str, name: str) -> StandIn:
        """Returns the stand-in for a name; a name in no table becomes one that is refused."""
        if (module, name) in self._table:
            return self._table[module, name]
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return name
        if module == "torch" and _DTYPE.fullmatch(name):
            return name
        module = module.replace("__builtin__", "builtins")  # as pickles of protocol 2 have it
        harmless = (module, name) in _LEFT_OUT
        return Opaque(f"{module:.80}.{name:.80}", refused=not harmless)

    def storage(self, identifier: Any) -> _Storage | Opaque:
        """Returns the description of a storage that the pickle refers to."""
        kind, name, key, _, count = identifier
        if isinstance(name, Opaque):
            return name
        if kind != "storage" or name not in _STORAGES or type(count) is not int or count < 0:
            raise ValueError("a reference to something else than a storage")
        dtype = getattr(torch, _STORAGES[name])
        if not isinstance(key, str) or count * dtype.itemsize > self._archive.size_of(key):
            raise ValueError(f"storage {key!r:.80} is smaller than it is said to be")
        return _Storage(key, dtype, count)

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *others: Any) -> Any:
        """Stands for `_rebuild_tensor_v2` of torch, which makes a view of a storage."""
        bits = others[2] if len(others) > 2 else None
        if isinstance(storage, Opaque):
            return storage
        return self._view(storage, storage.dtype, (offset, shape, strides), bits)

    def _tensor_of_dtype(
        self, storage: Any, offset: Any, shape: Any, strides: Any, *others: Any
    ) -> Any:
        """Stands for `_rebuild_tensor_v3` of torch, which also names the dtype."""
        _, _, dtype, *bits = others
        named = getattr(torch, dtype, None) if isinstance(dtype, str) else None
        if isinstance(storage, Opaque):
            return storage
        if not isinstance(named, torch.dtype):
            return Opaque(f"tensor of {dtype!s:.80}", refused=True)
        return self._view(storage, named, (offset, shape, strides), bits[0] if bits else None)

    def _view(
        self, storage: _Storage, dtype: torch.dtype, place: tuple[Any, Any, Any], bits: Any
    ) -> Any:
        (offset,), shape, strides = map(_numbers, ((place[0],), *place[1:]))
        if len(shape) != len(strides):
            raise ValueError("a tensor with another number of strides than of dimensions")
        if isinstance(bits, dict) and any(bits.values()):
            return Opaque("tensor with lazy conjugation or negation", refused=True)
        try:
            spec = TensorSpec(spelling_of(dtype), shape)
        except UserError:
            return Opaque(f"tensor of {dtype}", refused=True)
        room = storage.numel * storage.dtype.itemsize // dtype.itemsize
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if spec.numel and last >= room:
            raise ValueError("a tensor that goes beyond its storage")
        if spec.nbytes > max(_MOST_EXPANDED_BYTES, storage.numel * storage.dtype.itemsize):
            return Opaque("expanded tensor: save a .contiguous() of it", refused=True)
        return ArchivedTensor(self._archive, storage.key, offset, spec, strides)

    def _subclass(self, function: Any, kind: Any, arguments: Any, state: Any) -> Any:
        """Stands for a tensor that has attributes of its own, which are left out."""
        if isinstance(kind, Opaque) and kind.refused:
            return kind
        if not isinstance(function, Constructor):
            return Opaque("tensor that a function of its own makes", refused=True)
        return function.make(*arguments)

    def _array_of_buffer(self, data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
        array = _Array(self.spend)
        array.__setstate__((1, shape, dtype, order == "F", data))
        return array

    def _scalar(self, dtype: Any, data: Any = None) -> Any:
        code = _numeric(dtype)
        if code is None or not isinstance(data, bytes):
            return Opaque("numpy.generic")
        return np.frombuffer(data, code, 1)[0].item()

    def _encoded(self, text: Any, encoding: Any) -> bytes:
        """Returns bytes, which older pickles have as text of as many letters."""
        if encoding != "latin1" or not isinstance(text, str):
            raise ValueError("bytes in another encoding")
        self.spend(len(text))
        return text.encode("latin1")

    def spend(self, count: int) -> None:
        """Raises `ValueError` if more bytes are made than a whole file can need."""
        self._copies_left -= count
        if self._copies_left < 0:
            raise ValueError("it copies more bytes than it has")
