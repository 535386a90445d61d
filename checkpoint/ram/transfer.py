"""Copies shards of snapshots: from this node's memory to storage, and from another node's memory to
this node's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from elasticzero.checkpoint.format.checksums import SUMS_LIMIT_BYTES, BlockReader
from elasticzero.checkpoint.format.manifest import Manifest, ShardFile, from_json, to_json
from elasticzero.checkpoint.format.names import (
    SUMS_SUFFIX,
    snapshot_manifest_name,
    step_directory,
    token_of_file,
)
from elasticzero.checkpoint.ram.slots import Slots
from elasticzero.checkpoint.ram.store import Seal, ShardName, SnapshotStore
from elasticzero.checkpoint.steps import catalog, commit
from elasticzero.checkpoint.steps.loose_files import written_anew
from elasticzero.checkpoint.storage.base import Directory, Readable, Storage, read_small
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.errors import CheckpointDamaged, StorageError

_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.5
_PART_BYTES = 16 << 20
"""Number of bytes pulled from another node at a time."""
_SMALL_PART_BYTES = 4 << 20
"""The same over a slow network."""


def persist(
    store: SnapshotStore,
    shard: ShardName,
    directory: Directory,
    seal: Callable[[], Seal],
    *,
    replacing: bool = False,
    again: bool = False,
) -> tuple[Manifest, int]:
    """Copies a shard and its checksums from memory to storage.

    Args:
        store: The node's memory.
        shard: The shard to copy.
        directory: The checkpoint directory.
        seal: Returns the shard's seal, and waits for it if necessary. The shard is copied
            meanwhile, and its snapshot may be removed once the copy has begun.
        replacing: The committed step is replaced.
        again: An earlier copy may exist, and is then not repeated.

    Returns:
        The rank's own manifest, and the number of bytes written, which is 0 if the step is
            committed already and not replaced.

    Raises:
        StorageError: Storage cannot be written.
        FileNotFoundError: The snapshot is gone.
    """
    name = store.file_of(shard)
    where = f"the manifest of rank {shard.rank} in {store.path(shard.generation, shard.step)}"
    if again and not replacing:
        sealed = seal()
        manifest = from_json(sealed.manifest, where)
        written = directory.step(step_directory(shard.step))
        if _is_there(written, manifest.files[shard.rank], sealed):
            return manifest, 0
    with ExitStack() as stack:
        with store.holding(shard, name) as held:
            storage = commit.prepare(directory, shard.step)
            size = len(held.data) if replacing or not commit.is_good(storage) else 0
            if size and again and not replacing:
                # The copy is incomplete, and there may be no room for two. Another node that holds
                # the shard too may have tried the save again meanwhile.
                files = (name, name + SUMS_SUFFIX)
                stack.enter_context(written_anew(storage, token_of_file(name) or "", files))
            if size:
                parts = held.parts(sealed=store.sealed(shard))
                storage.write(name, parts, size=size, cached=False)
        sealed = seal()
        if size:
            storage.write(name + SUMS_SUFFIX, [sealed.sums])
    return from_json(sealed.manifest, where), size


def _is_there(storage: Storage, file: ShardFile, seal: Seal) -> bool:
    """Returns whether storage holds exactly this shard, whole: its checksum file is written
    last.

    Args:
        storage: The step's files in the checkpoint directory.
        file: Name and size of the shard's file.
        seal: Seal of the shard, with its checksum file.
    """
    name = file.name + SUMS_SUFFIX
    try:
        return storage.size(file.name) == file.bytes and (
            read_small(storage, name, SUMS_LIMIT_BYTES) == seal.sums
        )
    except FileNotFoundError:
        return False


def await_commit(
    storage: Storage, token: str, give_up: Callable[[], str | None], *, wait_s: float
) -> None:
    """Waits until the step is committed, by the save of this token or by an earlier one.

    Args:
        storage: The step's files.
        token: The token of the save.
        give_up: Is called repeatedly; a reason that it returns ends the wait.
        wait_s: Time limit in seconds.

    Raises:
        StorageError: The step was not committed in time, or `give_up` returned a reason.
    """
    deadline_s, poll_s = time.monotonic() + wait_s, _FIRST_POLL_S
    while not _is_committed(storage, token):
        reason = give_up()
        if reason is None and time.monotonic() >= deadline_s:
            reason = f"it was not committed within {wait_s:g} s after this node's part was written"
        if reason is not None:
            raise StorageError(f"{storage.where}: {reason}")
        time.sleep(poll_s)
        poll_s = min(poll_s * 1.5, _LAST_POLL_S)


def _is_committed(storage: Storage, token: str) -> bool:
    try:
        manifest = catalog.read_manifest(storage)
    except CheckpointDamaged:
        return False
    return manifest.token == token or commit.is_good(storage)


def pull(
    source: Readable,
    store: SnapshotStore,
    slots: Slots,
    shard: ShardName,
    cancelled: Callable[[], bool] = lambda: False,
) -> bool:
    """Copies a sealed shard from another node and verifies each block.

    The copy stays invisible until it is complete, because the manifest is written last.

    Args:
        source: The files of the snapshot on the other node.
        store: This node's memory.
        slots: The slots that the copy may use.
        shard: The shard to copy.
        cancelled: Returns whether the copy is to end before it is complete.

    Returns:
        Whether the copy is complete; False if `cancelled` ended it.

    Raises:
        FileNotFoundError: The owner has not sealed the shard, or not yet.
        StorageError: The other node cannot be reached, or this one cannot write.
        CheckpointDamaged: A block is not what its owner has sealed.
    """
    sealed = SealedShard.read(source, shard)
    name, file = snapshot_manifest_name(shard.rank, shard.world_size), sealed.file
    blocks = BlockReader(source, file)
    slot = slots.take(file.bytes)
    memory = slot.view()
    for start in range(0, file.bytes, _PART_BYTES):
        if cancelled():
            return False
        blocks.read_into(start, memory[start : start + _PART_BYTES])
    storage = store.open(shard.generation, shard.step, slot.root)
    storage.path.mkdir(parents=True, exist_ok=True)
    slot.link(storage.path / file.name)
    storage.write(file.name + SUMS_SUFFIX, [sealed.sums])
    storage.write(name, [sealed.text])
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedShard:
    """Holds what another node has sealed of a shard, but its bytes."""

    source: Readable
    name: ShardName
    text: bytes
    """The shard's manifest, as it is stored."""
    manifest: Manifest
    file: ShardFile
    sums: bytes
    """The shard's checksum file."""

    @classmethod
    def read(cls, source: Readable, shard: ShardName) -> SealedShard:
        """Reads it.

        Args:
            source: The files of the snapshot on the other node.
            shard: The shard.

        Raises:
            FileNotFoundError: The owner has not sealed the shard, or not yet.
            StorageError: The other node cannot be reached.
            CheckpointDamaged: The manifest is none of this shard.
        """
        name = snapshot_manifest_name(shard.rank, shard.world_size)
        text = read_small(source, name, catalog.MANIFEST_LIMIT_BYTES)
        manifest = from_json(text, f"{source.where}/{name}")
        is_of = manifest.generation, manifest.step, manifest.layout.world_size
        if is_of != (shard.generation, shard.step, shard.world_size):
            raise CheckpointDamaged(
                f"{source.where}/{name} is step {manifest.step} of generation {manifest.generation}"
            )
        file = manifest.files[shard.rank]
        sums = read_small(source, file.name + SUMS_SUFFIX, SUMS_LIMIT_BYTES)
        return cls(source=source, name=shard, text=text, manifest=manifest, file=file, sums=sums)


