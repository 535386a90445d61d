"""Decides which step a tag names.

Rules:
 Y1  A tag is part of the manifest of the step that was saved under it. Its file is written once
     that manifest exists: until then it names the older step, which is still there.
 Y2  A tag goes to the newest step that was saved under it, and never back to an older one that is
     good, whatever the order in which saves end. A writer looks again after it has written, so that
     of two writers the one with the older step mends what it may have overwritten.
 Y3  A step that a tag names is not removed by `--keep`; nor is one whose manifest has a tag that
     names no newer step, for its writer may be about to write the file, or was killed before it.
     The process that would have removed the step writes the file.
 Y4  Writing the file again changes nothing, so that a process that begins with a step writes the
     files that the step's manifest asks for.
Invariant: a tag's file names a step that is committed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.steps.tag_files import read_tag, write_tag
from elasticzero.checkpoint.storage.base import Directory, out_of_reach
from elasticzero.errors import CheckpointDamaged, StorageError

_TRIES = 8
"""Maximum number of times that a tag's file is written in one call, against other writers."""


def set_tags(directory: Directory, step: int, tags: Collection[str]) -> None:
    """Makes tags name a step that is committed, unless they name a newer one (Y2).

    Args:
        directory: The checkpoint directory.
        step: The committed step.
        tags: The tags that name it.

    Raises:
        StorageError: The step is not good, or a tag's file cannot be written.
    """
    if not tags:
        return
    if (error := catalog.step_error(directory.step(step_directory(step)))) is not None:
        raise StorageError(f"step {step} gets no tag, because it is not there whole: {error}")
    for tag in tags:
        _set(directory, step, tag)


def _set(directory: Directory, step: int, tag: str) -> None:
    for _ in range(_TRIES):
        named = _named(directory, tag)
        step = max(step, _newest_saved_under(directory, tag, newer_than=step))
        if named is not None and named > step and _is_good(directory, named):
            step = named
        if named == step:
            return
        write_tag(directory, tag, step)


def _named(directory: Directory, tag: str) -> int | None:
    """Returns the step that a tag names; None: no tag, or one that is to be written anew."""
    try:
        return read_tag(directory, tag)
    except CheckpointDamaged:
        return None


def _newest_saved_under(directory: Directory, tag: str, newer_than: int) -> int:
    """Returns the newest good step beyond `newer_than` whose manifest has the tag; -1: none.

    Args:
        directory: The checkpoint directory.
        tag: The tag.
        newer_than: Number of a step; only later ones are looked at.
    """
    for info in catalog.every_step(directory):
        if info.step <= newer_than:
            break
        try:
            if tag in catalog.read_manifest(info.storage).tags and _is_good(directory, info.step):
                return info.step
        except CheckpointDamaged:
            continue
    return -1


def _is_good(directory: Directory, step: int) -> bool:
    """Returns whether a step is good; raises the error if storage does not answer."""
    error = catalog.step_error(directory.step(step_directory(step)))
    if error is not None and out_of_reach(error):
        raise error
    return error is None


def unwritten_tags(manifest: Manifest, named: Mapping[str, int]) -> list[str]:
    """Returns the tags of a committed step whose files do not name it or a newer one. Pure.

    Args:
        manifest: Manifest of the step, which has its tags.
        named: The step that each tag names.
    """
    return [tag for tag in manifest.tags if named.get(tag, -1) < manifest.step]


def keep_for_tags(directory: Directory, manifest: Manifest, named: Mapping[str, int]) -> bool:
    """Returns whether a committed step that would be removed stays, with its tags written (Y3).

    Args:
        directory: The checkpoint directory.
        manifest: Manifest of the step, which has its tags.
        named: The step that each tag names.
    """
    tags = unwritten_tags(manifest, named)
    if not tags or not _is_good(directory, manifest.step):
        return False
    set_tags(directory, manifest.step, tags)
    return True
