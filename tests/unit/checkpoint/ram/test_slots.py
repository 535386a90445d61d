"""Captures into slots of shared memory, their seals, replicas, and what becomes of them."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import snapshot_manifest_name
from elasticzero.checkpoint.io.reader import open_snapshot
from elasticzero.checkpoint.io.writer import TensorPiece
from elasticzero.checkpoint.ram import device_image
from elasticzero.checkpoint.ram.slots import SLOTS, Slots
from elasticzero.checkpoint.ram.staging import SharedMemoryStager, StagedShard, StagingOptions
from elasticzero.checkpoint.ram.store import Seal, ShardName, SnapshotStore
from elasticzero.checkpoint.ram.transfer import await_commit, persist, pull
from elasticzero.checkpoint.steps import catalog, commit, verify
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import CheckpointDamaged, StorageError
from elasticzero.spans import Span

NAMES = ("a", "b", "flag")
TENSORS = {
    "a": torch.arange(600_000, dtype=torch.float64),
    "b": torch.randn(3, 7).bfloat16(),
    "flag": torch.tensor([True, False, True]),
}


def draft(step: int, world_size: int = 1, generation: int = 1) -> Manifest:
    specs = {
        "a": TensorSpec("F64", (600_000,)),
        "b": TensorSpec("BF16", (3, 7)),
        "flag": TensorSpec("BOOL", (3,)),
    }
    layout = Layout(world_size=world_size, tensors=specs, groups=(Group("even", NAMES),))
    token = f"g{generation:06d}-x"
    return Manifest(
        step=step, generation=generation, token=token, strategy="zero2", layout=layout, state={}
    )


def pieces(of: Manifest, rank: int = 0) -> list[TensorPiece]:
    flat = {name: tensor.reshape(-1) for name, tensor in TENSORS.items()}
    return [
        TensorPiece(name, flat[name][span.start : span.stop])
        for name, span in of.layout.spans(rank).items()
    ]


def captured(
    writer: SharedMemoryStager, step: int, keep: set[tuple[int, int]] | None = None
) -> ShardName:
    manifest = draft(step)
    writer.write(manifest, 0, pieces(manifest), keep or set())
    return ShardName(1, step, 0, 1)


def read(store: SnapshotStore, step: int, name: str = "a") -> torch.Tensor:
    out = torch.empty_like(TENSORS[name])
    snapshot = open_snapshot({0: [store.open(1, step)]}, 1, step)
    snapshot.read(name, Span(0, out.numel()), out)
    return out


def read_draft(store: SnapshotStore, step: int) -> torch.Tensor:
    store.seal(ShardName(1, step, 0, 1))
    return read(store, step)


def test_a_capture_counts_once_it_is_sealed(tmp_path: Path) -> None:
    store, writer = SnapshotStore(tmp_path), SharedMemoryStager(tmp_path, 0)
    shard = captured(writer, 5)
    assert store.held() == [] and store.drafts() == [shard]
    store.seal(shard)
    store.seal(shard)
    assert [(h.step, h.ranks) for h in store.held()] == [(5, (0,))] and store.drafts() == []
    for name, tensor in TENSORS.items():
        assert torch.equal(read(store, 5, name), tensor)


def test_what_is_captured_is_the_state_at_the_call(tmp_path: Path) -> None:
    store, writer = SnapshotStore(tmp_path), SharedMemoryStager(tmp_path, 0)
    state = TENSORS["a"].clone()
    manifest = draft(5)
    current_pieces = [TensorPiece("a", state), *pieces(manifest)[1:]]
    writer.write(manifest, 0, current_pieces, set())
    state.zero_()
    store.seal(ShardName(1, 5, 0, 1))
    assert torch.equal(read(store, 5), TENSORS["a"])


def begun_beside(
    writer: SharedMemoryStager, step: int, monkeypatch: pytest.MonkeyPatch, room: int = 1 << 30
) -> StagedShard:
    """A capture where a device has so much room; the state changes right after it."""
    monkeypatch.setattr(device_image, "room", lambda device, image_bytes: room)
    manifest = draft(step)
    copies = [replace(piece, data=piece.data.clone()) for piece in pieces(manifest)]
    staged = writer.begin(manifest, 0, copies, set(), StagingOptions(beside=True))
    for piece in copies:
        piece.data.zero_()
    return staged


def test_a_capture_beside_training_counts_once_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writer = SnapshotStore(tmp_path), SharedMemoryStager(tmp_path, 0)
    store.seal(captured(writer, 4))
    staged = begun_beside(writer, 5, monkeypatch)
    assert staged.finish is not None
    assert store.drafts() == [] and store.held() == []
    thread = threading.Thread(target=staged.finish)
    thread.start()
    thread.join()
    assert torch.equal(read_draft(store, 5), TENSORS["a"])


def test_a_device_without_room_has_its_tensors_copied_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writer = SnapshotStore(tmp_path), SharedMemoryStager(tmp_path, 0)
    size = sum(tensor.nbytes for tensor in TENSORS.values())
    staged = begun_beside(writer, 5, monkeypatch, room=size - 1)
    assert staged.finish is None
    assert torch.equal(read_draft(store, 5), TENSORS["a"])
    assert begun_beside(writer, 6, monkeypatch, room=size).finish is not None


def test_a_capture_beside_training_gives_way_to_a_newer_one_of_another_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writer = SnapshotStore(tmp_path), SharedMemoryStager(tmp_path, 0)
    staged = begun_beside(writer, 5, monkeypatch)
    store.seal(captured(SharedMemoryStager(tmp_path, 1), 6))
    assert staged.finish is not None
    staged.finish()
    assert store.drafts() == [] and [h.step for h in store.held()] == [6]
    store.seal(captured(writer, 7, {(1, 6)}))
    assert torch.equal(read(store, 7), TENSORS["a"])


def test_a_capture_that_cannot_be_finished_leaves_its_slot_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another state of its step must stay."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    store, writer = SnapshotStore(tmp_path), SharedMemoryStager(tmp_path, 0)
    staged = begun_beside(writer, 5, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(SnapshotStore, "finish_draft", fail)
        assert staged.finish is not None
        with pytest.raises(StorageError, match="no room"):
            staged.finish()
    for step in (6, 7):
        store.seal(captured(writer, step, {(1, 5), (1, step - 1)}))


def test_a_capture_that_is_never_finished_leaves_its_slot_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writer = SnapshotStore(tmp_path), SharedMemoryStager(tmp_path, 0)
    for step in range(5):
        begun_beside(writer, step, monkeypatch)
    store.seal(captured(writer, 6))
    assert torch.equal(read(store, 6), TENSORS["a"])
    assert len(list((tmp_path / SLOTS).iterdir())) == 1


def test_two_slots_serve_any_number_of_captures(tmp_path: Path) -> None:
    """A capture that must stay is not overwritten."""
    store, writer = SnapshotStore(tmp_path), SharedMemoryStager(tmp_path, 0)
    store.seal(captured(writer, 1))
    for step in range(2, 20):
        store.seal(captured(writer, step, {(1, step - 1)}))
        assert [h.step for h in store.held()] == [step - 1, step]
        assert torch.equal(read(store, step - 1), TENSORS["a"])
    assert len(list((tmp_path / SLOTS).iterdir())) == 2


def test_with_both_slots_kept_there_is_no_third_but_for_a_stop(tmp_path: Path) -> None:
    store, writer = SnapshotStore(tmp_path), SharedMemoryStager(tmp_path, 0)
    captured(writer, 1)
    captured(writer, 2, {(1, 1)})
    with pytest.raises(StorageError, match="both slots of worker-0"):
        captured(writer, 3, {(1, 1), (1, 2)})
    assert len(list((tmp_path / SLOTS).iterdir())) == 2
    manifest = draft(3)
    writer.write(manifest, 0, pieces(manifest), {(1, 1), (1, 2)}, extra=True)
    assert len(list((tmp_path / SLOTS).iterdir())) == 3
    assert torch.equal(read_draft(store, 3), TENSORS["a"])
    captured(SharedMemoryStager(tmp_path, 0), 4, {(1, 2)})
    assert len(list((tmp_path / SLOTS).iterdir())) == 2


def test_a_state_that_is_here_whole_takes_one_slot_if_the_other_is_needed(tmp_path: Path) -> None:
    """A part of it was captured, and at the same step all of it, as the last of a generation."""
    store, writer = SnapshotStore(tmp_path), SharedMemoryStager(tmp_path, 0)
    part, whole = draft(1, world_size=2), draft(1)
    for manifest in (part, whole):
        writer.write(manifest, 0, pieces(manifest), set(), extra=manifest is whole)
    for shard in store.drafts():
        store.seal(shard)
    after = SharedMemoryStager(tmp_path, 0)
    following = draft(2, generation=2)
    after.write(following, 0, pieces(following), {(1, 1)})
    assert not store.has(ShardName(1, 1, 0, 2)) and store.has(ShardName(1, 1, 0, 1))
    assert torch.equal(read(store, 1), TENSORS["a"])


def test_a_slot_is_not_written_while_somebody_reads_it(tmp_path: Path) -> None:
    store, writer = SnapshotStore(tmp_path), SharedMemoryStager(tmp_path, 0)
    shard = captured(writer, 1)
    with store.holding(shard, draft(1).file_name(0)) as held:
        before = b"".join(map(bytes, held.parts(sealed=False)))
        captured(writer, 2)
        with pytest.raises(StorageError, match="in use"):
            captured(writer, 3, {(1, 2)})
        assert b"".join(map(bytes, held.parts(sealed=True))) == before
    captured(writer, 3, {(1, 2)})
    assert not store.has(shard)


def test_a_capture_cut_short_at_any_call_leaves_what_was_held(tmp_path: Path) -> None:
    """The writer dies before its draft stands: nobody takes the shard for whole."""
    store, writer = SnapshotStore(tmp_path), SharedMemoryStager(tmp_path, 0)
    store.seal(captured(writer, 1))
    captured(writer, 2, {(1, 1)})
    store.drop_draft(ShardName(1, 2, 0, 1))
    assert [h.step for h in store.held()] == [1] and store.drafts() == []
    store.seal(captured(SharedMemoryStager(tmp_path, 0), 3, {(1, 1)}))
    assert [h.step for h in store.held()] == [1, 3]


def test_another_run_s_snapshot_of_the_same_number_is_not_taken(
    tmp_path: Path,
) -> None:
    store = SnapshotStore(tmp_path)
    store.seal(captured(SharedMemoryStager(tmp_path, 0), 5))
    manifest = replace(draft(5), token="g000001-y")
    SharedMemoryStager(tmp_path, 1).write(manifest, 0, pieces(manifest), set())
    assert store.held() == []
    store.seal(ShardName(1, 5, 0, 1))
    name = snapshot_manifest_name(0, 1)
    assert catalog.read_manifest(store.open(1, 5), name).token == "g000001-y"
    assert torch.equal(read(store, 5), TENSORS["a"])


def test_memory_that_cannot_be_had_is_an_error_and_no_signal(tmp_path: Path) -> None:
    slots = Slots(tmp_path, "worker-0")
    with pytest.raises(StorageError, match=r"cannot allocate .* MiB for a snapshot"):
        slots.take(1 << 60)
    assert slots.take(1000).bytes == 1000


def test_a_slot_that_could_not_grow_has_no_hole(tmp_path: Path) -> None:
    """Writing into a hole of a full tmpfs would be a bus error."""
    slots = Slots(tmp_path, "worker-0")
    slot = slots.take(1000)
    blocks = os.stat(slot.path).st_blocks
    with pytest.MonkeyPatch.context() as patched:

        def full(*_: int) -> None:
            raise OSError(28, "No space left on device")

        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(StorageError, match="No space left"):
            slots.take(500_000)
    assert slot.bytes == 1000 and os.stat(slot.path).st_blocks <= max(blocks, 4096)


def test_ranks_of_one_node_do_not_take_each_other_s_third_slot(tmp_path: Path) -> None:
    for step in range(1, 12):
        shards = [ShardName(1, step, rank, 2) for rank in range(2)]

        def stop(local_rank: int, step: int = step) -> None:
            writer = SharedMemoryStager(tmp_path, local_rank)
            manifest = draft(step, world_size=2)
            writer.write(manifest, local_rank, pieces(manifest, local_rank), {(1, 1)}, extra=True)

        threads = [threading.Thread(target=stop, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store = SnapshotStore(tmp_path)
        assert store.drafts()[-2:] == shards
        for shard in shards:
            store.seal(shard)


def test_a_replica_is_seen_only_when_all_of_it_is_here(tmp_path: Path) -> None:
    owner, buddy = SnapshotStore(tmp_path / "owner"), SnapshotStore(tmp_path / "buddy")
    shard = captured(SharedMemoryStager(owner.root, 0), 5)
    slots = Slots(buddy.root, "replica-0")
    with pytest.raises(FileNotFoundError):
        pull(owner.open(1, 5), buddy, slots, shard)
    owner.seal(shard)
    assert not pull(owner.open(1, 5), buddy, slots, shard, cancelled=lambda: True)
    assert buddy.held() == [] and not buddy.has(shard)
    assert pull(owner.open(1, 5), buddy, slots, shard)
    assert torch.equal(read(buddy, 5), TENSORS["a"])
    owner.clear()
    assert torch.equal(read(buddy, 5, "b"), TENSORS["b"])


def test_a_replica_of_damaged_memory_is_refused(tmp_path: Path) -> None:
    owner, buddy = SnapshotStore(tmp_path / "owner"), SnapshotStore(tmp_path / "buddy")
    shard = captured(SharedMemoryStager(owner.root, 0), 5)
    owner.seal(shard)
    path = owner.path(1, 5) / draft(5).file_name(0)
    with path.open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"\xff\xfe")
    with pytest.raises(CheckpointDamaged, match=r"bytes \d+ to 2097152 are not"):
        pull(owner.open(1, 5), buddy, Slots(buddy.root, "replica-0"), shard)
    assert buddy.held() == []


def test_snapshots_of_two_nodes_become_one_checkpoint(tmp_path: Path) -> None:
    directory = open_directory(tmp_path / "checkpoints")
    stores = [SnapshotStore(tmp_path / str(rank)) for rank in range(2)]
    shards = [ShardName(1, 5, rank, 2) for rank in range(2)]
    manifest = draft(5, world_size=2)
    for rank, store in enumerate(stores):
        SharedMemoryStager(store.root, 0).write(manifest, rank, pieces(manifest, rank), set())
        seal = store.seal(shards[rank])
        assert seal is not None and seal == store.read_seal(shards[rank])

        def late(seal: Seal = seal, store: SnapshotStore = store) -> Seal:
            store.clear()  # the snapshot goes while it is being copied
            return seal

        _, size = persist(store, shards[rank], directory, late)
        assert size > 0
    storage = directory.step("step-000000000005")
    assert catalog.steps(directory) == []
    waiter = threading.Thread(
        target=await_commit, args=(storage, manifest.token, lambda: None), kwargs={"wait_s": 20.0}
    )
    waiter.start()
    assert commit.commit(storage, manifest, wait_s=1.0)
    waiter.join(20.0)
    assert not waiter.is_alive() and not list(verify.find_corruption(storage))
    again = SharedMemoryStager(stores[0].root, 0)
    again.write(manifest, 0, pieces(manifest), set())
    stores[0].seal(shards[0])
    persisted, size = persist(
        stores[0], shards[0], directory, lambda: stores[0].read_seal(shards[0])
    )
    assert size == 0 and persisted.files[0] == catalog.read_manifest(storage).files[0]


def test_a_wait_for_a_commit_ends_with_the_reason_to_give_up(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)
    with pytest.raises(StorageError, match="another node could not write"):
        await_commit(storage, "t", lambda: "another node could not write", wait_s=60.0)
    with pytest.raises(StorageError, match="not committed within 0 s"):
        await_commit(storage, "t", lambda: None, wait_s=0.0)


def test_only_a_snapshot_s_own_files_are_served(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    shard = captured(SharedMemoryStager(tmp_path, 0), 5)
    store.seal(shard)
    with store.open_file(1, 5, snapshot_manifest_name(0, 1)) as file:
        assert os.fstat(file.fileno()).st_size > 0
    for name in ("../slots/worker-0-0", "draft-rank-00000-of-00001.json", "owner"):
        with pytest.raises(FileNotFoundError):
            store.open_file(1, 5, name)


def with_frozen(of: Manifest, value: torch.Tensor) -> list[TensorPiece]:
    return [
        TensorPiece("a", value.reshape(-1), frozen=True) if piece.name == "a" else piece
        for piece in pieces(of)
    ]


def test_what_training_does_not_change_is_copied_once_into_each_slot(tmp_path: Path) -> None:
    """Further captures leave what the test writes into the slots, until the values change, in
    whatever way a script changes them."""
    store, writer = SnapshotStore(tmp_path), SharedMemoryStager(tmp_path, 0)
    value = TENSORS["a"].clone()

    def capture(step: int) -> torch.Tensor:
        writer.write(draft(step), 0, with_frozen(draft(step), value), {(1, step - 1)})
        return read_draft(store, step)

    for step in (1, 2):
        assert torch.equal(capture(step), value)
    marked = value + 1
    for slot in (tmp_path / "slots").iterdir():
        data = slot.read_bytes()
        at = data.index(value.numpy().tobytes())
        with slot.open("r+b") as file:
            file.seek(at)
            file.write(marked.numpy().tobytes())
    for step in (3, 4):
        assert torch.equal(capture(step), marked)
    value[7] = -1  # one element, which torch counts
    for step in (5, 6):
        assert torch.equal(capture(step), value)
    value.data[1000:1128] = -2  # 1 KiB, which it does not
    for step in (7, 8):
        assert torch.equal(capture(step), value)
    value.data = value + 3
    for step in (9, 10):
        assert torch.equal(capture(step), value)


def test_another_layout_is_copied_whole(tmp_path: Path) -> None:
    """A larger world, or a longer header, has the same bytes at another place of the file."""
    store, writer = SnapshotStore(tmp_path), SharedMemoryStager(tmp_path, 0)
    for step, world_size in ((1, 1), (2, 2), (3, 1), (4, 2), (10**9, 1), (10**9 + 1, 1)):
        of = draft(step, world_size=world_size)
        frozen = [TensorPiece(piece.name, piece.data, frozen=True) for piece in pieces(of)]
        writer.write(of, 0, frozen, set())
        store.seal(ShardName(1, step, 0, world_size))
        for piece in frozen:
            shard = store.path_of(ShardName(1, step, 0, world_size)) / of.file_name(0)
            held = load_file(shard)[piece.name].reshape(-1)
            assert torch.equal(held, piece.data), (step, piece.name)
