"""Exports to a file that `torch.load` reads, with `weights_only` too, tensor by tensor.

The file is a zip archive of a pickle and of one record for each tensor. The pickle is written here
instruction by instruction: it has dicts, lists, tuples, texts and numbers, and names nothing but
torch's functions that make tensors.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elasticzero.checkpoint.convert.dcp_export import DcpExportOptions, all_state, model_state
from elasticzero.checkpoint.convert.huggingface import (
    ExportResult,
    check_export_target,
    model_specs,
)
from elasticzero.checkpoint.format.layout import TensorSpec
from elasticzero.checkpoint.rewrite.sources import (
    CheckpointSource,
    TensorSource,
    cast_specs,
    open_converted,
)
from elasticzero.checkpoint.rewrite.step_copy import CopyOptions, run_jobs
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.base import Readable
from elasticzero.checkpoint.storage.urls import open_storage
from elasticzero.errors import UserError
from elasticzero.spans import Span

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_ROOT = "archive/"
_ALIGNMENT = 64
"""Each tensor begins at a multiple of this many bytes, as torch's `mmap` needs it."""
_MAX_INT_BYTES = 255
_LEGACY_STORAGES = {
    "F32": "FloatStorage", "F64": "DoubleStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage",
    "I64": "LongStorage", "I32": "IntStorage", "I16": "ShortStorage", "I8": "CharStorage",
    "U8": "ByteStorage", "BOOL": "BoolStorage", "C64": "ComplexFloatStorage",
}  # fmt: skip
"""The class of storages of each dtype that has one; all others are untyped."""


@dataclass(frozen=True, slots=True)
class TensorReference:
    """Stands for a tensor of the checkpoint until its bytes are written."""

    name: str
    spec: TensorSpec

    def numpy(self) -> TensorReference:
        """Returns itself: an array is exported as a tensor, which `weights_only` takes."""
        return self


def export_torch(
    source: Readable,
    target: str,
    options: DcpExportOptions | None = None,
    copy_options: CopyOptions | None = None,
) -> ExportResult:
    """Writes a checkpoint as `torch.save` would; memory holds one buffer at a time.

    An export of the model alone is its `state_dict()`, in which names of one tensor stay one. An
    export of everything has the nesting of what `checkpoint.save` was given; of a checkpoint that a
    job wrote it is `{"model": ..., "optimizer": ..., "elasticzero": ...}`.

    Args:
        source: The checkpoint's step.
        target: A new file, a path or a URL.
        options: What is exported, as with DCP; None: the defaults.
        copy_options: Memory and progress of the copy; None: the defaults.

    Raises:
        UserError: The target exists or has another ending, or there is no model.
    """
    options, copy_options = options or DcpExportOptions(), copy_options or CopyOptions()
    parent, _, name = target.rpartition("/")
    if not name.endswith(SUFFIXES):
        raise UserError(f"{target} must be a file that ends in one of {', '.join(SUFFIXES)}")
    parent = parent or ("/" if target.startswith("/") else ".")
    storage = open_storage(parent)
    if name in storage.names():
        raise UserError(f"{storage.where}/{name} exists: give a new file")
    check_export_target(target)
    manifest = catalog.read_manifest(source)
    chosen = manifest.layout.tensors if options.everything else model_specs(source, manifest)
    specs = cast_specs(chosen, options.dtype)
    references = {name: TensorReference(name, spec) for name, spec in specs.items()}
    build = all_state if options.everything else model_state
    pickle = _Pickle(build(manifest, references, references.__getitem__))
    total = sum(spec.nbytes for spec in specs.values())
    copy_options.progress.expect(total)

    def open_source(buffer_bytes: int) -> TensorSource:
        return CheckpointSource(source, manifest, buffer_bytes)

    converted = open_converted(open_source, options.dtype, options.allow_overflow)
    run_jobs(
        [lambda opened: storage.write(name, _archive(pickle, opened))], converted, copy_options
    )
    where = f"{storage.where}/{name}"
    return ExportResult(where=where, files=(name,), tensors=len(specs), bytes=total)


