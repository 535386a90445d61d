"""A save that is harmed at each of its calls into the operating system, one after another.

Whatever happened, a reader gets the old state or the new one, bit for bit, and so does who reads
the snapshots in memory, if the save went by way of them; and the next save works and clears away
what the harmed one left.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import pytest
import torch

from elasticzero.checkpoint.format.dtypes import torch_dtype
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import (
    MANIFEST_NAME,
    snapshot_manifest_name,
    step_directory,
)
from elasticzero.checkpoint.format.shards import open_shard, shard_specs
from elasticzero.checkpoint.io.writer import TensorPiece
from elasticzero.checkpoint.ram import slots
from elasticzero.checkpoint.ram.staging import SharedMemoryStager
from elasticzero.checkpoint.ram.store import HELD, HeldSnapshot, Seal, ShardName, SnapshotStore
from elasticzero.checkpoint.ram.transfer import persist
from elasticzero.checkpoint.steps import catalog, commit, verify
from elasticzero.checkpoint.steps.retention import COMMIT_S, RetentionPolicy, apply_retention
from elasticzero.checkpoint.storage.base import Readable
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.errors import ElasticZeroError, StorageError
from elasticzero.spans import Span
from tests.support.cases import slow
from tests.unit.checkpoint.cases import (
    cut,
    draft_of,
    elements,
    flip,
    simple_layout,
    write_ranks,
)
from tests.unit.checkpoint.disk_faults import Faults, Harm, Killed

pytestmark = pytest.mark.usefixtures("in_one_thread")
LAYOUT = simple_layout(world_size=2, numel=40)
HARMS = [harm for harm in get_args(Harm) if harm != "none"]
Way = Literal["straight", "by memory"]
LONGER: Way = "by memory"
"""The way with many more calls: `make test` kills at each of a first save's, `make slow` does the
rest."""
State = tuple[int, int]
"""A generation, and the step that it saved."""

WAYS_AND_HARMS = [(way, harm) for way in get_args(Way) for harm in HARMS]


def each(*rare: tuple[Way, Harm]) -> pytest.MarkDecorator:
    """Every way and harm, of which `make slow` plays these, those that last, and most of the longer
    way."""
    return pytest.mark.parametrize(
        ("way", "harm"),
        [
            slow(way, harm)
            if (way, harm) in rare
            or harm.endswith("for good")
            or (way == LONGER and harm != "kill")
            else (way, harm)
            for way, harm in WAYS_AND_HARMS
        ],
    )


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In memory, where fsync takes no time; and snapshots take no more of it than they need."""
    memory = Path("/dev/shm")
    monkeypatch.setattr(slots, "_GRAIN_BYTES", 4096)
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


def draft(step: int, generation: int) -> Manifest:
    token = f"g{generation:06d}-0123456789abcdef"
    return draft_of(LAYOUT, step=step, token=token, generation=generation)


def pieces(manifest: Manifest, rank: int) -> Iterator[TensorPiece]:
    contents = elements(LAYOUT.tensors, seed=manifest.generation)
    spans = LAYOUT.spans(rank)
    for name, spec in shard_specs(manifest, rank).items():
        data = bytearray(cut(contents[name], spec.dtype, spans[name]))
        yield TensorPiece(name, torch.frombuffer(data, dtype=torch_dtype(spec.dtype)))


