"""Removes files that no manifest names, though a process may be about to commit them.

Storage has no transactions. A process may stop between any two requests, for as long as it likes,
and go on with what it knew before. So both sides look again after they have written.

Rules:
 FC1  A save lists its files again once its manifest exists. If one is missing, the save withdraws
     the manifest, and the step is not saved. It repeats requests that fail.
 FC2  A process that removes the files of a save removes checksum files first, those of a few ranks
     at a time, and then looks for the save's manifest. If that exists, the checksum files are
     written back, and all other files stay. It repeats requests that fail from then on.
 FC3  A manifest is replaced or removed only if it still has the bytes that were read (`instead_of`
     and `holding` of a storage). A process that finds other bytes decides anew. The
     manifest of a step that is known to be damaged is read once, and one that a newer generation
     has written is not the damaged one (`is_of_newer_generation` in `retention`).
 FC4  A process that removes the files of a save notes their versions before it looks for the
     manifest, and removes these alone (`version` of a storage): the save may be tried again
     meanwhile, by files of the same names and bytes. A save never takes over a shard without its
     checksum file, but writes it anew.
 FC5  A process that has removed files of a save looks for its manifest once more, and withdraws it
     if it names one that is missing. That is so where a storage cannot compare and remove in one
     request, or a save that was alive has taken no notice yet (FC1). Another save of the same
     token, such as that of a snapshot which one node holds whole, has other files. A save that
     removes a shard to write it anew looks only where it could not write it: else the step is whole
     again, and the save that has committed it may have said so. If it is killed in between, the
     step is not good.
 FC6  A run that takes the directory over from another job or from an earlier run removes the files
     of each save that is not committed by then, before any node of it is registered. So a save of
     the other that passed its last check of the directory's owner (`may_not` of a commit) and
     stopped there is withdrawn by FC1 when it goes on. Files that are newer than the record of the
     owner stay: they may be those of the run itself. `claim` in `owner` does this.
Invariant: a step whose manifest exists has its files, once every process has made its next request.
A process that is killed between its manifest and the list of FC1, or that the storage does not
answer any more, may leave a step without files, which is not good; retention of a newer generation
removes that manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from elasticzero.checkpoint.format.checksums import SUMS_LIMIT_BYTES
from elasticzero.checkpoint.format.names import (
    MANIFEST_NAME,
    SUMS_SUFFIX,
    is_partial,
    step_of,
    token_generation,
    token_of_file,
)
from elasticzero.checkpoint.steps.catalog import manifest_bytes, parse_manifest
from elasticzero.checkpoint.storage.base import Directory, Storage, read_small
from elasticzero.errors import CheckpointDamaged, StorageError

_T = TypeVar("_T")
_TRIES = 8
SHARDS_AT_ONCE = 64
"""Number of shards whose checksum files are removed before the manifest is looked for."""


def always() -> bool:
    """Tells a removal that it may go on."""
    return True


def repeated(request: Callable[[], _T]) -> _T:
    """Returns what a request returns. One that fails is repeated a few times: another process would
    not make it, and a committed step might stay without files."""
    for _ in range(_TRIES - 1):
        with suppress(StorageError):
            return request()
    return request()


def remove_loose(
    storage: Storage, token: str, names: Collection[str], go_on: Callable[[], bool] = always
) -> list[str]:
    """Removes files of a save that no manifest names; returns the names of those that are removed.

    None is, if the save has been committed meanwhile.

    Args:
        storage: The step's files.
        token: Token of the save.
        names: Names of its shard and checksum files.
        go_on: Is called before each removal; False leaves the other files where they are.

    Raises:
        StorageError: A file cannot be removed.
    """
    removed = _remove(storage, token, names, go_on)
    if removed:
        repeated(lambda: _withdraw(storage, token, removed))
    return removed


@contextmanager
def written_anew(storage: Storage, token: str, names: Collection[str]) -> Iterator[None]:
    """Removes a shard of a save and its checksum file, which no manifest names, and which are
    written anew in this context.

    Args:
        storage: The step's files.
        token: Token of the save.
        names: Names of the two files.

    Raises:
        StorageError: A file cannot be removed.
    """
    removed = _remove(storage, token, names, always)
    try:
        yield
    except BaseException:
        if removed:
            with suppress(StorageError):  # the first error says more
                repeated(lambda: _withdraw(storage, token, removed))
        raise


def _remove(
    storage: Storage, token: str, names: Collection[str], go_on: Callable[[], bool]
) -> list[str]:
    """Does what `remove_loose` does, and withdraws nothing.

    Args:
        storage: The step's files.
        token: Token of the save.
        names: Names of its shard and checksum files.
        go_on: Is called before each removal; False leaves the other files where they are.
    """
    versions = storage.versions()
    present = sorted(set(names) & versions.keys())
    shards = sorted({name.removesuffix(SUMS_SUFFIX) for name in present})
    removed: list[str] = []
    for start in range(0, len(shards), SHARDS_AT_ONCE):
        some = set(shards[start : start + SHARDS_AT_ONCE])
        part = {name: versions[name] for name in present if name.removesuffix(SUMS_SUFFIX) in some}
        part_removed = _remove_part(storage, token, part, go_on)
        removed += part_removed
        if len(part_removed) < len(part):
            break
    return sorted(removed)


def remove_uncommitted(directory: Directory, until_s: float) -> None:
    """Removes the files of each job's save that no manifest names and that are old (FC6).

    Files of saves by hand stay, and so do those that their writers have not completed.

    Args:
        directory: The checkpoint directory.
        until_s: Time by the storage's clock; files that were written later stay.

    Raises:
        StorageError: A file cannot be removed.
    """
    for name, times in directory.files().items():
        if step_of(name) is None:
            continue
        saves: dict[str, list[str]] = {}
        for file, written_s in times.items():
            token = None if is_partial(file) else token_of_file(file)
            if token is None or token_generation(token) is None:
                continue
            files = saves.setdefault(token, [])
            if written_s <= until_s:
                files.append(file)
        if MANIFEST_NAME in times and len(saves) == 1:
            continue  # they are the files that it names
        for token, files in saves.items():
            remove_loose(directory.step(name), token, files)


def _remove_part(
    storage: Storage, token: str, versions: Mapping[str, str], go_on: Callable[[], bool]
) -> list[str]:
    """Removes files of a save, and returns their names; none if the save has been committed: then
    all of them stay.

    Args:
        storage: The step's files.
        token: Token of the save.
        versions: The version of each file, by name.
        go_on: Is called before each removal; False leaves the other files where they are.
    """
    if _may_be_committed(storage, token):
        return []
    contents: dict[str, bytes] = {}
    failure: StorageError | None = None
    try:
        for name in versions:
            if name.endswith(SUMS_SUFFIX) and go_on():
                with suppress(FileNotFoundError):
                    contents[name] = read_small(storage, name, SUMS_LIMIT_BYTES)
                storage.remove(name, version=versions[name])
    except StorageError as error:
        failure = error
    committed = repeated(lambda: _may_be_committed(storage, token))
    if committed:
        for name, data in contents.items():
            repeated(partial(storage.create_exclusive, name, data))
    if failure is not None:
        raise failure
    if committed:
        return []
    removed = list(contents)
    for name in versions:
        if name not in contents and go_on():
            storage.remove(name, version=versions[name])
            removed.append(name)
    return removed


def _withdraw(storage: Storage, token: str, removed: Collection[str]) -> None:
    """Withdraws the manifest of a save if it names a file that was removed and is missing.

    Args:
        storage: The step's files.
        token: Token of the save.
        removed: Names of the files.
    """
    manifest = manifest_bytes(storage)
    if manifest is None:
        return
    named = _named_files(storage, manifest, token) & set(removed)
    if named and not named <= set(storage.names()):
        storage.remove(MANIFEST_NAME, holding=manifest)


def _may_be_committed(storage: Storage, token: str) -> bool:
    """Returns whether a step's manifest names the files of a save, or cannot be understood."""
    manifest = manifest_bytes(storage)
    return manifest is not None and _token(storage, manifest) in (token, None)


def _named_files(storage: Storage, manifest: bytes, token: str) -> set[str]:
    """Returns the names of shards and checksum files in a manifest; none if it is of another save,
    or cannot be read.

    Args:
        storage: The step's files.
        manifest: Contents of the manifest.
        token: Token of the save.
    """
    try:
        parsed = parse_manifest(storage, manifest)
    except CheckpointDamaged:
        return set()
    if parsed.token != token:
        return set()
    return {name for file in parsed.files for name in (file.name, file.name + SUMS_SUFFIX)}


def _token(storage: Storage, manifest: bytes) -> str | None:
    try:
        return parse_manifest(storage, manifest).token
    except CheckpointDamaged:
        return None
