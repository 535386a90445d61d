"""Commits a step by creating its manifest, or removes the files of a failed save.

A step exists exactly when its manifest does, and the manifest is created last. Every rank writes
its shard file and then its checksum file; each gets its name only when it is whole and durable. The
manifest's writer waits for the checksum files of all ranks. Files of different saves have different
tokens, so the leftovers of a failed save can never become part of another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace

from elasticzero.checkpoint.format.checksums import read_sums
from elasticzero.checkpoint.format.manifest import Manifest, ShardFile, to_json
from elasticzero.checkpoint.format.names import MANIFEST_NAME, SUMS_SUFFIX, step_directory
from elasticzero.checkpoint.format.strict_json import check_memory
from elasticzero.checkpoint.steps.catalog import (
    FILES_AT_ONCE,
    MANIFEST_LIMIT_BYTES,
    read_manifest,
    step_error_text,
)
from elasticzero.checkpoint.storage.base import Directory, Storage
from elasticzero.concurrency import run_parallel
from elasticzero.errors import CheckpointDamaged, CheckpointMismatch, ElasticZeroError, StorageError
from elasticzero.serialization import RecordError
from elasticzero.text import list_text

_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.25


def prepare(directory: Directory, step: int) -> Storage:
    """Returns the storage of a step that is about to be written; makes its directory if
    necessary."""
    return directory.make(step_directory(step))


def is_good(storage: Storage) -> bool:
    """Returns whether the step is committed and its files have their sizes; then no save writes it
    again."""
    return MANIFEST_NAME in storage.names() and step_error_text(storage) is None


def _never() -> None:
    return None


def commit(
    storage: Storage,
    draft: Manifest,
    *,
    wait_s: float,
    replacing: bool = False,
    give_up: Callable[[], str | None] = _never,
) -> bool:
    """Waits until every rank's shard is whole, then creates the manifest.

    Args:
        storage: The step's files.
        draft: The manifest without `files`.
        wait_s: Time limit in seconds.
        replacing: The committed step is known to be damaged; it stays until this one replaces it.
        give_up: Is called repeatedly while this waits; a reason that it returns ends the wait.

    Returns:
        Whether the step is now committed with these files; False if another save was committed
            first.

    Raises:
        StorageError: The shards of some ranks, which it names, did not appear within `wait_s`, or
            `give_up` returned a reason.
        CheckpointMismatch: A rank's layout is not the draft's.
    """
    if not _await_shards(storage, draft, wait_s, replacing, give_up):
        return False
    layout = draft.layout.digest()
    files = run_parallel(
        range(draft.layout.world_size),
        lambda rank: _written_file(storage, draft.file_name(rank), layout),
        threads=FILES_AT_ONCE,
    )
    data = to_json(replace(draft, files=tuple(files)))
    _check_readable(storage, data)
    if not replacing:
        if storage.create_exclusive(MANIFEST_NAME, data):
            return True
        if step_error_text(storage) is None:
            return False
    _replace(storage, data, {file.name for file in files})
    return True


def _await_shards(
    storage: Storage,
    draft: Manifest,
    wait_s: float,
    replacing: bool,
    give_up: Callable[[], str | None],
) -> bool:
    """Waits until every rank's shard is whole; False if another save was committed meanwhile.

    Args:
        storage: The step's files.
        draft: The manifest without `files`.
        wait_s: Time limit in seconds.
        replacing: Whether the committed step is known to be damaged, so that it does not end the
            wait.
        give_up: Is called repeatedly; a reason that it returns ends the wait.

    Raises:
        StorageError: Shards did not appear in time, or `give_up` returned a reason.
    """
    world = draft.layout.world_size
    deadline = time.monotonic() + wait_s
    poll_s = _FIRST_POLL_S
    while True:
        names = set(storage.names())
        missing = [r for r in range(world) if draft.file_name(r) + SUMS_SUFFIX not in names]
        if not missing:
            return True
        if not replacing and MANIFEST_NAME in names and step_error_text(storage) is None:
            return False
        if reason := give_up():
            raise StorageError(
                f"{storage.where}: {reason}, and the shards of {_ranks(missing)} of {world} are "
                "missing: this step is not saved"
            )
        if time.monotonic() >= deadline:
            raise StorageError(
                f"{storage.where}: after {wait_s:g} s the shards of {_ranks(missing)} of {world} "
                "are missing; is the checkpoint directory shared by all nodes?"
            )
        time.sleep(min(poll_s, max(0.0, deadline - time.monotonic())))
        poll_s = min(poll_s * 1.5, _LAST_POLL_S)


def _check_readable(storage: Storage, data: bytes) -> None:
    """Raises `StorageError` for a manifest that is too large to be read again."""
    try:
        check_memory(data)
        if len(data) > MANIFEST_LIMIT_BYTES:
            raise RecordError(f"its {len(data)} bytes are more than {MANIFEST_LIMIT_BYTES}")
    except RecordError as error:
        raise StorageError(
            f"{storage.where} has a manifest that is too large: {error}; keep large lists as "
            "tensors or arrays, or use fewer tensors"
        ) from None


def _replace(storage: Storage, data: bytes, names: Collection[str]) -> None:
    """Replaces a damaged manifest by this one, then removes the files that the old one named.

    Args:
        storage: The step's files.
        data: Contents of the new manifest.
        names: Names of the rank files that the new manifest names.
    """
    old: tuple[ShardFile, ...] = ()
    with suppress(ElasticZeroError, FileNotFoundError):
        old = read_manifest(storage).files
    storage.write(MANIFEST_NAME, [data])
    for file in old:
        if file.name not in names:
            for left in (file.name, file.name + SUMS_SUFFIX):
                with suppress(ElasticZeroError):  # the step is committed; this only cleans up
                    storage.remove(left)


def discard(directory: Directory, draft: Manifest, rank: int) -> bool:
    """Removes a rank's files of a failed save, unless a manifest names them, and an empty step
    directory.

    Args:
        directory: The checkpoint directory.
        draft: The manifest of the failed save, without `files`.
        rank: The rank whose files are removed.

    Returns:
        Whether that was possible.
    """
    step, name = step_directory(draft.step), draft.file_name(rank)
    storage = directory.step(step)
    with suppress(ElasticZeroError, OSError):
        if MANIFEST_NAME not in storage.names() or read_manifest(storage).token != draft.token:
            storage.remove(name + SUMS_SUFFIX)
            storage.remove(name)
        directory.remove(step)
        return True
    return False


def _written_file(storage: Storage, name: str, layout_digest: str) -> ShardFile:
    sums = read_sums(storage, name)
    if sums.layout_digest != layout_digest:
        raise CheckpointMismatch(
            f"{storage.where}/{name} was written with other tensors, or with another distribution "
            "of them, than on the rank that commits: the ranks must save the same tensors"
        )
    if (size := storage.size(name)) != sums.size:
        raise CheckpointDamaged(f"{storage.where}/{name} has {size} bytes, not {sums.size}")
    return ShardFile(name, sums.size, sums.digest)


def _ranks(ranks: list[int]) -> str:
    shown = list_text(ranks, 8)
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"
