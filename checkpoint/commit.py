"""Steps in a checkpoint directory: prepare, commit by the manifest, list, choose, tidy.

A step exists exactly when its manifest does, and the manifest is created last: every rank writes
its shard file and then its checksum file (each gets its name only when it is whole and durable),
and the manifest's writer waits for the checksum files of all ranks. Files of different saves carry
different tokens, so what a failed save leaves behind can never become part of another.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from elasticzero.checkpoint.manifest import (
    MANIFEST_NAME,
    SUMS_SUFFIX,
    Manifest,
    ShardFile,
    from_json,
    step_directory,
    step_of,
    to_json,
)
from elasticzero.checkpoint.shards import read_sums
from elasticzero.checkpoint.storage import (
    DiskStorage,
    Readable,
    Storage,
    explain,
    read_small,
    sync_directory,
)
from elasticzero.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    ElasticZeroError,
    StorageError,
    UserError,
)

MANIFEST_LIMIT_BYTES = 1 << 30
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.25
_NOT_OURS_TO_JUDGE = ("lost+found",)
"""What a fresh volume may hold without being somebody's data."""


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One committed step in a checkpoint directory."""

    step: int
    path: Path


def prepare(directory: Path, step: int) -> DiskStorage:
    """The storage of a step about to be written; its directory is made if it is not there."""
    path = directory / step_directory(step)
    if not path.is_dir():
        try:
            path.mkdir(parents=True, exist_ok=True)
            sync_directory(directory)
        except OSError as error:
            raise StorageError(f"cannot make the directory {path}: {explain(error)}") from error
    return DiskStorage(path)


def read_manifest(storage: Readable, name: str = MANIFEST_NAME) -> Manifest:
    """The manifest in a step's storage; `CheckpointDamaged` if it is missing or wrong."""
    where = f"{storage.where}/{name}"
    try:
        return from_json(read_small(storage, name, MANIFEST_LIMIT_BYTES), where)
    except FileNotFoundError:
        raise CheckpointDamaged(f"{where} is missing: this step was never committed") from None


def fault(storage: Readable) -> str | None:
    """Why a step is not good, or None: the manifest parses, and its files are there in full size.

    Reads no tensor; `elasticzero checkpoint verify` does.
    """
    try:
        manifest = read_manifest(storage)
        for file in manifest.files:
            if file.digest is None:
                return f"{storage.where}/{MANIFEST_NAME} has no digest for {file.name}"
            for name in (file.name, file.name + SUMS_SUFFIX):
                try:
                    size = storage.size(name)
                except FileNotFoundError:
                    return f"{storage.where}/{name} is missing"
                if name == file.name and size != file.bytes:
                    return f"{storage.where}/{name} has {size} bytes, not {file.bytes}"
    except ElasticZeroError as error:
        return str(error)
    return None


def stands(storage: Storage) -> bool:
    """Whether the step is committed and, at a cheap look, good: then nobody writes it again."""
    try:
        return MANIFEST_NAME in storage.names() and fault(storage) is None
    except FileNotFoundError:
        return False


def commit(storage: Storage, draft: Manifest, *, wait_s: float, replacing: bool = False) -> bool:
    """Wait until every rank's shard is whole, then create the manifest.

    `replacing`: the step that stands is known to be damaged; it stays until ours takes its place.
    Returns whether the step now stands with our files; False when another whole one came first.
    Raises `StorageError` naming the ranks whose shards did not appear within `wait_s`, and
    `CheckpointMismatch` where a rank's layout is not the draft's.
    """
    world = draft.layout.world_size
    deadline = time.monotonic() + wait_s
    poll_s = _FIRST_POLL_S
    while True:
        names = set(storage.names())
        missing = [r for r in range(world) if draft.file_name(r) + SUMS_SUFFIX not in names]
        if not missing:
            break
        if not replacing and MANIFEST_NAME in names and fault(storage) is None:
            return False
        if time.monotonic() >= deadline:
            raise StorageError(
                f"{storage.where}: after {wait_s:g} s the shards of {_ranks(missing)} of {world} "
                "are not there; is the checkpoint directory shared by all nodes?"
            )
        time.sleep(min(poll_s, max(0.0, deadline - time.monotonic())))
        poll_s = min(poll_s * 1.5, _LAST_POLL_S)
    layout = draft.layout.digest()
    files = tuple(_written_file(storage, draft.file_name(rank), layout) for rank in range(world))
    data = to_json(replace(draft, files=files))
    if not replacing:
        if storage.create_exclusive(MANIFEST_NAME, data):
            return True
        if fault(storage) is None:
            return False
    _replace(storage, data, {file.name for file in files})
    return True


def _replace(storage: Storage, data: bytes, names: Collection[str]) -> None:
    """Put our manifest in the place of a damaged one, then remove the files that one named."""
    old: tuple[ShardFile, ...] = ()
    with suppress(ElasticZeroError, FileNotFoundError):
        old = read_manifest(storage).files
    storage.write(MANIFEST_NAME, [data])
    for file in old:
        if file.name not in names:
            storage.remove(file.name)
            storage.remove(file.name + SUMS_SUFFIX)


