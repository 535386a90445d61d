"""Gives an island that has no checkpoint that of another one, or of the job before it had islands.

Nodes that start again may have other names than those that saved, and a node may come for the first
time: it begins with the inner optimizer of another island then. The outer parameters it takes from
the other islands in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.rewrite.reshard import TargetShape, reshard
from elasticzero.checkpoint.steps.catalog import newest_good, read_manifest
from elasticzero.checkpoint.storage.base import Storage
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import ElasticZeroError, one_line

FOLDER = "islands"
"""Folder of the islands' checkpoints in the directory of the job's."""


def adopt_checkpoint(url: str, node: str, workers: int, log_line: Callable[[str], None]) -> None:
    """Copies the checkpoint with which a node begins that has none of its own, if there is one.

    Args:
        url: The checkpoint directory of the job.
        node: The node's name.
        workers: Number of its workers.
        log_line: Receives a line about what was copied, or why nothing was.
    """
    try:
        target = open_directory(f"{url}/{FOLDER}/{node}")
        if newest_good(target) is not None:
            return
        source = max(_candidates(url), key=_order, default=None)
        if source is None:
            return
        log_line(f"{target.where} has no checkpoint: it begins with {source[1].where}")
        reshard(source[1], target, TargetShape(world_size=workers))
    except ElasticZeroError as error:
        log_line(
            f"island {node} begins without a checkpoint, as that of another one cannot be taken: "
            f"{one_line(error)}"
        )


def _candidates(url: str) -> Iterator[tuple[Manifest, Storage]]:
    """Yields the newest good checkpoint of each island, and of the job itself."""
    folders = [f"{url}/{FOLDER}/{name}" for name in open_directory(f"{url}/{FOLDER}").names()]
    for folder in (url, *folders):
        directory = open_directory(folder)
        if (step := newest_good(directory)) is not None:
            storage = directory.step(step_directory(step))
            yield read_manifest(storage), storage


def _order(candidate: tuple[Manifest, Storage]) -> tuple[bool, int, int, str]:
    """Returns by what checkpoints are compared: an island's before that of the job, then by samples
    in committed rounds, and by steps."""
    manifest, storage = candidate
    island: Any = manifest.state.get("position", {}).get("island") or {}
    committed = island.get("left", {}).get("committed", 0)
    return bool(island), committed, manifest.step, storage.where
