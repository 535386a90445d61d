"""Writes a rank's shard as a safetensors file, and reads its tensors verified."""

from __future__ import annotations

import copy
import itertools
import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elasticzero.checkpoint.format.checksums import BlockReader, BlockSums
from elasticzero.checkpoint.format.layout import ITEM_BYTES, PAIRED, TensorSpec, itemsize, spec_of
from elasticzero.checkpoint.format.manifest import Manifest, ShardFile
from elasticzero.checkpoint.format.names import SUMS_SUFFIX
from elasticzero.checkpoint.format.strict_json import reason, strict_json
from elasticzero.checkpoint.storage.base import Bytes, Readable, Storage
from elasticzero.errors import CheckpointDamaged, StorageError, UserError
from elasticzero.spans import Span

HEAD_GRAIN_BYTES = 4096
"""A shard's head is padded to a multiple of this, so that its tensors begin on a page and its size
does not change with the number of digits of the step."""
_DTYPE = re.compile(r"[A-Z]{1,2}\d{1,3}(_[A-Z0-9]{1,12})?")
"""Matches safetensors' names of dtypes, newer ones included."""
HEADER_LIMIT_BYTES = 100_000_000
"""Maximum size of a header; safetensors has the same limit."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Describes one tensor in a shard file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Position of its first byte in the file."""
    stop: int

    @property
    def numel(self) -> int:
        return (self.stop - self.start) // itemsize(self.dtype)


def shard_specs(manifest: Manifest, rank: int) -> dict[str, TensorSpec]:
    """Returns the tensors of a rank's file in file order: wide dtypes first, then as in the layout.

    A span that is the whole tensor has the tensor's shape, and any other is 1-D.
    """
    return manifest.layout.shard_specs(rank)


