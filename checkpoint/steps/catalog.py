"""Finds the steps in a checkpoint directory, which of them are good, and the one that a path
means."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from elasticzero.checkpoint.format.checksums import missing_file_error
from elasticzero.checkpoint.format.manifest import Manifest, ShardFile, from_json
from elasticzero.checkpoint.format.names import (
    MANIFEST_NAME,
    SUMS_SUFFIX,
    TAGS_DIRECTORY,
    is_tag,
    step_directory,
    step_of,
    tag_file_name,
    tag_of_file,
)
from elasticzero.checkpoint.format.strict_json import reason
from elasticzero.checkpoint.format.validation import check_committed
from elasticzero.checkpoint.steps.tag_files import read_tag
from elasticzero.checkpoint.storage.base import (
    Directory,
    Readable,
    Storage,
    out_of_reach,
    read_small,
)
from elasticzero.checkpoint.storage.urls import open_directory, open_storage
from elasticzero.concurrency import run_parallel
from elasticzero.errors import CheckpointDamaged, ElasticZeroError, StorageError, UserError
from elasticzero.text import list_text, print_error

MANIFEST_LIMIT_BYTES = 1 << 28
_MAX_LOOKS = 10
"""Maximum number of looks for a good step in a directory whose steps are being removed."""
FILES_AT_ONCE = 16
"""Maximum number of files whose sizes are requested at the same time."""
RESOLVABLE = (
    "The path or URL is that of a checkpoint directory (its newest good step is taken), "
    "of one step, or of a tag in it, as DIR/tags/best."
)
"""Description of the argument of `resolve`, for the help of commands."""
_IGNORED_NAMES = ("lost+found", TAGS_DIRECTORY)
"""Names that a new volume, or a directory whose steps were removed, may contain, which do not make
it foreign."""


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Locates one step in a checkpoint directory."""

    step: int
    name: str
    """Name of the step's directory."""
    storage: Storage


def read_manifest(storage: Readable, name: str = MANIFEST_NAME) -> Manifest:
    """Returns the manifest in a step's storage.

    Args:
        storage: The step's files.
        name: Name of the file, such as a snapshot's manifest, which knows one rank's file only.

    Raises:
        CheckpointDamaged: The manifest is missing or wrong.
    """
    data = manifest_bytes(storage, name)
    if data is None:
        raise CheckpointDamaged(
            f"{storage.where}/{name} is missing: this step was never committed, or "
            "was removed, as --keep removes old steps"
        )
    return parse_manifest(storage, data, name)


def manifest_bytes(storage: Readable, name: str = MANIFEST_NAME) -> bytes | None:
    """Returns the contents of a step's manifest, whatever they are; None: it does not exist.

    What replaces or removes the manifest says by these which one it means.
    """
    try:
        return read_small(storage, name, MANIFEST_LIMIT_BYTES)
    except FileNotFoundError:
        return None


def parse_manifest(storage: Readable, data: bytes, name: str = MANIFEST_NAME) -> Manifest:
    """Returns the manifest with these contents.

    Args:
        storage: The step's files.
        data: Contents of the manifest.
        name: Name of its file.

    Raises:
        CheckpointDamaged: The manifest is wrong, or of another step.
    """
    where = f"{storage.where}/{name}"
    manifest = from_json(data, where)
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


def step_error(storage: Readable) -> ElasticZeroError | None:
    """Returns why a step is not good; None: its manifest is valid and all its files have their
    sizes.

    This alone decides whether a step is good: every command, `load`, the agent's probe for the
    newest good step and retention call it. It reads no tensor; `elasticzero checkpoint verify` does
    so after it.
    """
    return examine(storage)[1]


def examine(storage: Readable) -> tuple[Manifest | None, ElasticZeroError | None]:
    """Returns (a step's manifest, why the step is not good), as `step_error` does; one is None."""
    try:
        manifest = read_manifest(storage)
        error = files_error(storage, manifest)
    except ElasticZeroError as failure:
        return None, failure
    return (manifest, None) if error is None else (None, error)


def files_error(storage: Readable, manifest: Manifest) -> ElasticZeroError | None:
    """Returns which file of a step is missing or has another size than its manifest says; None: all
    are right."""
    try:
        faults = run_parallel(
            manifest.files, lambda file: _file_fault(storage, file), threads=FILES_AT_ONCE
        )
    except ElasticZeroError as error:
        return error
    reason = next((reason for reason in faults if reason is not None), None)
    return None if reason is None else CheckpointDamaged(reason)


