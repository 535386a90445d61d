"""One shard: a safetensors file with a checksum of every block, and verified reads of its ranges.

The checksum file is binary, little-endian: magic, version, block size, the shard file's size and
the digest of the layout it was written by (`_SUMS_HEADER`), then one xxh3_64 for each block of the
shard file, its header included.
"""

from __future__ import annotations

import array
import copy
import itertools
import json
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from elasticzero.checkpoint.manifest import (
    SUMS_SUFFIX,
    Manifest,
    ShardFile,
    TensorSpec,
    itemsize,
    reason,
    strict_json,
)
from elasticzero.checkpoint.storage import Bytes, Readable, Storage, read_small
from elasticzero.errors import CheckpointDamaged, StorageError
from elasticzero.spans import Span

BLOCK_BYTES = 256 << 10
HEAD_GRAIN_BYTES = 4096
"""A shard's head is padded to a multiple of this: its tensors begin on a page, and its size does
not change with the number of digits of the step."""
HEADER_LIMIT_BYTES = 100_000_000
"""What safetensors itself allows."""
READ_BYTES = 8 << 20
"""Read in one go and then checked, while the processor's cache still has it."""
SHARERS = 4
"""A block that more pieces than these share is read by way of the kept one."""
SUMS_LIMIT_BYTES = 1 << 28
_MAX_BLOCK_BYTES = 1 << 26
_SUMS_HEADER = struct.Struct("<8sIIQ16s")
_SUMS_MAGIC = b"EZSUMS\r\n"
_SUMS_VERSION = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a shard file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    stop: int

    @property
    def numel(self) -> int:
        return (self.stop - self.start) // itemsize(self.dtype)


def shard_specs(manifest: Manifest, rank: int) -> dict[str, TensorSpec]:
    """What stands in a rank's file, in its order: wide dtypes first, else as the layout says.

    A span that is the whole tensor has the tensor's shape, any other is 1-D.
    """
    specs = {}
    for name, span in manifest.layout.spans(rank).items():
        spec = manifest.layout.tensors[name]
        whole = len(span) == spec.numel
        specs[name] = TensorSpec(spec.dtype, spec.shape if whole else (len(span),))
    return dict(sorted(specs.items(), key=lambda item: -itemsize(item[1].dtype)))


def header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a safetensors file that holds `specs` in that order."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, spec in specs.items():
        stop = offset + spec.nbytes
        table[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % HEAD_GRAIN_BYTES)
    if len(text) > HEADER_LIMIT_BYTES:
        raise StorageError(
            f"a shard of {len(specs)} tensors needs a header of {len(text)} bytes, and safetensors "
            f"allows {HEADER_LIMIT_BYTES}: use more ranks or fewer tensors"
        )
    return struct.pack("<Q", len(text)) + text


def shard_header(manifest: Manifest, rank: int) -> tuple[bytes, int]:
    """(the first bytes of a rank's shard file, the bytes of the whole file)."""
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
    """Write a rank's shard file and then its checksum file, which says that the shard is whole.

    `chunks`: the bytes of `shard_specs(manifest, rank)`, in that order, cut anywhere; a chunk may
    be reused once the next is asked for.
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


class BlockSums:
    """Checksums of the blocks of a stream of bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._done = array.array("Q")
        self._open = xxhash.xxh3_64()

    def watch(self, chunks: Iterable[Bytes]) -> Iterator[Bytes]:
        for chunk in chunks:
            view = memoryview(chunk)
            start = 0
            while start < len(view):
                stop = min(len(view), start + BLOCK_BYTES - self.size % BLOCK_BYTES)
                self._open.update(view[start:stop])
                self.size += stop - start
                start = stop
                if self.size % BLOCK_BYTES == 0:
                    self._close_block()
            yield view

    def finish(self, name: str, layout_digest: str) -> tuple[bytes, ShardFile]:
        """(contents of the checksum file, what a manifest says) of the shard file `name`."""
        data = self.to_bytes(layout_digest)
        return data, ShardFile(name, self.size, xxhash.xxh3_128_hexdigest(data))

    def to_bytes(self, layout_digest: str) -> bytes:
        if self.size % BLOCK_BYTES:
            self._close_block()
            self._open = xxhash.xxh3_64()
        sums = array.array("Q", self._done)
        if sys.byteorder == "big":
            sums.byteswap()
        digest = bytes.fromhex(layout_digest)
        head = _SUMS_HEADER.pack(_SUMS_MAGIC, _SUMS_VERSION, BLOCK_BYTES, self.size, digest)
        return head + sums.tobytes()

    def _close_block(self) -> None:
        self._done.append(self._open.intdigest())
        self._open.reset()


@dataclass(frozen=True, slots=True)
class Sums:
    """The contents of a checksum file."""

    block_bytes: int
    size: int
    """Bytes of the shard file."""
    layout_digest: str
    """Of the layout by which the shard was written."""
    blocks: array.array[int]
    digest: str
    """Of the checksum file itself."""