class Node:
    """A node that has both ranks, and the checkpoint directory."""

    def __init__(self, root: Path, way: Way) -> None:
        self.path = root / "checkpoints"
        self.directory = DiskDirectory(self.path)
        self.memory = SnapshotStore(root / "memory")
        self.way = way

    def copy(self, root: Path) -> Node:
        """Another of the same contents, a file of several names included."""
        copies: dict[int, str] = {}

        def copy(source: str, target: str) -> None:
            inode = os.stat(source).st_ino
            if inode in copies:
                os.link(copies[inode], target)
            else:
                shutil.copy2(source, target)
            copies[inode] = target

        shutil.copytree(self.path.parent, root, copy_function=copy)
        return Node(root, self.way)

    def save(self, manifest: Manifest, *, replacing: bool = False, keep: int = 1) -> bool:
        """Both ranks' part, the commit and what follows; whether the step stands with our files."""
        return self._save(manifest, self.newest_whole(), replacing, keep)

    def _save(self, manifest: Manifest, needed: set[State], replacing: bool, keep: int) -> bool:
        try:
            if self.way == "by memory":
                self._capture(manifest, needed)
                saved = self._copy(manifest, replacing)
            else:
                saved = self._write(manifest, replacing)
        except ElasticZeroError:
            return False
        if saved:
            apply_retention(self.directory, manifest, RetentionPolicy(last=keep))
        return saved

    def save_harmed(
        self, faults: Faults, manifest: Manifest, *, replacing: bool = False, keep: int = 1
    ) -> bool:
        """The same; then what a power cut or the next agent leaves of this node's memory."""
        needed = self.newest_whole()
        saved = False
        try:
            with faults:
                saved = self._save(manifest, needed, replacing, keep)
        except Killed:
            pass
        if faults.harm == "power cut":
            shutil.rmtree(self.memory.root, ignore_errors=True)
        elif self.way == "by memory":
            self._assert_memory_holds(needed, _shards(manifest))
            held = self.memory.root / HELD
            if held.is_dir() and any(held.iterdir()):  # they keep slots until their agent ends
                self.memory.clear()
        return saved

    def newest_whole(self) -> set[State]:
        """The newest snapshot of which all shards stand in memory."""
        return set(_whole(self.memory.held())[-1:])

    def _write(self, manifest: Manifest, replacing: bool) -> bool:
        """As `elasticzero.checkpoint.save` does."""
        try:
            storage = commit.prepare(self.directory, manifest.step)
            write_ranks(storage, manifest, elements(LAYOUT.tensors, seed=manifest.generation))
            return commit.commit(storage, manifest, wait_s=0.0, replacing=replacing)
        except ElasticZeroError:
            commit.discard(self.directory, manifest, range(LAYOUT.world_size))
            raise

    def _capture(self, manifest: Manifest, needed: set[State]) -> None:
        """As the workers of a job do."""
        for rank in range(LAYOUT.world_size):
            writer = SharedMemoryStager(self.memory.root, rank)
            try:
                writer.write(manifest, rank, pieces(manifest, rank), needed)
            finally:
                writer.close()

    def _copy(self, manifest: Manifest, replacing: bool) -> bool:
        """As their agent does, which seals rank 0's shard before it is copied, rank 1's after."""
        shards = _shards(manifest)
        try:
            self._seal(shards[0])
            written = [
                persist(
                    self.memory,
                    shard,
                    self.directory,
                    partial(self._seal, shard),
                    replacing=replacing,
                )
                for shard in shards
            ]
            storage = self.directory.step(step_directory(manifest.step))
            committed = replace(written[0][0], files=())
            return commit.commit(storage, committed, wait_s=0.0, replacing=replacing)
        except OSError as error:  # an agent tells it like any other
            raise StorageError(str(error)) from error

    def _seal(self, shard: ShardName) -> Seal:
        try:
            return self.memory.seal(shard) or self.memory.read_seal(shard)
        except (ElasticZeroError, OSError):
            with suppress(OSError):
                self.memory.drop_draft(shard)
            raise

    def _assert_memory_holds(self, needed: set[State], new: list[ShardName]) -> None:
        """What was to stay stays; what is whole is right; and what was not sealed can be."""
        for sealing in (False, True):
            for shard in self.memory.drafts() if sealing else []:
                self.memory.seal(shard)
            held = self.memory.held()
            assert needed <= set(_whole(held)), held
            whole = {
                ShardName(s.generation, s.step, r, s.world_size) for s in held for r in s.ranks
            }
            assert all(self.memory.sealed(shard) == (shard in whole) for shard in new), held
            for snapshot in held:
                storage = self.memory.open(snapshot.generation, snapshot.step)
                for rank in snapshot.ranks:
                    name = snapshot_manifest_name(rank, snapshot.world_size)
                    manifest = catalog.read_manifest(storage, name)
                    assert manifest.generation == snapshot.generation
                    assert_shard(storage, manifest, rank)
        assert not self.memory.drafts()


def _whole(held: list[HeldSnapshot]) -> list[State]:
    return [(s.generation, s.step) for s in held if len(s.ranks) == LAYOUT.world_size]


