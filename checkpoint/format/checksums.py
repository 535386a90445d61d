"""Computes checksums of a file's blocks, and verifies by them every byte that is read.

The checksum file is binary, little-endian: magic, version, block size, the file's size and the
digest of the layout it was written by (`_SUMS_HEADER`), then one xxh3_64 for each block of the
file, its header included.
"""

from __future__ import annotations

import array
import copy
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from elasticzero.checkpoint.format.manifest import ShardFile
from elasticzero.checkpoint.format.names import MANIFEST_NAME, SUMS_SUFFIX
from elasticzero.checkpoint.storage.base import Bytes, Readable, Views, read_small
from elasticzero.errors import CheckpointDamaged, StorageError

BLOCK_BYTES = 256 << 10
READ_BYTES = 8 << 20
"""Bytes that are read in one go and then checked, while the processor's cache still has them."""
_PASS_BYTES = 2 * BLOCK_BYTES
"""Bytes that are checksummed and handed on at a time: a core's own cache still has them when they
are written."""
MOST_VIEWS = 512
"""Maximum number of buffers that one read fills; Linux takes 1024."""
SUMS_LIMIT_BYTES = 1 << 28
_MAX_BLOCK_BYTES = 1 << 26
_SUMS_HEADER = struct.Struct("<8sIIQ16s")
_SUMS_MAGIC = b"EZSUMS\r\n"
_SUMS_VERSION = 1