def discard(storage: DiskStorage, draft: Manifest, rank: int) -> None:
    """Remove a rank's files of a save that failed, unless a manifest names them, and the step's
    directory if nothing is left in it; as far as that can be done."""
    name = draft.file_name(rank)
    with suppress(ElasticZeroError, OSError):
        if MANIFEST_NAME not in storage.names() or read_manifest(storage).token != draft.token:
            storage.remove(name + SUMS_SUFFIX)
            storage.remove(name)
        storage.path.rmdir()


def _written_file(storage: Storage, name: str, layout_digest: str) -> ShardFile:
    sums = read_sums(storage, name)
    if sums.layout_digest != layout_digest:
        raise CheckpointMismatch(
            f"{storage.where}/{name} was written with other tensors, or tensors dealt otherwise, "
            "than on the rank that commits: the ranks must save the same tensors"
        )
    if (size := storage.size(name)) != sums.size:
        raise CheckpointDamaged(f"{storage.where}/{name} has {size} bytes, not {sums.size}")
    return ShardFile(name, sums.size, sums.digest)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"


def steps(directory: Path) -> list[StepInfo]:
    """The committed steps of a checkpoint directory, newest first, good or not."""
    return [
        StepInfo(step, path)
        for step, path in _step_paths(directory)
        if (path / MANIFEST_NAME).exists()
    ]


def uncommitted(directory: Path) -> list[StepInfo]:
    """Steps' directories without a manifest, newest first: saves that failed or are going on."""
    return [
        StepInfo(step, path)
        for step, path in _step_paths(directory)
        if not (path / MANIFEST_NAME).exists()
    ]


def newest_good(directory: Path, excluding: Collection[int] = ()) -> int | None:
    """The newest committed step that is good at a cheap look, or None."""
    for info in steps(directory):
        if info.step not in excluding and fault(DiskStorage(info.path)) is None:
            return info.step
    return None


def resolve(path: Path) -> Path:
    """The step directory a path means: itself, or a checkpoint directory's newest good step."""
    if (path / MANIFEST_NAME).exists() or step_of(path.name) is not None:
        if not path.is_dir():
            raise UserError(f"{path} does not exist")
        return path
    if not path.is_dir():
        raise UserError(f"{path} is not a directory of checkpoints: it does not exist")
    step = newest_good(path)
    if step is None:
        found = steps(path)
        raise UserError(
            f"{path} holds no good checkpoint"
            + (f" ({len(found)} damaged; see `elasticzero checkpoint verify`)" if found else "")
        )
    return path / step_directory(step)


def check_writable(directory: Path) -> None:
    """Make the directory if need be, and try that it can be written.

    Raises `StorageError` if not, and `UserError` if it holds something that is not checkpoints.
    """
    probe = directory / f".writable-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        names = [n for n in os.listdir(directory) if n[0] != "." and n not in _NOT_OURS_TO_JUDGE]
        if names and not any(step_of(name) is not None for name in names):
            raise UserError(
                f"the checkpoint directory {directory} holds other things ({_few(names)}) and no "
                "checkpoints: give an empty or a new directory"
            )
        probe.write_bytes(b"")
    except OSError as error:
        raise StorageError(
            f"the checkpoint directory {directory} cannot be written: {explain(error)}"
        ) from error
    finally:
        with suppress(OSError):
            probe.unlink()


def clean_leftovers(directory: Path, keep_token: str | None = None) -> list[str]:
    """Remove what failed saves left behind, and say which files; what a manifest names stays.

    `keep_token`: the running generation's, whose files may belong to a save in progress.
    """
    removed = []
    for _, path in _step_paths(directory):
        storage = DiskStorage(path)
        keep = {MANIFEST_NAME}
        if (path / MANIFEST_NAME).exists():
            try:
                manifest = read_manifest(storage)
            except ElasticZeroError:
                continue
            keep |= {file.name + end for file in manifest.files for end in ("", SUMS_SUFFIX)}
        for name in storage.names():
            if name in keep or (keep_token is not None and f"-{keep_token}.safetensors" in name):
                continue
            storage.remove(name)
            removed.append(f"{path.name}/{name}")
        with suppress(OSError):
            path.rmdir()
    return removed


def keep_last(directory: Path, count: int) -> list[int]:
    """Retention: remove every step older than the `count` newest good ones; returns the removed.

    A manifest goes first, so that no step ever looks committed without its files.
    """
    if count < 1:
        raise UserError(f"the number of checkpoints to keep is {count}: it must be at least 1")
    good = [i.step for i in steps(directory) if fault(DiskStorage(i.path)) is None][:count]
    if len(good) < count:
        return []
    removed = []
    for step, path in _step_paths(directory):
        if step < good[-1]:
            DiskStorage(path).remove(MANIFEST_NAME)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(step)
    return removed


def _step_paths(directory: Path) -> list[tuple[int, Path]]:
    """Every step's directory, committed or not, newest first."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"cannot list {directory}: {explain(error)}") from error
    found = [(step, directory / n) for n in names if (step := step_of(n)) is not None]
    return sorted(found, reverse=True)


def _few(names: list[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