class _Pickle:
    """Writes the pickle of a value, and numbers the tensors in it."""

    def __init__(self, value: Any) -> None:
        self._out = io.BytesIO()
        self.keys: dict[TensorReference, str] = {}
        """The key of each tensor's storage."""
        self._out.write(b"\x80\x02")
        self._put(value)
        self._out.write(b".")
        self.data = self._out.getvalue()

    def _put(self, value: Any) -> None:
        write = self._out.write
        match value:
            case None | True | False:
                write({None: b"N", True: b"\x88", False: b"\x89"}[value])
            case int():
                self._put_int(value)
            case float():
                write(b"G" + struct.pack(">d", value))
            case str():
                data = value.encode("utf-8", "surrogatepass")
                write(b"X" + struct.pack("<I", len(data)) + data)
            case TensorReference():
                self._put_tensor(value)
            case dict():
                write(b"}(")
                for pair in value.items():
                    self._put_all(pair)
                write(b"u")
            case list():
                write(b"](")
                self._put_all(value)
                write(b"e")
            case _:
                write(b"(")
                self._put_all(tuple(value))
                write(b"t")

    def _put_all(self, values: Any) -> None:
        for value in values:
            self._put(value)

    def _put_int(self, value: int) -> None:
        size = value.bit_length() // 8 + 1
        if size > _MAX_INT_BYTES:
            raise UserError(f"an integer of {value.bit_length()} bits cannot be exported")
        data = value.to_bytes(size, "little", signed=True)
        self._out.write(b"\x8a" + bytes([size]) + data)

    def _put_tensor(self, tensor: TensorReference) -> None:
        spec, key = tensor.spec, self.keys.setdefault(tensor, str(len(self.keys)))
        strides, stride = [], 1
        for size in reversed(spec.shape):
            strides.append(stride)
            stride *= max(1, size)
        typed = spec.dtype in _LEGACY_STORAGES
        self._put_name("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
        self._out.write(b"((")
        self._put("storage")
        self._put_name(*_storage_class(spec.dtype))
        self._put_all((key, "cpu", spec.numel if typed else spec.nbytes))
        self._out.write(b"tQ")
        self._put_all((0, spec.shape, tuple(reversed(strides)), False))
        self._put_name("collections", "OrderedDict")
        self._out.write(b")R")
        if not typed:
            self._put_name("torch", _name_in_torch(spec.dtype))
        self._out.write(b"tR")

    def _put_name(self, module: str, name: str) -> None:
        self._out.write(f"c{module}\n{name}\n".encode())


def _storage_class(dtype: str) -> tuple[str, str]:
    if dtype in _LEGACY_STORAGES:
        return "torch", _LEGACY_STORAGES[dtype]
    return "torch.storage", "UntypedStorage"


def _name_in_torch(dtype: str) -> str:
    from elasticzero.checkpoint.format.dtypes import torch_dtype

    return str(torch_dtype(dtype)).removeprefix("torch.")


class _Sink(io.RawIOBase):
    """Collects what zipfile writes, until it is taken."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        self._position += len(data)
        return len(data)

    def take(self) -> list[bytes]:
        parts, self._parts = self._parts, []
        return parts


def _archive(pickle: _Pickle, source: TensorSource) -> Iterator[bytes]:
    """Yields the bytes of the archive."""
    sink = _Sink()
    small: Mapping[str, bytes] = {
        "data.pkl": pickle.data,
        "byteorder": b"little",
        "version": b"3\n",
    }
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, data in small.items():
            archive.writestr(_entry(name, sink.tell()), data)
            yield from sink.take()
        for tensor, key in pickle.keys.items():
            entry = _entry(f"data/{key}", sink.tell())
            with archive.open(entry, "w", force_zip64=True) as record:
                for chunk in source.chunks(tensor.name, Span(0, tensor.spec.numel)):
                    record.write(chunk)
                    yield from sink.take()
            yield from sink.take()
    yield from sink.take()


def _entry(name: str, position: int) -> zipfile.ZipInfo:
    """Returns a record of the archive whose bytes begin at a multiple of `_ALIGNMENT`."""
    entry = zipfile.ZipInfo(_ROOT + name)
    zip64 = 20
    begin = position + 30 + len(entry.filename) + zip64 + 4
    padding = -begin % _ALIGNMENT
    entry.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return entry