class BlockSums:
    """Computes the checksums of the blocks of a stream of bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._done: list[int] = []
        self._open = xxhash.xxh3_64()

    def watch(self, chunks: Iterable[Bytes]) -> Iterator[memoryview]:
        """Yields the same bytes, each added to the checksums just before it is handed on."""
        for chunk in chunks:
            view = memoryview(chunk)
            for start in range(0, len(view), _PASS_BYTES):
                part = view[start : start + _PASS_BYTES]
                self._add(part)
                yield part

    def finish(self, name: str, layout_digest: str) -> tuple[bytes, ShardFile]:
        """Returns (contents of the checksum file, the manifest's entry) for the shard file
        `name`."""
        if self.size % BLOCK_BYTES:
            self._close_block()
        return _finished(name, self.size, self._done, layout_digest)

    def _add(self, view: memoryview) -> None:
        start = 0
        while start < len(view):
            stop = min(len(view), start + BLOCK_BYTES - self.size % BLOCK_BYTES)
            self._open.update(view[start:stop])
            self.size += stop - start
            start = stop
            if self.size % BLOCK_BYTES == 0:
                self._close_block()

    def _close_block(self) -> None:
        self._done.append(self._open.intdigest())
        self._open.reset()


class SharedSums:
    """Computes the checksums of a file's blocks, each by the first of several threads to reach
    it."""

    def __init__(self, size: int) -> None:
        """Prepares for a file of `size` bytes."""
        self.size = size
        self._blocks: list[int | None] = [None] * -(-size // BLOCK_BYTES)

    def add(self, start: int, view: memoryview) -> None:
        """Adds the bytes from `start` on: whole blocks, or up to the file's end."""
        for offset in range(0, len(view), BLOCK_BYTES):
            block = (start + offset) // BLOCK_BYTES
            if self._blocks[block] is None:
                self._blocks[block] = _checksum(view[offset : offset + BLOCK_BYTES])

    def finish(self, name: str, layout_digest: str) -> tuple[bytes, ShardFile]:
        """Returns what `BlockSums.finish` does, once all blocks are known."""
        blocks = [block for block in self._blocks if block is not None]
        assert len(blocks) == len(self._blocks), f"{name}: some of its blocks are not read"
        return _finished(name, self.size, blocks, layout_digest)


def _checksum(*views: memoryview) -> int:
    state = xxhash.xxh3_64()
    for view in views:
        state.update(view)  # the one call of xxhash that always releases Python's lock
    return state.intdigest()


def _finished(
    name: str, size: int, blocks: Iterable[int], layout_digest: str
) -> tuple[bytes, ShardFile]:
    sums = array.array("Q", blocks)
    if sys.byteorder == "big":
        sums.byteswap()
    digest = bytes.fromhex(layout_digest)
    head = _SUMS_HEADER.pack(_SUMS_MAGIC, _SUMS_VERSION, BLOCK_BYTES, size, digest)
    data = head + sums.tobytes()
    return data, ShardFile(name, size, xxhash.xxh3_128_hexdigest(data))


@dataclass(frozen=True, slots=True)
class BlockChecksums:
    """Holds the contents of a checksum file."""

    block_bytes: int
    size: int
    """Size of the shard file."""
    layout_digest: str
    """Digest of the layout by which the shard was written."""
    blocks: array.array[int]
    digest: str
    """Digest of the checksum file itself."""


def missing_file_error(storage: Readable, name: str) -> CheckpointDamaged:
    """Returns the error for a missing file of a step: damage, unless the whole step was removed."""
    where = f"{storage.where}/{name}"
    try:
        storage.size(MANIFEST_NAME)
    except FileNotFoundError:
        return CheckpointDamaged(
            f"{where} is missing, and so is the step's manifest: the step was removed while it was "
            "read, as --keep removes old steps; use a newer step"
        )
    except StorageError:
        pass
    return CheckpointDamaged(f"{where} is missing; use another step")


def read_sums(storage: Readable, shard_name: str) -> BlockChecksums:
    """Returns the checksums of a shard; raises `CheckpointDamaged` if they are missing or
    invalid."""
    name = shard_name + SUMS_SUFFIX
    where = f"{storage.where}/{name}"
    try:
        data = read_small(storage, name, SUMS_LIMIT_BYTES)
    except FileNotFoundError:
        raise missing_file_error(storage, name) from None
    return parse_sums(data, where)


def parse_sums(data: bytes, where: str) -> BlockChecksums:
    """Returns the contents of a checksum file; raises `CheckpointDamaged` if they are invalid."""
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
    return BlockChecksums(block_bytes, size, layout.hex(), blocks, xxhash.xxh3_128_hexdigest(data))


class BlockReader:
    """Reads one file's bytes and returns none that does not match its checksum."""

    def __init__(self, storage: Readable, file: ShardFile) -> None:
        """Reads the checksums; raises `CheckpointDamaged` unless they are those that `file` names.

        The digest is compared if `file` has one.
        """
        self._storage = storage
        self._name = file.name
        self._sums = read_sums(storage, file.name)
        named = (file.digest, file.bytes)
        if file.digest is not None and (self._sums.digest, self._sums.size) != named:
            raise CheckpointDamaged(
                f"{self.where}{SUMS_SUFFIX} is not the one that the manifest names; "
                "use another step"
            )
        self.forget()

    def clone(self) -> BlockReader:
        """Returns another reader of the file, with a buffer of its own, for another thread."""
        clone = copy.copy(self)
        clone.forget()
        return clone

    def forget(self) -> None:
        """Drops the block that is buffered from the last reading, and its buffer."""
        self._buffers = self._buffered = memoryview(b"")
        self._buffered_from = 0

    @property
    def where(self) -> str:
        return f"{self._storage.where}/{self._name}"

    @property
    def size(self) -> int:
        """Returns the size of the file."""
        return self._sums.size

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `start` on. Raises `CheckpointDamaged`."""
        self.fill([(start, buffer)])

    def fill(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fills each buffer from its byte of the file on; ascending order is the fastest.

        Bytes that follow each other without a gap are read in one go, straight into place, together
        with the rest of their first and last block. The rest of the last block is kept, and so is a
        block that contains a whole stretch, so that the bytes that come next in it are not read
        again. Raises `CheckpointDamaged`.
        """
        for start, views in _stretches(pieces):
            stop = start + sum(map(len, views))
            rest = Views(views)
            start = self._copy_buffered(start, stop, rest)
            if start == stop:
                continue
            if start // self._sums.block_bytes < (stop - 1) // self._sums.block_bytes:
                self._fill_in_place(start, stop, rest.rest())
            else:
                self._buffer_block(start // self._sums.block_bytes)
                self._copy_buffered(start, stop, rest)

    def _copy_buffered(self, start: int, stop: int, rest: Views) -> int:
        """Fills the buffers from the buffered bytes, as far as these go; returns the position
        reached.

        Args:
            start: Position in the file of the first byte to fill.
            stop: End of the bytes to fill, excluded.
            rest: Buffers of these bytes; those that are filled are taken from it.
        """
        within = start - self._buffered_from
        if not 0 <= within < len(self._buffered):
            return start
        stop = min(stop, self._buffered_from + len(self._buffered))
        for view in rest.take(stop - start):
            view[:] = self._buffered[within : within + len(view)]
            within += len(view)
        return stop

    def _fill_in_place(self, start: int, stop: int, views: list[memoryview]) -> None:
        """Reads bytes of several blocks straight into place.

        Args:
            start: Position in the file of the first byte.
            stop: End of the bytes, excluded.
            views: Buffers of these bytes, in order.

        Raises:
            CheckpointDamaged: A block does not match its checksum.
        """
        block_bytes = self._sums.block_bytes
        before, after = start % block_bytes, min(-stop % block_bytes, self.size - stop)
        self._buffered = memoryview(b"")
        rest_of_block = self._buffer(1)[:after]
        whole = Views([self._buffer(0)[:before], *views, rest_of_block])
        step = max(1, READ_BYTES // block_bytes) * block_bytes
        for at in range(start - before, stop + after, step):
            size = min(step, stop + after - at)
            part = whole.take(size)
            self._fill(at, *part)
            unchecked = Views(part)
            for block in range(at, at + size, block_bytes):
                bytes_of_block = unchecked.take(min(block_bytes, at + size - block))
                self._check(block // block_bytes, *bytes_of_block)
        self._buffered_from, self._buffered = stop, rest_of_block

    def _buffer_block(self, block: int) -> None:
        """Reads one whole block, verifies it and buffers it."""
        self._buffered = memoryview(b"")
        start, view = self._window(block)
        self._fill(start, view)
        self._check(block, view)
        self._buffered_from, self._buffered = start, view

    def bad_ranges(self) -> Iterator[tuple[int, int]]:
        """Reads every block and yields the byte range of each run of bad blocks."""
        bad: tuple[int, int] | None = None
        self._buffered = memoryview(b"")
        for block in range(len(self._sums.blocks)):
            start, view = self._window(block)
            if self._read_whole(start, view) and self._matches(block, view):
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

    def _window(self, block: int) -> tuple[int, memoryview]:
        """Returns (a block's first byte, room for it)."""
        start = block * self._sums.block_bytes
        return start, self._buffer(1)[: min(self._sums.block_bytes, self.size - start)]

    def _buffer(self, number: int) -> memoryview:
        """Returns room for a block: number 0 for bytes to discard, 1 for bytes to keep."""
        size = min(self._sums.block_bytes, self.size)
        if not self._buffers:
            self._buffers = memoryview(bytearray(2 * size))
        return self._buffers[number * size :][:size]

    def _fill(self, start: int, *views: memoryview) -> None:
        if not self._read_whole(start, *views):
            stop = start + sum(map(len, views))
            raise CheckpointDamaged(
                f"{self.where} ends before byte {stop}: it should have {self.size} bytes; "
                "use another step"
            )

    def _read_whole(self, start: int, *views: memoryview) -> bool:
        size = sum(map(len, views))
        try:
            return self._storage.read_into(self._name, start, *views) == size
        except FileNotFoundError:
            raise missing_file_error(self._storage, self._name) from None
        except StorageError as error:
            stop = start + size
            raise StorageError(f"{error} (bytes {start} to {stop} of {self._name})") from error

    def _check(self, block: int, *views: memoryview) -> None:
        if not self._matches(block, *views):
            start = block * self._sums.block_bytes
            stop = start + sum(map(len, views))
            raise CheckpointDamaged(
                f"{self.where}: bytes {start} to {stop} are not what was written "
                "(their checksum differs); use another step"
            )

    def _matches(self, block: int, *views: memoryview) -> bool:
        return _checksum(*views) == self._sums.blocks[block]


def _stretches(
    pieces: Sequence[tuple[int, memoryview]],
) -> Iterator[tuple[int, list[memoryview]]]:
    """Joins pieces that follow each other without a gap; yields (first byte, the buffers)."""
    start, reached = 0, -1
    views: list[memoryview] = []
    for at, view in pieces:
        if not len(view):
            continue
        if at != reached or len(views) == MOST_VIEWS:
            if views:
                yield start, views
            start, views = at, []
        views.append(view)
        reached = at + len(view)
    if views:
        yield start, views