def step_error_text(storage: Readable) -> str | None:
    """Returns the message of `step_error`."""
    error = step_error(storage)
    return None if error is None else str(error)


def describe_step_error(error: ElasticZeroError) -> str:
    """Describes whether a step is damaged or only cannot be read, and why."""
    return f"{'cannot be read' if out_of_reach(error) else 'is damaged'} ({error})"


def _file_fault(storage: Readable, file: ShardFile) -> str | None:
    for name in (file.name, file.name + SUMS_SUFFIX):
        try:
            size = storage.size(name)
        except FileNotFoundError:
            return str(missing_file_error(storage, name))
        if name == file.name and size != file.bytes:
            return f"{storage.where}/{name} has {size} bytes, not {file.bytes}"
    return None


def steps(directory: Directory) -> list[StepInfo]:
    """Returns the committed steps of a checkpoint directory, newest first, good or not."""
    return [info for info in every_step(directory) if _has_manifest(info.storage)]


def uncommitted(directory: Directory) -> list[StepInfo]:
    """Returns steps' directories without a manifest, newest first: saves that failed or still
    run."""
    return [info for info in every_step(directory) if not _has_manifest(info.storage)]


def every_step(directory: Directory) -> list[StepInfo]:
    """Returns every step's directory, committed or not, newest first."""
    infos = [
        StepInfo(step, name, directory.step(name))
        for name in directory.names()
        if (step := step_of(name)) is not None
    ]
    return sorted(infos, key=lambda info: info.step, reverse=True)


def newest_good(directory: Directory, excluding: Collection[int] = ()) -> int | None:
    """Returns the newest step that is good by its files' sizes, or None."""
    good = _look(directory, excluding).good
    return None if good is None else good.step


def resolve(
    url: str | os.PathLike[str], log_line: Callable[[str], object] = print_error
) -> Storage:
    """Returns the good step that a path or URL means.

    The path is a step itself, a tag of one (`DIR/tags/best`), or a checkpoint directory, of which
    the newest good step is returned.

    Args:
        url: The path or URL.
        log_line: Receives one line about newer steps that are skipped.

    Raises:
        CheckpointDamaged: The path means one step, and that is not good.
        UserError: There is no good step.
        StorageError: A step might be good but cannot be read.
    """
    return resolve_manifest(url, log_line)[0]


def resolve_manifest(
    url: str | os.PathLike[str], log_line: Callable[[str], object] = print_error
) -> tuple[Storage, Manifest]:
    """Returns the step that `resolve` returns, and its manifest.

    Args:
        url: The path or URL.
        log_line: Receives one line about newer steps that are skipped.
    """
    storage, manifest = _find(url, log_line)
    if manifest is None:
        manifest, error = examine(storage)
        if error is not None:
            raise error
    assert manifest is not None
    return storage, manifest


def find(url: str | os.PathLike[str], log_line: Callable[[str], object] = print_error) -> Storage:
    """Resolves as `resolve` does, but returns one step's directory as it is, good or not."""
    return _find(url, log_line)[0]


def _find(
    url: str | os.PathLike[str], log_line: Callable[[str], object]
) -> tuple[Storage, Manifest | None]:
    """Returns (the step that `url` means, its manifest if it is known to be good)."""
    directory = open_directory(url)
    if (step := tagged(directory.where)) is not None:
        return step, None
    names = directory.names()
    in_a_step = step_of(directory.where.rsplit("/", 1)[-1]) is not None
    if MANIFEST_NAME in names or (names and in_a_step):
        return open_storage(url), None
    if in_a_step:
        raise UserError(
            f"{directory.where} does not exist, or was removed, as --keep removes old steps: give "
            "another step, or the checkpoint directory"
        )
    look = _look(directory)
    if look.good is not None:
        if look.skipped:
            text = "; ".join(
                f"step {step} {describe_step_error(why)}" for step, why in look.skipped
            )
            log_line(f"{text}; step {look.good.step} is used")
        return look.good.storage, look.manifest
    if not names:
        raise UserError(f"{directory.where} holds no checkpoint: it is empty or does not exist")
    skipped = look.skipped
    for _, error in skipped:
        if out_of_reach(error):
            raise error
    if look.is_changing:
        raise StorageError(
            f"the steps in {directory.where} are removed as fast as they are found: try again"
        )
    raise UserError(
        f"{directory.where} holds no good checkpoint "
        f"({len(skipped)} damaged; see `elasticzero checkpoint verify`)"
        if skipped
        else f"{directory.where} holds no checkpoint"
    )


