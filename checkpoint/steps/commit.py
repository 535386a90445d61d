"""Steps in a checkpoint directory: prepare, commit by the manifest, list, choose, tidy.

A step exists exactly when its manifest does, and the manifest is created last: every rank writes
its shard file and then its checksum file (each gets its name only when it is whole and durable),
and the manifest's writer waits for the checksum files of all ranks. Files of different saves carry
different tokens, so what a failed save leaves behind can never become part of another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from elasticzero.checkpoint.format.checksums import missing, read_sums
from elasticzero.checkpoint.format.manifest import Manifest, ShardFile, from_json, to_json
from elasticzero.checkpoint.format.names import MANIFEST_NAME, SUMS_SUFFIX, step_directory, step_of
from elasticzero.checkpoint.format.strict_json import check_memory, reason
from elasticzero.checkpoint.format.validation import check_committed
from elasticzero.checkpoint.storage.base import (
    Directory,
    Readable,
    Storage,
    open_directory,
    open_storage,
    out_of_reach,
    read_small,
)
from elasticzero.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    ElasticZeroError,
    StorageError,
    UserError,
)
from elasticzero.serialization import RecordError
from elasticzero.text import complain

MANIFEST_LIMIT_BYTES = 1 << 28
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.25
_AT_ONCE = 16
"""Files looked at together."""
RESOLVABLE = "checkpoint directory (its newest good step), or one step's; a path or a URL"
"""What `resolve` takes, as the commands that do say it."""
_NOT_OURS_TO_JUDGE = ("lost+found",)
"""What a fresh volume may hold without being somebody's data."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One committed step in a checkpoint directory."""

    step: int
    name: str
    """Of the step's directory."""
    storage: Storage


def prepare(directory: Directory, step: int) -> Storage:
    """The storage of a step about to be written; its directory is made if it is not there."""
    return directory.make(step_directory(step))


def read_manifest(storage: Readable, name: str = MANIFEST_NAME) -> Manifest:
    """The manifest in a step's storage; `CheckpointDamaged` if it is missing or wrong.

    `name`: of a snapshot's manifest, which knows one rank's file only.
    """
    where = f"{storage.where}/{name}"
    try:
        manifest = from_json(read_small(storage, name, MANIFEST_LIMIT_BYTES), where)
    except FileNotFoundError:
        raise CheckpointDamaged(f"{where} is missing: this step was never committed") from None
    if step_of(storage.where.rstrip("/").rpartition("/")[2]) not in (None, manifest.step):
        raise CheckpointDamaged(
            f"{where} is of step {manifest.step}: a step's directory must keep its name"
        )
    if name == MANIFEST_NAME:
        try:
            check_committed(manifest)
        except ValueError as error:
            raise CheckpointDamaged(f"{where}: {reason(error)}") from None
    return manifest


def trouble(storage: Readable) -> ElasticZeroError | None:
    """Why a step is not good, or None: the manifest makes sense, and its files are there and have
    exactly their size.

    This alone says whether a step is good: every command, `load`, an agent's look for the newest
    good step and retention ask it. It reads no tensor; `elasticzero checkpoint verify` does so
    after it.
    """
    try:
        manifest = read_manifest(storage)
        found = _each(lambda file: _file_fault(storage, file), manifest.files)
    except ElasticZeroError as error:
        return error
    reason = next((reason for reason in found if reason is not None), None)
    return None if reason is None else CheckpointDamaged(reason)


def fault(storage: Readable) -> str | None:
    """`trouble` in words."""
    error = trouble(storage)
    return None if error is None else str(error)


def in_words(error: ElasticZeroError) -> str:
    """What is the matter with a step: that it is damaged, or only cannot be read, and why."""
    return f"{'cannot be read' if out_of_reach(error) else 'is damaged'} ({error})"


def _file_fault(storage: Readable, file: ShardFile) -> str | None:
    for name in (file.name, file.name + SUMS_SUFFIX):
        try:
            size = storage.size(name)
        except FileNotFoundError:
            return str(missing(storage, name))
        if name == file.name and size != file.bytes:
            return f"{storage.where}/{name} has {size} bytes, not {file.bytes}"
    return None


