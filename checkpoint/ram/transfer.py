"""A replica: another node's shard, pulled into this node's shared memory."""

from __future__ import annotations

from collections.abc import Callable

from elasticzero.checkpoint.format.checksums import SUMS_LIMIT_BYTES, BlockReader
from elasticzero.checkpoint.format.manifest import from_json
from elasticzero.checkpoint.format.names import SUMS_SUFFIX, snapshot_manifest_name
from elasticzero.checkpoint.ram.slots import Slots
from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.checkpoint.steps.catalog import MANIFEST_LIMIT_BYTES
from elasticzero.checkpoint.storage.base import Readable, read_small
from elasticzero.errors import CheckpointDamaged

_PART_BYTES = 16 << 20


def pull(
    source: Readable,
    store: SnapshotStore,
    slots: Slots,
    shard: ShardName,
    over: Callable[[], bool] = lambda: False,
) -> bool:
    """Copy a sealed shard from another node, each block verified as it comes; False if it was
    given up because `over()`.

    What has come stays out of sight until all of it is here: the manifest is written last. Raises
    `FileNotFoundError` when the owner has not sealed it (yet), else `StorageError` or
    `CheckpointDamaged`.
    """
    name = snapshot_manifest_name(shard.rank, shard.world_size)
    text = read_small(source, name, MANIFEST_LIMIT_BYTES)
    manifest = from_json(text, f"{source.where}/{name}")
    if (manifest.generation, manifest.step) != (shard.generation, shard.step):
        raise CheckpointDamaged(
            f"{source.where}/{name} is step {manifest.step} of generation {manifest.generation}"
        )
    file = manifest.files[shard.rank]
    sums = read_small(source, file.name + SUMS_SUFFIX, SUMS_LIMIT_BYTES)
    blocks = BlockReader(source, file)
    slot = slots.take(file.bytes)
    memory = slot.view()
    for start in range(0, file.bytes, _PART_BYTES):
        if over():
            return False
        blocks.read_into(start, memory[start : start + _PART_BYTES])
    storage = store.open(shard.generation, shard.step, slot.root)
    storage.path.mkdir(parents=True, exist_ok=True)
    slot.link(storage.path / file.name)
    storage.write(file.name + SUMS_SUFFIX, [sums])
    storage.write(name, [text])
    return True