@dataclass(frozen=True, slots=True)
class _Look:
    """Holds what was seen of the steps of a directory."""

    good: StepInfo | None
    """The newest good step."""
    skipped: tuple[tuple[int, ElasticZeroError], ...]
    """Newer steps that are committed and not good, and why."""
    manifest: Manifest | None = None
    """Manifest of the good step."""
    is_changing: bool = False
    """True if no look found a good step, and no two looks saw the same steps."""


def _look(directory: Directory, excluding: Collection[int] = ()) -> _Look:
    """Looks for the newest good step.

    Retention removes a step once a newer one is committed. A look that lists the old step and then
    finds it removed has not seen the newer one, so another look follows until two see the same.

    Args:
        directory: The checkpoint directory.
        excluding: Steps that are passed over.
    """
    before = None
    for _ in range(_MAX_LOOKS):
        skipped: list[tuple[int, ElasticZeroError]] = []
        infos = [info for info in every_step(directory) if info.step not in excluding]
        committed = []
        for info in infos:
            manifest, error = examine(info.storage)
            if error is None:
                return _Look(info, tuple(skipped), manifest)
            if _has_manifest(info.storage):
                skipped.append((info.step, error))
                committed.append(info.step)
        seen = ([info.step for info in infos], committed)
        if seen == before or len(committed) == len(infos):
            return _Look(None, tuple(skipped))
        before = seen
    return _Look(None, (), is_changing=True)


def was_removed(storage: Readable) -> bool:
    """Returns whether a step that was committed has no manifest any more."""
    try:
        storage.size(MANIFEST_NAME)
    except FileNotFoundError:
        return True
    except StorageError:
        pass
    return False


def tagged(where: str) -> Storage | None:
    """Returns the step that a tag names, for a path such as `DIR/tags/best` or that of its file.

    Returns None for any other path. Raises `UserError` if the step does not exist, and
    `CheckpointDamaged` if the tag's file is damaged.
    """
    folder, _, name = where.rpartition("/")
    above, _, last = folder.rpartition("/")
    tag = tag_of_file(name) or name
    if last != TAGS_DIRECTORY or above.endswith(":/") or not is_tag(tag):
        return None
    directory = open_directory(above or "/")
    step = read_tag(directory, tag)
    if step is None:
        return None
    storage = directory.step(step_directory(step))
    if not _has_manifest(storage):
        raise UserError(
            f"{folder}/{tag_file_name(tag)} names step {step}, which does not exist in "
            f"{directory.where}: load another step"
        )
    return storage


def check_writable(directory: Directory) -> None:
    """Makes the directory if it does not exist, and checks that it can be written.

    Raises `StorageError` if not, and `UserError` as `check_target` does.
    """
    check_outside_steps(directory.where)
    if tagged(directory.where) is None:
        directory.check_writable()
    check_target(directory)


def check_target(directory: Directory) -> None:
    """Raises `UserError` for a directory that no checkpoint may be written into.

    Such a directory lies in a step's directory, is a tag, or holds other things and no checkpoint.
    """
    check_outside_steps(directory.where)
    if (step := tagged(directory.where)) is not None:
        raise UserError(
            f"{directory.where} is a tag, of {step.where}: give the checkpoint directory, or, to "
            "go on from that step, a new directory into which its directory is copied"
        )
    names = [n for n in directory.names() if n[0] != "." and n not in _IGNORED_NAMES]
    if names and not any(step_of(name) is not None for name in names):
        held = list_text(sorted(names), 3)
        raise UserError(
            f"the checkpoint directory {directory.where} holds other things ({held}) and no "
            "checkpoints: give an empty or a new directory"
        )


def check_outside_steps(where: str) -> None:
    """Raises `UserError` for a path inside a step's directory."""
    for part in where.split("/"):
        if step_of(part) is not None:
            raise UserError(
                f"{where} lies in a step's directory ({part}): give the checkpoint directory "
                "above it, or another"
            )


def _has_manifest(storage: Storage) -> bool:
    """Returns whether a step is committed.

    A step that cannot be read counts as committed, because it is then damaged.
    """
    try:
        storage.size(MANIFEST_NAME)
    except FileNotFoundError:
        return False
    except StorageError:
        return True
    return True
