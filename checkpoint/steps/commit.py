"""Commits a step by creating its manifest, or removes the files of a failed save.

A step exists exactly when its manifest does, and the manifest is created last. Every rank writes
its shard file and then its checksum file; each gets its name only when it is whole and durable. The
manifest's writer waits for the checksum files of all ranks. Files of different saves have different
tokens, so the leftovers of a failed save can never become part of another. A committer may stop
anywhere and go on when other generations have gone on without it: rules FC in `loose_files`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from elasticzero.checkpoint.format.checksums import read_sums
from elasticzero.checkpoint.format.manifest import Manifest, ShardFile, to_json
from elasticzero.checkpoint.format.names import MANIFEST_NAME, SUMS_SUFFIX, step_directory
from elasticzero.checkpoint.format.strict_json import check_memory
from elasticzero.checkpoint.steps.catalog import (
    FILES_AT_ONCE,
    MANIFEST_LIMIT_BYTES,
    manifest_bytes,
    parse_manifest,
    step_error,
    step_error_text,
)
from elasticzero.checkpoint.steps.loose_files import remove_loose, repeated
from elasticzero.checkpoint.storage.base import Directory, Storage, out_of_reach
from elasticzero.concurrency import run_parallel
from elasticzero.errors import CheckpointDamaged, CheckpointMismatch, ElasticZeroError, StorageError
from elasticzero.serialization import RecordError
from elasticzero.text import list_text

_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.25
_TRIES = 8
"""Maximum number of times that one save tries to place its manifest, against other writers."""


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
    replacing: bool | bytes = False,
    give_up: Callable[[], str | None] = _never,
    may_not: Callable[[], str | None] = _never,
) -> bool:
    """Waits until every rank's shard is whole, then creates the manifest.

    It replaces the manifest that was known to be damaged when this began, or one of a step that is
    not good, and only one that still has the bytes that were read.

    Args:
        storage: The step's files.
        draft: The manifest without `files`.
        wait_s: Time limit in seconds.
        replacing: The committed step is known to be damaged; it stays until this one replaces it.
            The bytes of its manifest say which it is; True: the one that exists now.
        give_up: Is called repeatedly while this waits; a reason that it returns ends the wait.
        may_not: Is called last before the manifest is created; a reason that it returns forbids it.

    Returns:
        Whether the step is now committed with these files; False if another save was committed
            first.

    Raises:
        StorageError: The shards of some ranks, which it names, did not appear within `wait_s`, or
            `give_up` or `may_not` returned a reason; or shards were removed meanwhile.
        CheckpointMismatch: A rank's layout is not the draft's.
    """
    known_bad = replacing if isinstance(replacing, bytes) else None
    if replacing is True:
        known_bad = _manifest_or_other(storage)[0]
    if not _await_shards(storage, draft, wait_s, known_bad, give_up):
        return False
    layout = draft.layout.digest()
    files = run_parallel(
        range(draft.layout.world_size),
        lambda rank: _written_file(storage, draft.file_name(rank), layout),
        threads=FILES_AT_ONCE,
    )
    data = to_json(replace(draft, files=tuple(files)))
    _check_readable(storage, data)
    if reason := may_not():
        raise StorageError(f"{storage.where}: {reason}: this step is not saved")
    placed, replaced = _place(storage, data, known_bad)
    if not placed:
        return False
    _check_listed(storage, files, data, replaced)
    if replaced is not None:
        _remove_replaced(storage, replaced, draft.token)
    return True


def _await_shards(
    storage: Storage,
    draft: Manifest,
    wait_s: float,
    known_bad: bytes | None,
    give_up: Callable[[], str | None],
) -> bool:
    """Waits until every rank's shard is whole; False if another save was committed meanwhile.

    Args:
        storage: The step's files.
        draft: The manifest without `files`.
        wait_s: Time limit in seconds.
        known_bad: Contents of the manifest that is known to be of a damaged step, which does not
            end the wait; None: there is none.
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
        if MANIFEST_NAME in names and _is_good_by_another(storage, known_bad):
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


def _is_good_by_another(storage: Storage, known_bad: bytes | None) -> bool:
    """Returns whether a step is good, by another save than the one that is known to be damaged."""
    if known_bad is not None and _manifest_or_other(storage)[0] == known_bad:
        return False
    return step_error_text(storage) is None


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


