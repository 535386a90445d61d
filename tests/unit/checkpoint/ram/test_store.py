"""The RAM tier: what a node holds, and what it hands out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elasticzero.checkpoint.format.manifest import Manifest, ShardFile, to_json
from elasticzero.checkpoint.format.names import snapshot_manifest_name
from elasticzero.checkpoint.format.shards import shard_specs, write_shard
from elasticzero.checkpoint.ram.store import HeldSnapshot, SnapshotStore
from elasticzero.checkpoint.storage.disk import DiskStorage
from tests.unit.checkpoint.cases import cut, draft_of, elements, simple_layout

LAYOUT = simple_layout(world_size=3, numel=100)
CONTENTS = elements(LAYOUT.tensors)


def hold(store: SnapshotStore, rank: int, draft: Manifest) -> DiskStorage:
    """One rank's part of a snapshot, written as the writer does but without tensors."""
    path = store.path(draft.generation, draft.step)
    path.mkdir(parents=True, exist_ok=True)
    storage = DiskStorage(path, durable=False)
    held = draft.layout.spans(rank)
    specs = shard_specs(draft, rank)
    chunks = [cut(CONTENTS[name], spec.dtype, held[name]) for name, spec in specs.items()]
    written = write_shard(storage, draft, rank, chunks)
    world = draft.layout.world_size
    files = tuple(
        written if r == rank else ShardFile(draft.file_name(r), 0, None) for r in range(world)
    )
    storage.write(snapshot_manifest_name(rank, world), [to_json(replace(draft, files=files))])
    return storage


def snapshot(generation: int, step: int) -> Manifest:
    return draft_of(LAYOUT, generation=generation, step=step)


def held(generation: int, step: int, *ranks: int) -> HeldSnapshot:
    return HeldSnapshot(generation=generation, step=step, ranks=ranks, world_size=3)


def test_what_stands_whole_is_held(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    assert store.held() == []
    hold(store, 2, snapshot(4, 20))
    hold(store, 0, snapshot(4, 20))
    hold(store, 1, snapshot(10, 5))
    assert store.held() == [held(4, 20, 0, 2), held(10, 5, 1)]


@pytest.mark.parametrize("name", ["rank", "sums", "cut", "manifest", "gone"])
def test_what_is_not_whole_is_not_held(tmp_path: Path, name: str) -> None:
    store, draft = SnapshotStore(tmp_path), snapshot(1, 1)
    hold(store, 0, draft)
    storage = hold(store, 1, draft)
    file = draft.file_name(1)
    manifest = snapshot_manifest_name(1, 3)
    if name == "rank":
        storage.remove(file)
    elif name == "sums":
        storage.remove(f"{file}.sums")
    elif name == "cut":
        (storage.path / file).write_bytes(b"")
    elif name == "manifest":
        (storage.path / manifest).write_bytes(b"{")
    else:
        storage.remove(manifest)
    assert store.held() == [held(1, 1, 0)]


def test_other_things_in_the_root_are_left_alone(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    hold(store, 0, snapshot(1, 1))
    (tmp_path / "gen-x").mkdir()
    (tmp_path / "gen-1" / "other").mkdir()
    (tmp_path / "notes").write_bytes(b"")
    assert store.held() == [held(1, 1, 0)]
    store.clear()
    assert store.held() == []
    assert {p.name for p in tmp_path.iterdir()} == {"gen-x", "notes"}


def test_all_but_one_are_dropped(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    for generation, step in ((1, 1), (2, 1), (2, 2), (3, 2)):
        hold(store, 0, snapshot(generation, step))
    store.keep_only({(2, 2)})
    assert store.held() == [held(2, 2, 0)]
    store.keep_only({(0, 0)})
    assert store.held() == []


def test_files_are_handed_out(tmp_path: Path) -> None:
    store, draft = SnapshotStore(tmp_path), snapshot(1, 7)
    storage = hold(store, 0, draft)
    for name in storage.names():
        with store.open_file(1, 7, name) as file:
            assert file.read() == (storage.path / name).read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../../secret",
        "/etc/passwd",
        "secret",
        "rank-00000-of-00003-../../secret.safetensors",
        "rank-00001-of-00003-token.safetensors",
        "manifest.json",
        "manifest-rank-00000-of-00003.json/..",
        "rank-00000-of-00003-token.safetensors\n",
        "rank-00000-of-00003-token\0.safetensors",
        "manifest-rank-00002-of-00003.json",
    ],
)
def test_nothing_else_is_handed_out(tmp_path: Path, name: str) -> None:
    store = SnapshotStore(tmp_path / "root")
    storage = hold(store, 0, snapshot(1, 7))
    (tmp_path / "secret").write_bytes(b"")
    (storage.path / "secret").write_bytes(b"")
    link = storage.path / "manifest-rank-00002-of-00003.json"
    link.symlink_to(tmp_path / "secret")
    with pytest.raises(FileNotFoundError):
        store.open_file(1, 7, name)


def test_a_snapshot_that_is_not_here(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    name = snapshot_manifest_name(0, 3)
    for generation, step in ((1, 7), (-1, 7), (1, -7)):
        with pytest.raises(FileNotFoundError):
            store.open_file(generation, step, name)
