"""From shared memory to storage: what an agent does to make a snapshot a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

from elasticzero.checkpoint import commit
from elasticzero.checkpoint.manifest import SUMS_SUFFIX, Manifest, snapshot_manifest_name
from elasticzero.checkpoint.snapshot import ShardName, SnapshotStore, mapped
from elasticzero.checkpoint.storage import Directory, Storage
from elasticzero.errors import CheckpointDamaged, StorageError

_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.5


def persist(
    store: SnapshotStore,
    shard: ShardName,
    directory: Directory,
    *,
    replacing: bool = False,
    await_seal: Callable[[], None] = lambda: None,
) -> int:
    """Copy a shard and its checksums from memory to storage; returns the bytes written.

    The shard may be copied while it is being sealed; `await_seal` returns once it is. Nothing to do
    (0) where the step stands already, unless that one is to be replaced. Raises `StorageError`, and
    `FileNotFoundError` where the snapshot is gone.
    """
    path = store.path(shard.generation, shard.step) / store.file_of(shard)
    with store.holding(path) as held:
        storage = commit.prepare(directory, shard.step)
        if not replacing and commit.stands(storage):
            await_seal()
            return 0
        size = held.stat().st_size
        storage.write(path.name, mapped(held), size=size)
    await_seal()
    storage.write(path.name + SUMS_SUFFIX, [path.with_name(path.name + SUMS_SUFFIX).read_bytes()])
    return size


def read_own(store: SnapshotStore, shard: ShardName) -> Manifest:
    """The manifest of one rank's sealed shard."""
    name = snapshot_manifest_name(shard.rank, shard.world_size)
    return commit.read_manifest(store.open(shard.generation, shard.step), name)


def await_commit(
    storage: Storage, token: str, give_up: Callable[[], str | None], *, wait_s: float
) -> None:
    """Wait until the step stands: by the save of this token, or by another that came first.

    Raises `StorageError` after `wait_s`, or with the reason of `give_up`.
    """
    deadline_s, poll_s = time.monotonic() + wait_s, _FIRST_POLL_S
    while not _stands(storage, token):
        reason = give_up()
        if reason is None and time.monotonic() >= deadline_s:
            reason = f"it was not committed within {wait_s:g} s after this node's part was written"
        if reason is not None:
            raise StorageError(f"{storage.where}: {reason}")
        time.sleep(poll_s)
        poll_s = min(poll_s * 1.5, _LAST_POLL_S)


def _stands(storage: Storage, token: str) -> bool:
    try:
        manifest = commit.read_manifest(storage)
    except CheckpointDamaged:
        return False
    return manifest.token == token or commit.stands(storage)