def copy_shards(
    shards: Sequence[SealedShard], storage: DiskStorage, check: Callable[[], None]
) -> None:
    """Copies shards of another job into plain files of this node's memory, and verifies each block.

    Args:
        shards: The shards.
        storage: Where they go: the snapshot's place among those of generation 0.
        check: Is called for each part; what it raises ends the copy.

    Raises:
        FileNotFoundError: A shard is not there any more.
        StorageError: One cannot be read, or there is no memory.
        CheckpointDamaged: A block is not what its owner has sealed.
    """
    storage.path.mkdir(parents=True, exist_ok=True)
    for shard in shards:
        file = shard.file
        storage.write(file.name, _parts(shard, check), size=file.bytes)
        storage.write(file.name + SUMS_SUFFIX, [shard.sums])
        name = snapshot_manifest_name(shard.name.rank, shard.name.world_size)
        storage.write(name, [to_json(replace(shard.manifest, generation=0))])


def _parts(shard: SealedShard, check: Callable[[], None]) -> Iterator[memoryview]:
    blocks, buffer = BlockReader(shard.source, shard.file), memoryview(bytearray(_SMALL_PART_BYTES))
    for start in range(0, shard.file.bytes, len(buffer)):
        check()
        part = buffer[: min(len(buffer), shard.file.bytes - start)]
        blocks.read_into(start, part)
        yield part