def header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Returns the first bytes of a safetensors file that holds `specs` in that order."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, spec in specs.items():
        stop = offset + spec.nbytes
        shape = _shape_in_file(spec)
        table[name] = {"dtype": spec.dtype, "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % HEAD_GRAIN_BYTES)
    if len(text) > HEADER_LIMIT_BYTES:
        raise StorageError(
            f"a shard of {len(specs)} tensors needs a header of {len(text)} bytes, and safetensors "
            f"allows {HEADER_LIMIT_BYTES}: use more ranks or fewer tensors"
        )
    return struct.pack("<Q", len(text)) + text


def _shape_in_file(spec: TensorSpec) -> tuple[int, ...]:
    """Returns the shape in a header, which counts the single values of pairs."""
    return (*spec.shape[:-1], 2 * spec.shape[-1]) if spec.dtype == PAIRED else spec.shape


def _spec_in_file(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """Returns the spec of a dtype and a shape in a header."""
    if dtype != PAIRED:
        return spec_of(dtype, shape)
    if not shape or shape[-1] % 2:
        raise ValueError(f"shape {list(shape)} of {dtype}: its last size must be even")
    return TensorSpec(dtype, (*shape[:-1], shape[-1] // 2))


def shard_header(manifest: Manifest, rank: int) -> tuple[bytes, int]:
    """Returns (the first bytes of a rank's shard file, the size of the whole file)."""
    specs = shard_specs(manifest, rank)
    metadata = {
        "format": "pt",
        "step": str(manifest.step),
        "rank": str(rank),
        "world_size": str(manifest.layout.world_size),
        "token": manifest.token,
    }
    head = header(specs, metadata)
    return head, len(head) + sum(spec.nbytes for spec in specs.values())


def write_shard(
    storage: Storage, manifest: Manifest, rank: int, chunks: Iterable[Bytes]
) -> ShardFile:
    """Writes a rank's shard file and then its checksum file, which marks the shard as whole.

    Args:
        storage: The step's files.
        manifest: The manifest of the step, of which `files` may be missing.
        rank: The rank whose shard this is.
        chunks: The bytes of `shard_specs(manifest, rank)`, in that order, cut anywhere. The
            iterator may reuse a chunk once the next is requested.
    """
    name = manifest.file_name(rank)
    head, expected = shard_header(manifest, rank)
    sums = BlockSums()
    storage.write(name, sums.watch(itertools.chain([head], chunks)), size=expected)
    if sums.size != expected:
        storage.remove(name)
        raise ValueError(f"{name}: {sums.size} bytes were given, and {expected} belong there")
    data, file = sums.finish(name, manifest.layout.digest())
    storage.write(name + SUMS_SUFFIX, [data])
    return file


class ShardReader:
    """Reads the tensors in one shard file and verifies every byte."""

    def __init__(self, storage: Readable, file: ShardFile) -> None:
        """Reads checksums and header; raises `CheckpointDamaged` if they are invalid."""
        self._blocks = BlockReader(storage, file)
        self.metadata, self.entries = _read_header(self._blocks)

    def clone(self) -> ShardReader:
        """Returns another reader of the shard, for another thread."""
        clone = copy.copy(self)
        clone._blocks = self._blocks.clone()  # noqa: SLF001 - of the same class
        return clone

    @property
    def where(self) -> str:
        return self._blocks.where

    @property
    def size(self) -> int:
        """Returns the size that the file should have."""
        return self._blocks.size

    def read_into(self, name: str, span: Span, buffer: memoryview) -> None:
        """Fills `buffer` with the elements `span` of the file's part of a tensor.

        Args:
            name: The tensor's name.
            span: The elements, where 0 is the first one that the file holds.
            buffer: Writable bytes, as many as the span has.

        Raises:
            CheckpointDamaged: Bytes are missing, or differ from what was written.
        """
        self.fill([(name, span, buffer)])

    def fill(self, parts: Iterable[tuple[str, Span, memoryview]]) -> None:
        """Reads several parts as `read_into` does; fastest in the file's order."""
        pieces = []
        for name, span, buffer in parts:
            entry = self.entries[name]
            width = itemsize(entry.dtype)
            start = entry.start + span.start * width
            if start + len(buffer) > entry.stop or len(buffer) != len(span) * width:
                raise ValueError(f"{name}: {len(buffer)} bytes at {span} of {entry}")
            pieces.append((start, buffer))
        self._blocks.fill(pieces)


def open_shard(storage: Readable, manifest: Manifest, rank: int) -> ShardReader:
    """Opens a rank's shard and checks that it holds what the manifest lists.

    Args:
        storage: The step's files.
        manifest: Manifest of the step.
        rank: The rank that wrote the shard.

    Raises:
        CheckpointDamaged: The shard does not match the manifest or its own checksums.
    """
    file = manifest.files[rank]
    shard = ShardReader(storage, file)
    if (size := storage.size(file.name)) != shard.size:
        raise CheckpointDamaged(f"{shard.where} has {size} bytes, not {shard.size}")
    held = {name: spec_of(e.dtype, e.shape) for name, e in shard.entries.items()}
    expected = (str(manifest.step), str(rank), manifest.token)
    stored = tuple(shard.metadata.get(key) for key in ("step", "rank", "token"))
    if held != shard_specs(manifest, rank) or stored != expected:
        raise CheckpointDamaged(f"{shard.where} does not hold what its manifest says")
    return shard


def _read_header(blocks: BlockReader) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    if blocks.size < 8:
        raise CheckpointDamaged(f"{blocks.where} is too short for a safetensors file")
    prefix = bytearray(8)
    blocks.read_into(0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > min(HEADER_LIMIT_BYTES, blocks.size - 8):
        raise CheckpointDamaged(
            f"{blocks.where} says its header has {length} bytes: more than the file "
            f"({blocks.size}) or safetensors ({HEADER_LIMIT_BYTES}) allows"
        )
    text = bytearray(length)
    blocks.read_into(8, memoryview(text))
    return parse_header(bytes(text), blocks.size, blocks.where)


def parse_header(
    text: bytes, file_bytes: int, where: str
) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    """Returns (metadata, entries by name) of a safetensors header.

    Args:
        text: The header without the eight bytes of its length.
        file_bytes: Size of the whole file.
        where: Path of the file, for messages.

    Raises:
        CheckpointDamaged: The header is invalid.
        UserError: A tensor has a dtype that this format does not support.
    """
    base = 8 + len(text)
    try:
        table = strict_json(text)
        metadata = {str(k): str(v) for k, v in table.pop("__metadata__", {}).items()}
        entries = {}
        for name, value in table.items():
            _check_dtype(name, value["dtype"], where)
            spec = _spec_in_file(value["dtype"], tuple(_whole(size) for size in value["shape"]))
            start, stop = (base + _whole(offset) for offset in value["data_offsets"])
            if stop - start != spec.nbytes or start < base:
                raise ValueError(f"tensor {name!r} has {stop - start} bytes, not {spec.nbytes}")
            entries[name] = TensorEntry(spec.dtype, spec.shape, start, stop)
        ends = base
        for name, entry in sorted(entries.items(), key=lambda e: (e[1].start, e[1].stop)):
            if entry.start != ends:
                raise ValueError(f"tensor {name!r} begins at byte {entry.start}, not {ends}")
            ends = entry.stop
        if ends != file_bytes:
            raise ValueError(f"its tensors end at byte {ends} of {file_bytes}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{where}: its header is wrong: {reason(error)}") from None
    return metadata, entries


def _check_dtype(name: str, dtype: object, where: str) -> None:
    """Checks that this format supports a dtype that safetensors may have.

    Args:
        name: The tensor's name, for the message.
        dtype: Value in the header; one that is no dtype at all passes.
        where: Path of the file, for the message.

    Raises:
        UserError: The format does not support the dtype.
    """
    if isinstance(dtype, str) and dtype not in ITEM_BYTES and _DTYPE.fullmatch(dtype):
        raise UserError(
            f"{where}: tensor {name!r} has the dtype {dtype}, which no checkpoint here can hold "
            f"({', '.join(ITEM_BYTES)}): convert it first"
        )


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.40} is not a whole number")
    return value
