"""A load that several threads share."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from elasticzero.checkpoint.format.checksums import BLOCK_BYTES
from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.format.shards import open_shard
from elasticzero.checkpoint.io import read_parts, read_pool, reader
from elasticzero.checkpoint.io.reader import Checkpoint, open_step
from elasticzero.checkpoint.storage.base import Readable
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.errors import CheckpointDamaged, StorageError
from elasticzero.spans import Span
from elasticzero.state.model import LoadTarget
from tests.unit.checkpoint.cases import draft_of, elements, flip, write_step

ROWS = 9
SPECS = {
    "bias": TensorSpec("F32", (3,)),
    "w": TensorSpec("F32", (ROWS, 200_000)),
    "half": TensorSpec("BF16", (ROWS, 150_001)),
    "flags": TensorSpec("U8", (ROWS, 300_001)),
}
LAYOUT = Layout(
    world_size=3,
    tensors=SPECS,
    groups=(Group("fsdp_rows", ("w", "half")), Group("even", ("bias", "flags"))),
)
DRAFT = draft_of(LAYOUT)
CONTENTS = elements(SPECS)
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}


class Meeting:
    """A step's storage of which reads of whole blocks begin once two threads want one; then they
    fail, if that is asked for."""

    def __init__(self, storage: Readable, *, failing: bool = False) -> None:
        self.where = storage.where
        self._storage = storage
        self._failing = failing
        self._threads: set[int] = set()
        self._met = threading.Event()

    def size(self, name: str) -> int:
        return self._storage.size(name)

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        if start and sum(map(len, buffers)) >= BLOCK_BYTES:
            self._threads.add(threading.get_ident())
            if len(self._threads) > 1:
                self._met.set()
            if not self._met.wait(timeout=30.0):
                raise StorageError(f"{self.where}: one thread reads alone")
            if self._failing:
                raise StorageError(f"{self.where}/{name}: the disk is gone")
        return self._storage.read_into(name, start, *buffers)


@pytest.fixture(autouse=True)
def many_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (read_parts, reader):
        monkeypatch.setattr(module, "READ_PART_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(read_parts, "READ_STAGING_BYTES", 1 << 16)
    monkeypatch.setattr(read_pool, "spare_cores", lambda: 2)
    yield
    assert not [t.name for t in threading.enumerate() if "checkpoint-read" in t.name]


def step_in(directory: Path) -> DiskStorage:
    return write_step(directory, DRAFT, CONTENTS)


def filled() -> dict[str, torch.Tensor]:
    return {n: torch.zeros(s.shape, dtype=DTYPES[s.dtype]) for n, s in SPECS.items()}


def targets(tensors: dict[str, torch.Tensor]) -> list[LoadTarget]:
    return [LoadTarget(name, Span(0, tensor.numel()), tensor) for name, tensor in tensors.items()]


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def sources(*storages: Readable) -> Checkpoint:
    """A checkpoint of which every shard is in each of these storages, the best first."""
    manifest = open_step(storages[-1]).manifest
    ways = {r: [partial(open_shard, s, manifest, r) for s in storages] for r in range(3)}
    return Checkpoint(manifest, ways)


def test_every_element_arrives_whatever_the_parts(tmp_path: Path) -> None:
    checkpoint = open_step(step_in(tmp_path))
    tensors = filled()
    turned = torch.zeros(200_000, 2).t()
    part = torch.zeros(350_000, dtype=torch.bfloat16)
    checkpoint.load(
        [
            *targets(tensors),
            LoadTarget("w", Span(0, turned.numel()), turned),
            LoadTarget("half", Span(149_000, 499_000), part),
        ]
    )
    assert {name: as_bytes(t) for name, t in tensors.items()} == CONTENTS
    assert as_bytes(turned) == CONTENTS["w"][: turned.nbytes]
    assert as_bytes(part) == CONTENTS["half"][2 * 149_000 : 2 * 499_000]
    everything = sum(spec.nbytes for spec in SPECS.values())
    assert checkpoint.bytes_read == everything + turned.nbytes + part.nbytes


class Slow:
    """A storage that answers late; counts how many wait for it at the same time."""

    def __init__(self, storage: Readable) -> None:
        self.where, self.size = storage.where, storage.size
        self.most = self._now = 0
        self._storage = storage
        self._lock = threading.Lock()

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.03)
        with self._lock:
            self._now -= 1
        return self._storage.read_into(name, start, *buffers)


def test_more_threads_come_where_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_pool, "spare_cores", lambda: 1)
    slow, tensors = Slow(step_in(tmp_path)), filled()
    sources(slow).load(targets(tensors))
    assert {name: as_bytes(t) for name, t in tensors.items()} == CONTENTS
    assert 1 < slow.most <= read_pool.MAX_THREADS


def test_a_last_source_that_fails_is_not_tried_again_by_every_lane(tmp_path: Path) -> None:
    reads = []

    class Gone(Slow):
        def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
            if sum(map(len, buffers)) < BLOCK_BYTES:
                return super().read_into(name, start, *buffers)  # checksums and header
            reads.append(start)
            time.sleep(0.05)
            raise StorageError(f"{self.where}: nobody answers")

    checkpoint = sources(Gone(step_in(tmp_path)))
    with pytest.raises(StorageError, match="nobody answers"):
        checkpoint.load(targets(filled()))
    assert len(reads) <= read_pool.MAX_THREADS


@pytest.mark.parametrize(
    ("local_world_size", "ranks"), [("1", 1), ("2", 2), ("1000", 1000), ("", 1), ("x", 1)]
)
def test_the_cores_are_shared_by_the_node_s_ranks(
    monkeypatch: pytest.MonkeyPatch, local_world_size: str, ranks: int
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    assert read_pool.spare_cores() == max(1, len(os.sched_getaffinity(0)) // ranks)


def test_parts_of_one_shard_are_read_at_the_same_time(tmp_path: Path) -> None:
    checkpoint = sources(Meeting(step_in(tmp_path)))
    rows = torch.zeros(3, 200_000)
    checkpoint.load([LoadTarget("w", Span(0, rows.numel()), rows)])
    assert as_bytes(rows) == CONTENTS["w"][: rows.nbytes]


@pytest.mark.parametrize("rank", range(3))
def test_a_damaged_block_among_several_shards_ends_the_load_once(tmp_path: Path, rank: int) -> None:
    storage = step_in(tmp_path)
    name = DRAFT.file_name(rank)
    flip(storage.path / name, 2_000_000)
    start = 2_000_000 // BLOCK_BYTES * BLOCK_BYTES
    with pytest.raises(
        CheckpointDamaged, match=f"{name}: bytes {start} to {start + BLOCK_BYTES} are not"
    ) as it:
        open_step(storage).load(targets(filled()))
    assert it.value.__context__ is None


def test_a_damaged_block_comes_from_the_next_source(tmp_path: Path) -> None:
    bad, good = step_in(tmp_path / "bad"), step_in(tmp_path / "good")
    for rank, position in ((0, 2_000_000), (1, 100), (2, -1)):
        flip(bad.path / DRAFT.file_name(rank), position)
    tensors = filled()
    sources(bad, good).load(targets(tensors))
    assert {name: as_bytes(t) for name, t in tensors.items()} == CONTENTS


def test_threads_that_fail_at_once_give_up_one_source_together(tmp_path: Path) -> None:
    storage = step_in(tmp_path)
    tensors = filled()
    sources(Meeting(storage, failing=True), storage).load(targets(tensors))
    assert {name: as_bytes(t) for name, t in tensors.items()} == CONTENTS


def test_threads_that_fail_at_once_with_no_source_left_give_one_error(tmp_path: Path) -> None:
    storage = step_in(tmp_path)
    with pytest.raises(StorageError, match="the disk is gone"):
        sources(Meeting(storage, failing=True)).load(targets(filled()))
