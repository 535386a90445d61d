"""Shard files: plain safetensors, every byte vouched for, every kind of damage found."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from elasticzero.checkpoint.format.checksums import BLOCK_BYTES, BlockReader, BlockSums, read_sums
from elasticzero.checkpoint.format.layout import PAIRED, Group, Layout, TensorSpec, itemsize
from elasticzero.checkpoint.format.manifest import Manifest, ShardFile
from elasticzero.checkpoint.format.shards import (
    ShardReader,
    header,
    open_shard,
    parse_header,
    shard_specs,
    write_shard,
)
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.errors import CheckpointDamaged
from elasticzero.spans import Span
from tests.unit.checkpoint.cases import (
    cut,
    draft_of,
    elements,
    flip,
    layouts,
    simple_layout,
    write_ranks,
)

LONG = TensorSpec("F32", (3 * BLOCK_BYTES // 4,))
"""Of three blocks; with the header before it, four."""


class Counting:
    """A directory that counts the bytes read from it."""

    def __init__(self, disk: DiskStorage) -> None:
        self._disk = disk
        self.where = disk.where
        self.bytes = 0

    def size(self, name: str) -> int:
        return self._disk.size(name)

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        count = self._disk.read_into(name, start, *buffers)
        self.bytes += count
        return count


@given(layouts())
def test_shards_are_plain_safetensors_in_any_layout(layout: Layout) -> None:
    whole, draft = elements(layout.tensors), draft_of(layout)
    with tempfile.TemporaryDirectory() as directory:
        write_ranks(DiskStorage(Path(directory), durable=False), draft, whole)
        for rank in range(layout.world_size):
            data = (Path(directory) / draft.file_name(rank)).read_bytes()
            read = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
            held = layout.spans(rank)
            assert read.keys() == held.keys()
            for name, span in held.items():
                spec = layout.tensors[name]
                full = len(span) == spec.numel
                assert bytes(read[name]["data"]) == cut(whole[name], spec.dtype, span)
                shape = spec.shape if full else (len(span),)
                if spec.dtype == PAIRED:  # safetensors counts single values
                    shape = (*shape[:-1], 2 * shape[-1])
                assert tuple(read[name]["shape"]) == shape
                assert read[name]["dtype"] == spec.dtype


@given(layouts(), st.data())
def test_any_span_is_read(layout: Layout, data: st.DataObject) -> None:
    whole, draft = elements(layout.tensors), draft_of(layout)
    with tempfile.TemporaryDirectory() as directory:
        disk = DiskStorage(Path(directory), durable=False)
        write_ranks(disk, draft, whole)
        rank = data.draw(st.integers(0, layout.world_size - 1))
        shard = ShardReader(disk, ShardFile(draft.file_name(rank), 0, None))
        for name, held in layout.spans(rank).items():
            ends = sorted(data.draw(st.tuples(*[st.integers(0, len(held))] * 2)))
            dtype = layout.tensors[name].dtype
            buffer = bytearray((ends[1] - ends[0]) * itemsize(dtype))
            shard.read_into(name, Span(*ends), memoryview(buffer))
            span = Span(held.start + ends[0], held.start + ends[1])
            assert buffer == cut(whole[name], dtype, span)


def test_data_is_aligned_to_its_elements() -> None:
    tensors = {
        "a": TensorSpec("U8", (3,)),
        "b": TensorSpec("BF16", (1,)),
        "c": TensorSpec("F64", (1,)),
    }
    layout = Layout(world_size=1, tensors=tensors, groups=(Group("even", tuple(tensors)),))
    specs = shard_specs(draft_of(layout), 0)
    head = header(specs, {"format": "pt"})
    _, entries = parse_header(head[8:], len(head) + 13, "x")
    assert list(specs) == ["c", "b", "a"]
    assert all(e.start % itemsize(e.dtype) == 0 for e in entries.values())


def test_metadata_says_whose_it_is(tmp_path: Path) -> None:
    draft = draft_of(simple_layout())
    write_ranks(DiskStorage(tmp_path, durable=False), draft, elements(draft.layout.tensors))
    with safetensors.safe_open(tmp_path / draft.file_name(1), "numpy") as file:
        assert file.metadata() == {
            "format": "pt",
            "step": "7",
            "rank": "1",
            "world_size": "2",
            "token": "token",
        }


@pytest.fixture
def long(tmp_path: Path) -> tuple[DiskStorage, Manifest, ShardFile, bytes]:
    """One shard of four blocks with one tensor."""
    layout = Layout(world_size=1, tensors={"x": LONG}, groups=(Group("even", ("x",)),))
    draft, whole = draft_of(layout), elements({"x": LONG})["x"]
    disk = DiskStorage(tmp_path, durable=False)
    chunks = [whole[:5], whole[5 : BLOCK_BYTES + 9], whole[BLOCK_BYTES + 9 :]]
    return disk, draft, write_shard(disk, draft, 0, chunks), whole


Long = tuple[DiskStorage, Manifest, ShardFile, bytes]


def test_a_large_tensor_cut_at_any_place(long: Long) -> None:
    disk, _, file, whole = long
    shard = ShardReader(disk, file)
    edges = [0, 1, BLOCK_BYTES // 4 - 40, BLOCK_BYTES // 4, BLOCK_BYTES // 2 + 3, LONG.numel]
    for start in edges:
        for stop in [e for e in edges if e >= start]:
            buffer = bytearray((stop - start) * 4)
            shard.read_into("x", Span(start, stop), memoryview(buffer))
            assert buffer == whole[start * 4 : stop * 4]


def test_a_span_costs_its_bytes_and_one_block_a_cut(long: Long) -> None:
    disk, _, file, _ = long
    counting = Counting(disk)
    shard = ShardReader(counting, file)
    counting.bytes = 0
    span = Span(100, 2 * BLOCK_BYTES // 4 + 100)
    shard.read_into("x", span, memoryview(bytearray(4 * len(span))))
    assert counting.bytes <= 4 * len(span) + 2 * BLOCK_BYTES


def test_small_neighbours_cost_one_block(long: Long) -> None:
    disk, _, file, _ = long
    counting = Counting(disk)
    shard = ShardReader(counting, file)
    counting.bytes = 0
    for start in range(0, 1000, 10):
        shard.read_into("x", Span(start, start + 10), memoryview(bytearray(40)))
    assert counting.bytes <= BLOCK_BYTES


@pytest.mark.parametrize("position", [3, 200, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5])
def test_a_flipped_bit_is_found_with_its_block(long: Long, position: int) -> None:
    disk, _, file, _ = long
    flip(disk.path / file.name, position)
    start = position // BLOCK_BYTES * BLOCK_BYTES
    with pytest.raises(CheckpointDamaged, match=f"{file.name}: bytes {start} to") as caught:
        shard = ShardReader(disk, file)
        shard.read_into("x", Span(0, LONG.numel), memoryview(bytearray(LONG.nbytes)))
    assert str(disk.path) in str(caught.value)
    stop = min(file.bytes, start + BLOCK_BYTES)
    assert list(BlockReader(disk, file).bad_ranges()) == [(start, stop)]


def test_a_flipped_bit_elsewhere_does_not_hurt(long: Long) -> None:
    disk, _, file, whole = long
    flip(disk.path / file.name, 3 * BLOCK_BYTES + 5)
    buffer = bytearray(4000)
    ShardReader(disk, file).read_into("x", Span(0, 1000), memoryview(buffer))
    assert buffer == whole[:4000]


def test_a_truncated_file(long: Long) -> None:
    disk, _, file, _ = long
    with open(disk.path / file.name, "r+b") as data:
        data.truncate(2 * BLOCK_BYTES + 10)
    with pytest.raises(CheckpointDamaged, match=f"{file.name} ends before byte"):
        shard = ShardReader(disk, file)
        shard.read_into("x", Span(0, LONG.numel), memoryview(bytearray(LONG.nbytes)))
    assert list(BlockReader(disk, file).bad_ranges()) == [(2 * BLOCK_BYTES, file.bytes)]


def test_a_file_with_more_than_was_written(long: Long) -> None:
    disk, _, file, _ = long
    with open(disk.path / file.name, "ab") as data:
        data.write(b"more")
    assert list(BlockReader(disk, file).bad_ranges()) == [(file.bytes, file.bytes + 4)]


def test_two_separate_bad_stretches_are_told_apart(long: Long) -> None:
    disk, _, file, _ = long
    for block in (0, 2, 3):
        flip(disk.path / file.name, block * BLOCK_BYTES)
    ranges = [(0, BLOCK_BYTES), (2 * BLOCK_BYTES, file.bytes)]
    assert list(BlockReader(disk, file).bad_ranges()) == ranges


@pytest.mark.parametrize("suffix", ["", ".sums"])
def test_a_missing_file(long: Long, suffix: str) -> None:
    disk, _, file, _ = long
    disk.remove(file.name + suffix)
    with pytest.raises(CheckpointDamaged, match=f"{file.name}{suffix} is missing"):
        ShardReader(disk, file)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda d: d[:10], "cut off"),
        (lambda d: d[:-1], "not the 72 of its 4 blocks"),
        (lambda d: d + b"\0" * 8, "not the 72 of its 4 blocks"),
        (lambda d: b"NO" + d[2:], "not a checksum file"),
        (lambda d: d[:8] + struct.pack("<I", 2) + d[12:], "not a checksum file of version 1"),
        (lambda d: d[:12] + struct.pack("<I", 0) + d[16:], "not a checksum file"),
        (lambda d: d[:16] + struct.pack("<Q", 1 << 60) + d[24:], "blocks"),
        (lambda d: d[:-8] + b"\0" * 8, "not the one that the manifest names"),
    ],
)
def test_a_damaged_checksum_file(long: Long, damage: object, complaint: str) -> None:
    disk, _, file, _ = long
    path = disk.path / f"{file.name}.sums"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(CheckpointDamaged, match=complaint):
        ShardReader(disk, file)


def rewrite(disk: DiskStorage, draft: Manifest, data: bytes) -> ShardFile:
    """Replace rank 0's shard by other bytes whose checksums are right."""

    name = draft.file_name(0)
    (disk.path / name).write_bytes(data)
    sums = BlockSums()
    list(sums.watch([data]))
    contents, _ = sums.finish(name, draft.layout.digest())
    (disk.path / f"{name}.sums").write_bytes(contents)
    return ShardFile(name, len(data), read_sums(disk, name).digest)


