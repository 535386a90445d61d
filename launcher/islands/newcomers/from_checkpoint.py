"""Gives an island that has no checkpoint that of another one, or of the job before it had islands.

Nodes that start again may have other names than those that saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.rewrite.reshard import TargetShape, reshard
from elasticzero.checkpoint.steps.catalog import newest_good, read_manifest, steps
from elasticzero.checkpoint.storage.base import Storage
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import CheckpointDamaged, ElasticZeroError, UserError, one_line
from elasticzero.options.diloco import FOLDER


def adopt_checkpoint(url: str, island: str, workers: int, log_line: Callable[[str], None]) -> None:
    """Copies the checkpoint with which an island begins that has none of its own, if there is one.

    Args:
        url: The checkpoint directory of the job.
        island: The island's name.
        workers: Number of its workers, nearly.
        log_line: Receives a line about what was copied.

    Raises:
        UserError: There are checkpoints, and none can be taken.
        StorageError: The directory cannot be read.
    """
    target = open_directory(f"{url}/{FOLDER}/{island}")
    if newest_good(target) is not None:
        return
    candidates, errors = list[tuple[Manifest, Storage]](), list[str]()
    for folder in _folders(url):
        try:
            candidates += _newest_in(folder)
        except ElasticZeroError as error:
            errors.append(one_line(error))
    for _, source in sorted(candidates, key=_order, reverse=True):
        try:
            reshard(source, target, TargetShape(world_size=workers))
            log_line(f"{target.where} had no checkpoint: it begins with {source.where}")
            return
        except ElasticZeroError as error:
            errors.append(one_line(error))
    if errors:
        raise UserError(
            f"{target.where} has no checkpoint, and none of those of other islands can be taken "
            f"({errors[0]}): mend it, or remove what is damaged to begin without"
        )


def _folders(url: str) -> Iterator[str]:
    """Yields where checkpoints may be: those of the job itself, and of each island."""
    yield url
    for name in open_directory(f"{url}/{FOLDER}").names():
        yield f"{url}/{FOLDER}/{name}"


def _newest_in(folder: str) -> Iterator[tuple[Manifest, Storage]]:
    """Yields the newest good checkpoint of a directory, if it has any; raises `ElasticZeroError`
    where it has damaged ones alone."""
    directory = open_directory(folder)
    if (step := newest_good(directory)) is not None:
        storage = directory.step(step_directory(step))
        yield read_manifest(storage), storage
    elif steps(directory):
        raise CheckpointDamaged(f"{directory.where} has no step that is good")


def newest_of(folder: str) -> Iterator[Manifest]:
    """Yields the newest good checkpoint of a directory, if it has any; raises `ElasticZeroError`
    where it has damaged ones alone, or cannot be read."""
    yield from (manifest for manifest, _ in _newest_in(folder))


def committed_in(manifest: Manifest) -> int:
    """Returns the number of samples that were in committed rounds when a state was captured; 0 for
    one of no island."""
    island: Any = manifest.state.get("position", {}).get("island") or {}
    return int(island.get("left", {}).get("committed", 0))


def _order(candidate: tuple[Manifest, Storage]) -> tuple[bool, int, int, str]:
    """Returns by what checkpoints are compared: an island's before that of the job, then by samples
    in committed rounds, and by steps."""
    manifest, storage = candidate
    is_of_island = bool(manifest.state.get("position", {}).get("island"))
    return is_of_island, committed_in(manifest), manifest.step, storage.where