def _place(storage: Storage, data: bytes, known_bad: bytes | None) -> tuple[bool, bytes | None]:
    """Gives the manifest its name, unless the step is good by another save (FC3).

    What has the name and is no manifest, such as a pipe, is removed first, if it is still the same.

    Args:
        storage: The step's files.
        data: Contents of the manifest.
        known_bad: Contents of the manifest that is known to be of a damaged step; None: there is
            none.

    Returns:
        Whether the manifest has its name, and the contents of the one that it has replaced.

    Raises:
        StorageError: Whether the step is good cannot be read, or other saves write it all the time.
    """
    replaced = known_bad
    for _ in range(_TRIES):
        # Storage may have done what it did not answer: this save has to know (FC1).
        create = partial(storage.create_exclusive, MANIFEST_NAME, data, instead_of=replaced)
        if repeated(create):
            return True, replaced
        replaced, other = _manifest_or_other(storage)
        if other:
            version = storage.versions().get(MANIFEST_NAME)
            if version is not None and _manifest_or_other(storage)[1]:
                storage.remove(MANIFEST_NAME, version=version)
            continue
        error = step_error(storage)
        if replaced is not None and error is None and replaced != known_bad:
            return False, None
        if error is not None and out_of_reach(error):
            raise error
    raise StorageError(f"{storage.where} is not saved: other saves write it all the time")


def _manifest_or_other(storage: Storage) -> tuple[bytes | None, bool]:
    """Returns (the contents of the manifest if it exists, whether something has its name that no
    save has written: a pipe, say)."""
    try:
        return manifest_bytes(storage), False
    except StorageError as error:
        if out_of_reach(error):
            raise
        return None, True


def _check_listed(
    storage: Storage, files: list[ShardFile], data: bytes, replaced: bytes | None
) -> None:
    """Withdraws the manifest if files that it names are gone (FC1).

    A request that fails is repeated: nobody else withdraws the manifest of a process that lives.

    Args:
        storage: The step's files.
        files: The files that the manifest names.
        data: Contents of the manifest.
        replaced: Contents of the manifest that it has replaced; None: there was none.

    Raises:
        StorageError: Files are gone, or all tries failed.
    """
    gone: list[int] = []

    def look() -> None:
        if missing := _missing(storage, files):
            gone[:] = gone or missing
            _withdraw(storage, data, replaced)

    repeated(look)
    if gone:
        raise StorageError(
            f"{storage.where}: the shards of {_ranks(gone)} of {len(files)} were removed before "
            "the step was committed, as those of a save that had failed: this step is not saved"
        )


def _missing(storage: Storage, files: list[ShardFile]) -> list[int]:
    """Returns the ranks of which a file is gone."""
    names = set(storage.names())
    return [r for r, f in enumerate(files) if not {f.name, f.name + SUMS_SUFFIX} <= names]


def _withdraw(storage: Storage, data: bytes, replaced: bytes | None) -> None:
    """Removes a manifest, or gives the one that it has replaced its name again.

    Args:
        storage: The step's files.
        data: Contents of the manifest.
        replaced: Contents of the manifest that it has replaced; None: there was none.
    """
    if replaced is None:
        storage.remove(MANIFEST_NAME, holding=data)
    else:
        storage.create_exclusive(MANIFEST_NAME, replaced, instead_of=data)


def _remove_replaced(storage: Storage, replaced: bytes, token: str) -> None:
    """Removes the files that the replaced manifest named, as far as possible.

    Args:
        storage: The step's files.
        replaced: Contents of the manifest that was replaced.
        token: Token of the files that stay.
    """
    with suppress(ElasticZeroError):  # the step is committed; this only cleans up
        old = parse_manifest(storage, replaced)
        if old.token != token:
            names = [name for file in old.files for name in (file.name, file.name + SUMS_SUFFIX)]
            remove_loose(storage, old.token, names)


def discard(directory: Directory, draft: Manifest, ranks: Iterable[int]) -> bool:
    """Removes the files of ranks of a failed save, unless a manifest names them, and an empty step
    directory.

    Args:
        directory: The checkpoint directory.
        draft: The manifest of the failed save, without `files`.
        ranks: The ranks whose files are removed.

    Returns:
        Whether that was possible.
    """
    step = step_directory(draft.step)
    names = [draft.file_name(rank) + end for rank in ranks for end in ("", SUMS_SUFFIX)]
    with suppress(ElasticZeroError, OSError):
        remove_loose(directory.step(step), draft.token, names)
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
    try:
        size = storage.size(name)
    except FileNotFoundError:
        raise StorageError(
            f"{storage.where}/{name} was removed before the step was committed: this step is not "
            "saved"
        ) from None
    if size != sums.size:
        raise CheckpointDamaged(f"{storage.where}/{name} has {size} bytes, not {sums.size}")
    return ShardFile(name, sums.size, sums.digest)


def _ranks(ranks: list[int]) -> str:
    shown = list_text(ranks, 8)
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"