def _shards(manifest: Manifest) -> list[ShardName]:
    world = LAYOUT.world_size
    return [ShardName(manifest.generation, manifest.step, rank, world) for rank in range(world)]


def assert_shard(storage: Readable, manifest: Manifest, rank: int) -> None:
    """A rank's shard is whole, and holds just what the manifest's generation saved."""
    contents = elements(LAYOUT.tensors, seed=manifest.generation)
    shard = open_shard(storage, manifest, rank)
    spans = LAYOUT.spans(rank)
    for name, spec in shard_specs(manifest, rank).items():
        read = bytearray(spec.nbytes)
        shard.read_into(name, Span(0, spec.numel), memoryview(read))
        assert read == cut(contents[name], spec.dtype, spans[name])


def assert_holds(storage: Readable, generation: int) -> None:
    """A step is whole, and holds just what that generation saved."""
    assert list(verify.find_corruption(storage)) == []
    manifest = catalog.read_manifest(storage)
    assert manifest.generation == generation
    for rank in range(LAYOUT.world_size):
        assert_shard(storage, manifest, rank)


def assert_next_save_works(node: Node) -> None:
    """And leaves nothing of the harmed one, once nothing can commit that any more."""
    for path in node.path.glob("*/*"):
        then_s = path.stat().st_mtime - COMMIT_S - 1
        os.utime(path, (then_s, then_s))
    assert node.save(draft(3, 9))
    assert_holds(catalog.resolve(node.path), 9)
    assert node.newest_whole() == ({(9, 3)} if node.way == "by memory" else set())
    files = node.directory.files()
    assert all(len(names) == 5 and MANIFEST_NAME in names for names in files.values()), files


def number_of_calls(node: Node, harm: Harm, *, replacing: bool) -> int:
    counting: Harm = "full" if harm.startswith("full") else "kill"
    faults = Faults(node.path, counting)
    assert node.save_harmed(faults, draft(2, 5), replacing=replacing)
    return len(faults.calls)


@each((LONGER, "kill"), ("straight", "error"))
def test_the_old_state_or_the_new_one(root: Path, way: Way, harm: Harm) -> None:
    before = Node(root / "before", way)
    assert before.save(draft(1, 4))
    calls = number_of_calls(before.copy(root / "count"), harm, replacing=False)
    assert calls > 25
    outcomes = set()
    for at in range(calls):
        node = before.copy(root / str(at))
        faults = Faults(node.path, harm, at)
        try:
            saved = node.save_harmed(faults, draft(2, 5))
            newest = catalog.newest_good(node.directory)
            outcomes.add(newest)
            assert newest == 2 or (newest == 1 and not saved)
            assert_holds(catalog.resolve(node.path), 4 if newest == 1 else 5)
            assert_next_save_works(node)
        except BaseException as error:
            error.add_note(f"{harm} at call {at}, {faults.calls[at]}, of {faults.calls}")
            raise
    assert outcomes == {1, 2}


@each((LONGER, "kill"), ("straight", "error"), ("straight", "power cut"))
def test_a_damaged_step_is_replaced_without_a_moment_with_less(
    root: Path, way: Way, harm: Harm
) -> None:
    """Step 1 is good; of step 2 a byte is wrong, which only who reads it knows."""
    damaged = Node(root / "damaged", way)
    assert damaged.save(draft(1, 3), keep=9)
    assert damaged.save(draft(2, 4), keep=9)
    step = damaged.path / step_directory(2)
    flip(step / draft(2, 4).file_name(0), -1)
    before = {path.name: path.read_bytes() for path in step.iterdir()}
    calls = number_of_calls(damaged.copy(root / "count"), harm, replacing=True)
    for at in range(calls):
        node = damaged.copy(root / str(at))
        faults = Faults(node.path, harm, at)
        try:
            node.save_harmed(faults, draft(2, 5), replacing=True, keep=9)
            storage = node.directory.step(step_directory(2))
            assert catalog.step_error_text(storage) is None
            if catalog.read_manifest(storage).generation == 5:
                assert_holds(storage, 5)
            else:
                assert {name: (storage.path / name).read_bytes() for name in before} == before
            assert_holds(node.directory.step(step_directory(1)), 3)
            assert_next_save_works(node)
        except BaseException as error:
            error.add_note(f"{harm} at call {at}, {faults.calls[at]}, of {faults.calls}")
            raise
