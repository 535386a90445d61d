"""Removes files that no manifest names, though a process may be about to commit them.

Storage has no transactions. A process may stop between any two requests, for as long as it likes,
and go on with what it knew before. So both sides look again after they have written.

Rules:
 FC1  A save lists its files again once its manifest exists. If one is missing, the save withdraws
     the manifest, and the step is not saved.
 FC2  A process that removes the files of a save removes one checksum file first, and then looks for
     the save's manifest. If that exists, the checksum file is written back, and all files stay.
 FC3  A manifest is replaced or removed only if it still has the bytes that were read (`instead_of`
     and `holding` of a storage). A process that finds other bytes decides anew.
 FC4  A process that has removed all files of a save looks for its manifest once more, and withdraws
     it if it names one of them: the save may have been tried again meanwhile. Another save of the
     same token, such as that of a snapshot which one node holds whole, has other files.
Invariant: a step whose manifest exists has its files, once every process has made its next request.
A process that is killed between its manifest and the list of FC1 may leave a step without files,
which is not good; retention of a newer generation removes that manifest.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from elasticzero.checkpoint.format.checksums import SUMS_LIMIT_BYTES
from elasticzero.checkpoint.format.names import MANIFEST_NAME, SUMS_SUFFIX
from elasticzero.checkpoint.steps.catalog import manifest_bytes, parse_manifest
from elasticzero.checkpoint.storage.base import Storage, read_small
from elasticzero.errors import CheckpointDamaged


def remove_loose(storage: Storage, token: str, names: Collection[str]) -> list[str]:
    """Removes files of a save that no manifest names; returns the names of those that are removed.

    None is, if the save has been committed meanwhile.

    Args:
        storage: The step's files.
        token: Token of the save.
        names: Names of its shard and checksum files.

    Raises:
        StorageError: A file cannot be removed.
    """
    if _may_be_committed(storage, token):
        return []
    sums = min((name for name in names if name.endswith(SUMS_SUFFIX)), default=None)
    data = None
    if sums is not None:
        with suppress(FileNotFoundError):
            data = read_small(storage, sums, SUMS_LIMIT_BYTES)
        storage.remove(sums)
    if _may_be_committed(storage, token):
        if sums is not None and data is not None:
            storage.write(sums, [data], size=len(data))
        return []
    for name in sorted(names, reverse=True):  # the checksum file of each shard before the shard
        if name != sums:
            storage.remove(name)
    manifest = manifest_bytes(storage)
    if manifest is not None and _names_any(storage, manifest, token, set(names)):
        storage.remove(MANIFEST_NAME, holding=manifest)
    return sorted(names)


def _may_be_committed(storage: Storage, token: str) -> bool:
    """Returns whether a step's manifest names the files of a save, or cannot be understood."""
    manifest = manifest_bytes(storage)
    return manifest is not None and _token(storage, manifest) in (token, None)


def _names_any(storage: Storage, manifest: bytes, token: str, names: Collection[str]) -> bool:
    """Returns whether a manifest is of a save, and names one of these files.

    Args:
        storage: The step's files.
        manifest: Contents of the manifest.
        token: Token of the save.
        names: Names of shard and checksum files.
    """
    try:
        parsed = parse_manifest(storage, manifest)
    except CheckpointDamaged:
        return False
    files = [name for file in parsed.files for name in (file.name, file.name + SUMS_SUFFIX)]
    return parsed.token == token and any(name in names for name in files)


def _token(storage: Storage, manifest: bytes) -> str | None:
    try:
        return parse_manifest(storage, manifest).token
    except CheckpointDamaged:
        return None