def _each(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """What `work` gives of each, in order, several at a time: an object store takes its time."""
    if len(items) <= 2:
        return [work(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor  # a short command does without

    with ThreadPoolExecutor(min(_AT_ONCE, len(items)), "elasticzero-look") as pool:
        return list(pool.map(work, items))


def stands(storage: Storage) -> bool:
    """Whether the step is committed and, at a cheap look, good: then nobody writes it again."""
    return MANIFEST_NAME in storage.names() and fault(storage) is None


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
    """Wait until every rank's shard is whole, then create the manifest.

    `replacing`: the step that stands is known to be damaged; it stays until ours takes its place.
    `give_up`: asked again and again while waiting; the reason it gives ends that as a
    `StorageError`.
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
        if reason := give_up():
            raise StorageError(
                f"{storage.where}: {reason}, and the shards of {_ranks(missing)} of {world} are "
                "not there: this step is not saved"
            )
        if time.monotonic() >= deadline:
            raise StorageError(
                f"{storage.where}: after {wait_s:g} s the shards of {_ranks(missing)} of {world} "
                "are not there; is the checkpoint directory shared by all nodes?"
            )
        time.sleep(min(poll_s, max(0.0, deadline - time.monotonic())))
        poll_s = min(poll_s * 1.5, _LAST_POLL_S)
    layout = draft.layout.digest()
    ranks = range(world)
    files = _each(lambda rank: _written_file(storage, draft.file_name(rank), layout), ranks)
    data = to_json(replace(draft, files=tuple(files)))
    _check_readable(storage, data)
    if not replacing:
        if storage.create_exclusive(MANIFEST_NAME, data):
            return True
        if fault(storage) is None:
            return False
    _replace(storage, data, {file.name for file in files})
    return True


def _check_readable(storage: Storage, data: bytes) -> None:
    """Raise `StorageError` for a manifest that no look at the step would read again."""
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
    """Put our manifest in the place of a damaged one, then remove the files that one named."""
    old: tuple[ShardFile, ...] = ()
    with suppress(ElasticZeroError, FileNotFoundError):
        old = read_manifest(storage).files
    storage.write(MANIFEST_NAME, [data])
    for file in old:
        if file.name not in names:
            for left in (file.name, file.name + SUMS_SUFFIX):
                with suppress(ElasticZeroError):  # the step stands; this is only tidied up
                    storage.remove(left)


def discard(directory: Directory, draft: Manifest, rank: int) -> bool:
    """Remove a rank's files of a save that failed, unless a manifest names them, and the step's
    directory if nothing is left in it; returns whether that could be done."""
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
            f"{storage.where}/{name} was written with other tensors, or tensors dealt otherwise, "
            "than on the rank that commits: the ranks must save the same tensors"
        )
    if (size := storage.size(name)) != sums.size:
        raise CheckpointDamaged(f"{storage.where}/{name} has {size} bytes, not {sums.size}")
    return ShardFile(name, sums.size, sums.digest)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"


def steps(directory: Directory) -> list[StepInfo]:
    """The committed steps of a checkpoint directory, newest first, good or not."""
    return [info for info in every_step(directory) if _has_manifest(info.storage)]


def uncommitted(directory: Directory) -> list[StepInfo]:
    """Steps' directories without a manifest, newest first: saves that failed or are going on."""
    return [info for info in every_step(directory) if not _has_manifest(info.storage)]


def every_step(directory: Directory) -> list[StepInfo]:
    """Every step's directory, committed or not, newest first."""
    found = [
        StepInfo(step, name, directory.step(name))
        for name in directory.names()
        if (step := step_of(name)) is not None
    ]
    return sorted(found, key=lambda info: info.step, reverse=True)


def newest_good(directory: Directory, excluding: Collection[int] = ()) -> int | None:
    """The newest committed step that is good at a cheap look, or None."""
    for info in every_step(directory):
        if info.step not in excluding and fault(info.storage) is None:
            return info.step
    return None


def _tell(line: str) -> None:
    complain(line)


def resolve(url: str | os.PathLike[str], tell: Callable[[str], object] = _tell) -> Storage:
    """The good step that a path or URL means: itself, or a checkpoint directory's newest good one.

    `tell`: gets one line about newer steps that are passed over. Raises `CheckpointDamaged` for
    one step that is not good, `UserError` if there is none, and `StorageError` if one might be but
    cannot be read.
    """
    storage, known_good = _find(url, tell)
    if not known_good and (error := trouble(storage)) is not None:
        raise error
    return storage


def find(url: str | os.PathLike[str], tell: Callable[[str], object] = _tell) -> Storage:
    """As `resolve`, but the directory of one step is taken as it is, good or not: to look at it."""
    return _find(url, tell)[0]


def _find(url: str | os.PathLike[str], tell: Callable[[str], object]) -> tuple[Storage, bool]:
    """(the step that `url` means, whether it is known to be good)."""
    directory = open_directory(url)
    names = directory.names()
    in_a_step = step_of(directory.where.rsplit("/", 1)[-1]) is not None
    if MANIFEST_NAME in names or (names and in_a_step):
        return open_storage(url), False
    passed_over: list[tuple[int, ElasticZeroError]] = []
    for info in every_step(directory):
        error = trouble(info.storage)
        if error is None:
            if passed_over:
                said = "; ".join(f"step {step} {in_words(why)}" for step, why in passed_over)
                tell(f"{said}; step {info.step} is used")
            return info.storage, True
        if _has_manifest(info.storage):
            passed_over.append((info.step, error))
    if not names:
        raise UserError(f"{directory.where} holds no checkpoint: it is empty or does not exist")
    for _, error in passed_over:
        if out_of_reach(error):
            raise error
    raise UserError(
        f"{directory.where} holds no good checkpoint "
        f"({len(passed_over)} damaged; see `elasticzero checkpoint verify`)"
        if passed_over
        else f"{directory.where} holds no checkpoint"
    )


def check_writable(directory: Directory) -> None:
    """Make the directory if need be, and try that it can be written.

    Raises `StorageError` if not, and `UserError` as `check_target` does.
    """
    check_outside_steps(directory.where)
    directory.check_writable()
    check_target(directory)


def check_target(directory: Directory) -> None:
    """Raise `UserError` for a directory that no checkpoint may be written into: one that lies in a
    step's directory, or holds something that is not checkpoints."""
    check_outside_steps(directory.where)
    names = [n for n in directory.names() if n[0] != "." and n not in _NOT_OURS_TO_JUDGE]
    if names and not any(step_of(name) is not None for name in names):
        raise UserError(
            f"the checkpoint directory {directory.where} holds other things ({_few(names)}) and no "
            "checkpoints: give an empty or a new directory"
        )


def check_outside_steps(where: str) -> None:
    """Raise `UserError` for a place in a step's directory, which is no place for anything else."""
    for part in where.split("/"):
        if step_of(part) is not None:
            raise UserError(
                f"{where} lies in a step's directory ({part}): give the checkpoint directory "
                "above it, or another"
            )


def _has_manifest(storage: Storage) -> bool:
    """Whether a step is committed; one that cannot be looked at counts, for it is then damaged."""
    try:
        storage.size(MANIFEST_NAME)
    except FileNotFoundError:
        return False
    except StorageError:
        return True
    return True


def _few(names: list[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