def read_sums(storage: Readable, shard_name: str) -> Sums:
    """The checksums of a shard; `CheckpointDamaged` if they are missing or make no sense."""
    name = shard_name + SUMS_SUFFIX
    where = f"{storage.where}/{name}"
    try:
        data = read_small(storage, name, SUMS_LIMIT_BYTES)
    except FileNotFoundError:
        raise CheckpointDamaged(f"{where} is missing; use another step") from None
    return parse_sums(data, where)


def parse_sums(data: bytes, where: str) -> Sums:
    """The contents of a checksum file; raises `CheckpointDamaged` saying what is wrong with it."""
    if len(data) < _SUMS_HEADER.size:
        raise CheckpointDamaged(f"{where} is cut off: it has {len(data)} bytes; use another step")
    magic, version, block_bytes, size, layout = _SUMS_HEADER.unpack_from(data)
    if magic != _SUMS_MAGIC or version != _SUMS_VERSION or not 0 < block_bytes <= _MAX_BLOCK_BYTES:
        raise CheckpointDamaged(
            f"{where} is not a checksum file of version {_SUMS_VERSION}; use another step"
        )
    count = -(-size // block_bytes)
    if len(data) != _SUMS_HEADER.size + 8 * count:
        raise CheckpointDamaged(
            f"{where} has {len(data)} bytes, not the {_SUMS_HEADER.size + 8 * count} of its "
            f"{count} blocks; use another step"
        )
    blocks = array.array("Q", data[_SUMS_HEADER.size :])
    if sys.byteorder == "big":
        blocks.byteswap()
    return Sums(block_bytes, size, layout.hex(), blocks, xxhash.xxh3_128_hexdigest(data))


class BlockReader:
    """Verified reads of one file's bytes: none leaves it that its checksum does not vouch for."""

    def __init__(self, storage: Readable, file: ShardFile) -> None:
        """Reads the checksums; raises `CheckpointDamaged` if they are not those that `file` names
        (its digest is checked if it is known)."""
        self._storage = storage
        self._name = file.name
        self._sums = read_sums(storage, file.name)
        known = (file.digest, file.bytes)
        if file.digest is not None and (self._sums.digest, self._sums.size) != known:
            raise CheckpointDamaged(
                f"{self.where}{SUMS_SUFFIX} is not the one that the manifest names; "
                "use another step"
            )
        self._scratch = memoryview(b"")
        self._scratch_block = -1

    def twin(self) -> BlockReader:
        """Another reader of the file, for another thread: it keeps a block of its own."""
        twin = copy.copy(self)
        twin._scratch = memoryview(b"")
        twin._scratch_block = -1
        return twin

    @property
    def where(self) -> str:
        return f"{self._storage.where}/{self._name}"

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._sums.size

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` on. Raises `CheckpointDamaged`."""
        self.fill([(start, buffer)])

    def fill(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its byte of the file on; best in the file's order.

        What covers whole blocks, alone or with the pieces next to it, is read straight into its
        place, all else by way of one block that is kept. Raises `CheckpointDamaged`.
        """
        block_bytes = self._sums.block_bytes
        shared = self._shared(pieces)
        unchecked: list[memoryview] = []
        for start, buffer in pieces:
            position, stop = start, start + len(buffer)
            while position < stop:
                block, within = divmod(position, block_bytes)
                whole = 0 if within else min(stop - position, READ_BYTES) // block_bytes
                end = position + whole * block_bytes if whole else (block + 1) * block_bytes
                end = min(end, stop)
                view = buffer[position - start : end - start]
                if whole:
                    self._fill(position, view)
                    for i in range(whole):
                        self._check(block + i, view[i * block_bytes : (i + 1) * block_bytes])
                elif block in shared:
                    self._fill(position, view)
                    unchecked.append(view)
                    if end == (block + 1) * block_bytes:
                        self._check(block, *unchecked)
                        unchecked.clear()
                else:
                    view[:] = self._block(block)[within : within + end - position]
                position = end
        assert not unchecked

    def _shared(self, pieces: Sequence[tuple[int, memoryview]]) -> set[int]:
        """The blocks that a few pieces cover together; none where pieces overlap or go back."""
        block_bytes = self._sums.block_bytes
        found: set[int] = set()
        count, reached = 0, -1
        for start, buffer in pieces:
            stop = start + len(buffer)
            if start < reached:
                return set()
            block = start // block_bytes
            if start % block_bytes:
                count = count + 1 if count and start == reached else 0
                if 0 < count <= SHARERS and stop >= (block + 1) * block_bytes:
                    found.add(block)
            if stop // block_bytes > block or start % block_bytes == 0:
                count = 1 if stop % block_bytes else 0
            reached = stop
        return found

    def bad_ranges(self) -> Iterator[tuple[int, int]]:
        """Read every block, and give the byte range of each stretch of bad ones."""
        bad: tuple[int, int] | None = None
        for block in range(len(self._sums.blocks)):
            start, view = self._window(block)
            self._scratch_block = -1
            if self._read_whole(start, view) and self._vouched(block, view):
                continue
            stop = start + len(view)
            if bad is not None and bad[1] == start:
                bad = (bad[0], stop)
                continue
            if bad is not None:
                yield bad
            bad = (start, stop)
        if bad is not None:
            yield bad
        if (actual := self._storage.size(self._name)) > self.size:
            yield (self.size, actual)

    def _block(self, block: int) -> memoryview:
        """One verified block, kept until the next: small tensors that share it cost one read."""
        start, view = self._window(block)
        if block != self._scratch_block:
            self._scratch_block = -1
            self._fill(start, view)
            self._check(block, view)
            self._scratch_block = block
        return view

    def _window(self, block: int) -> tuple[int, memoryview]:
        if not self._scratch:
            self._scratch = memoryview(bytearray(min(self._sums.block_bytes, self.size)))
        start = block * self._sums.block_bytes
        return start, self._scratch[: min(self._sums.block_bytes, self.size - start)]

    def _fill(self, start: int, view: memoryview) -> None:
        if not self._read_whole(start, view):
            raise CheckpointDamaged(
                f"{self.where} ends before byte {start + len(view)}: it should have "
                f"{self.size} bytes; use another step"
            )

    def _read_whole(self, start: int, view: memoryview) -> bool:
        try:
            return self._storage.read_into(self._name, start, view) == len(view)
        except FileNotFoundError:
            raise CheckpointDamaged(f"{self.where} is missing; use another step") from None
        except StorageError as error:
            stop = start + len(view)
            raise StorageError(f"{error} (bytes {start} to {stop} of {self._name})") from error

    def _check(self, block: int, *views: memoryview) -> None:
        if not self._vouched(block, *views):
            start = block * self._sums.block_bytes
            stop = start + sum(map(len, views))
            raise CheckpointDamaged(
                f"{self.where}: bytes {start} to {stop} are not what was written "
                "(their checksum differs); use another step"
            )

    def _vouched(self, block: int, *views: memoryview) -> bool:
        found = xxhash.xxh3_64()
        for view in views:
            found.update(view)  # of all xxhash's ways the one that always lets other threads run
        return bool(found.intdigest() == self._sums.blocks[block])


class ShardReader:
    """Verified reads of the tensors in one shard file."""

    def __init__(self, storage: Readable, file: ShardFile) -> None:
        """Reads checksums and header; raises `CheckpointDamaged`."""
        self._blocks = BlockReader(storage, file)
        self.metadata, self.entries = _read_header(self._blocks)

    def twin(self) -> ShardReader:
        """Another reader of the shard, for another thread."""
        twin = copy.copy(self)
        twin._blocks = self._blocks.twin()
        return twin

    @property
    def where(self) -> str:
        return self._blocks.where

    def read_into(self, name: str, span: Span, buffer: memoryview) -> None:
        """Fill `buffer` with elements `span` of what the file holds of a tensor.

        `buffer`: writable bytes, as many as the span has. Raises `CheckpointDamaged`.
        """
        self.fill([(name, span, buffer)])

    def fill(self, parts: Iterable[tuple[str, Span, memoryview]]) -> None:
        """`read_into` of several parts; fastest in the file's order."""
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
    """A rank's shard, found to hold what the manifest says; raises `CheckpointDamaged`."""
    shard = ShardReader(storage, manifest.files[rank])
    held = {name: TensorSpec(e.dtype, e.shape) for name, e in shard.entries.items()}
    wanted = (str(manifest.step), str(rank), manifest.token)
    said = tuple(shard.metadata.get(key) for key in ("step", "rank", "token"))
    if held != shard_specs(manifest, rank) or said != wanted:
        raise CheckpointDamaged(f"{shard.where} does not hold what its manifest says")
    return shard


def _read_header(blocks: BlockReader) -> tuple[dict[str, str], dict[str, Entry]]:
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
) -> tuple[dict[str, str], dict[str, Entry]]:
    """(metadata, entries by name) of a safetensors header; `CheckpointDamaged` if it is not one."""
    base = 8 + len(text)
    try:
        table = strict_json(text)
        metadata = {str(k): str(v) for k, v in table.pop("__metadata__", {}).items()}
        entries = {}
        for name, value in table.items():
            spec = TensorSpec(value["dtype"], tuple(_whole(size) for size in value["shape"]))
            start, stop = (base + _whole(offset) for offset in value["data_offsets"])
            if stop - start != spec.nbytes or start < base:
                raise ValueError(f"tensor {name!r} has {stop - start} bytes, not {spec.nbytes}")
            entries[name] = Entry(spec.dtype, spec.shape, start, stop)
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


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.40} is not a whole number")
    return value
