"""Verified reads of many pieces of one file at once, against slices of its bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticzero.checkpoint.format import checksums
from elasticzero.checkpoint.format.checksums import BlockReader, BlockSums, SharedSums
from elasticzero.checkpoint.format.manifest import ShardFile
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.errors import CheckpointDamaged
from tests.unit.checkpoint.cases import draft_of, elements, simple_layout, write_ranks

BLOCK = 64
Piece = tuple[int, int]
"""First byte and number of bytes."""


def written(folder: str) -> tuple[DiskStorage, str, bytes]:
    """A shard file in blocks of 64 bytes: 8 KiB of head, then 803 bytes."""
    draft = draft_of(simple_layout(world_size=1, numel=50))
    storage = DiskStorage(Path(folder), durable=False)
    with patch.object(checksums, "BLOCK_BYTES", BLOCK):
        write_ranks(storage, draft, elements(draft.layout.tensors))
    name = draft.file_name(0)
    return storage, name, (Path(folder) / name).read_bytes()


def filled(storage: DiskStorage, name: str, pieces: list[Piece], at_once: int) -> list[bytes]:
    reader = BlockReader(storage, ShardFile(name, 0, None))
    buffers = [(start, bytearray(count)) for start, count in pieces]
    with patch.object(checksums, "READ_BYTES", at_once):
        reader.fill([(start, memoryview(buffer)) for start, buffer in buffers])
    return [bytes(buffer) for _, buffer in buffers]


@st.composite
def neighbours(draw: st.DrawFn, size: int) -> list[Piece]:
    """Pieces one after the other, with a gap or an overlap here and there."""
    at = draw(st.integers(0, size))
    pieces = []
    for count in draw(st.lists(st.sampled_from([0, 1, 7, 20, 32, 63, 64, 65, 150]), max_size=30)):
        at = min(max(0, at + draw(st.sampled_from([0, 0, 0, 0, 0, 1, 40, -5]))), size)
        pieces.append((at, min(count, size - at)))
        at += pieces[-1][1]
    return pieces


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_pieces_are_filled_and_no_damaged_byte_gets_through(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        storage, name, content = written(folder)
        pieces = data.draw(neighbours(len(content)))
        if data.draw(st.booleans()):
            pieces = data.draw(st.permutations(pieces))
        at_once = data.draw(st.sampled_from([2 * BLOCK, 2 * BLOCK + 20, BLOCK // 2]))
        assert filled(storage, name, pieces, at_once) == [
            content[a : a + count] for a, count in pieces
        ]
        bad = data.draw(st.integers(0, len(content) - 1))
        touched = {b for a, n in pieces for b in range(a // BLOCK, -(-(a + n) // BLOCK)) if n}
        changed = bytearray(content)
        changed[bad] ^= 4
        (Path(folder) / name).write_bytes(changed)
        if bad // BLOCK in touched:
            start = bad // BLOCK * BLOCK
            stop = min(start + BLOCK, len(content))
            with pytest.raises(CheckpointDamaged, match=f"bytes {start} to {stop} are not what"):
                filled(storage, name, pieces, at_once)
        else:
            filled(storage, name, pieces, at_once)


def reads_of(folder: Path, pieces: list[Piece]) -> list[tuple[int, int]]:
    """(first byte, bytes) of each read that filling these takes."""
    storage, name, content = written(str(folder))
    reads: list[tuple[int, int]] = []

    class Counted:
        where = storage.where
        size = storage.size

        def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
            reads.append((start, sum(map(len, buffers))))
            return storage.read_into(name, start, *buffers)

    reader = BlockReader(Counted(), ShardFile(name, 0, None))
    reads.clear()
    buffers = [(start, bytearray(count)) for start, count in pieces]
    reader.fill([(start, memoryview(buffer)) for start, buffer in buffers])
    for start, buffer in buffers:
        assert buffer == content[start : start + len(buffer)]
    return reads


def test_a_block_that_several_tensors_share_is_read_once(tmp_path: Path) -> None:
    assert reads_of(tmp_path, [(130, 10), (150, 20), (170, 22), (256, 10)]) == [
        (128, 64),
        (256, 64),
    ]


def test_a_span_over_a_block_s_end_is_one_read_of_whole_blocks(tmp_path: Path) -> None:
    assert reads_of(tmp_path, [(130, 100), (230, 28), (258, 10)]) == [(128, 192)]


def test_the_last_block_is_as_short_as_the_file(tmp_path: Path) -> None:
    size = 4096 + 804
    start = (size - 100) // BLOCK * BLOCK
    assert reads_of(tmp_path, [(size - 100, 90)]) == [(start, size - start)]


@given(data=st.binary(max_size=2000), order=st.randoms(use_true_random=False))
def test_shared_sums_in_any_order_are_those_of_one_stream(data: bytes, order: Random) -> None:
    with patch.object(checksums, "BLOCK_BYTES", BLOCK):
        stream, shared = BlockSums(), SharedSums(len(data))
        assert b"".join(stream.watch([data])) == data
        starts = [*range(0, len(data), 3 * BLOCK), *range(0, len(data), 2 * BLOCK)]
        order.shuffle(starts)
        for start in starts:
            shared.add(start, memoryview(data)[start : start + 3 * BLOCK])
        assert shared.finish("a", "0" * 32) == stream.finish("a", "0" * 32)


def test_blocks_that_nobody_has_read_are_not_taken_for_known() -> None:
    with patch.object(checksums, "BLOCK_BYTES", BLOCK):
        shared = SharedSums(5 * BLOCK + 1)
        shared.add(2 * BLOCK, memoryview(bytes(3 * BLOCK + 1)))
        with pytest.raises(AssertionError, match="not read"):
            shared.finish("a", "0" * 32)