def shard_of(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "too short"),
        (struct.pack("<Q", 1 << 60) + b"{}", "header has 1152921504606846976 bytes: more than"),
        (struct.pack("<Q", 3) + b"{}", "header has 3 bytes: more than"),
        (shard_of(b"{"), "header is wrong"),
        (shard_of(b"[" * 100_000), "header is wrong"),
        (shard_of(b"[]"), "header is wrong"),
        (shard_of(b'{"x":{"dtype":"F32","shape":[1]}}', b"0000"), "data_offsets"),
        (shard_of(b'{"x":{"dtype":"Q","shape":[1],"data_offsets":[0,4]}}', b"0000"), "'Q'"),
        (
            shard_of(b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"0000"),
            "4 bytes, not 8",
        ),
        (shard_of(b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[-4,0]}}'), "'x' has 4 bytes"),
        (
            shard_of(b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', b"00"),
            "begins at byte",
        ),
        (shard_of(b"{}", b"00"), "end at byte 10 of 12"),
        (shard_of(b'{"x":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}', b"0"), "end at byte"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    disk, draft = DiskStorage(tmp_path, durable=False), draft_of(simple_layout(world_size=1))
    file = rewrite(disk, draft, content)
    with pytest.raises(CheckpointDamaged, match=complaint):
        ShardReader(disk, file)


def test_a_shard_of_another_token_or_rank_is_refused(tmp_path: Path) -> None:
    layout = simple_layout(world_size=2)
    ours, theirs = draft_of(layout), draft_of(layout, token="other")
    disk = DiskStorage(tmp_path, durable=False)
    write_ranks(disk, theirs, elements(layout.tensors))
    data = (tmp_path / theirs.file_name(0)).read_bytes()
    files = (rewrite(disk, ours, data), ShardFile(ours.file_name(1), 0, None))
    whole = draft_of(layout, files=files)
    with pytest.raises(CheckpointDamaged, match="does not hold what its manifest says"):
        open_shard(disk, whole, 0)


def test_too_few_bytes_do_not_become_a_shard(tmp_path: Path) -> None:
    disk, draft = DiskStorage(tmp_path, durable=False), draft_of(simple_layout(world_size=1))
    with pytest.raises(ValueError, match="bytes were given"):
        write_shard(disk, draft, 0, [b"abc"])
    assert disk.names() == []
