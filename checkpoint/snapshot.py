"""The RAM tier as an agent sees it: what stands whole in this node's shared memory.

`<root>/gen-<generation>/step-000000001200/` holds the same shard and checksum files as a
checkpoint, and one manifest for each rank that wrote here, created last.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from elasticzero.checkpoint.commit import read_manifest
from elasticzero.checkpoint.manifest import (
    SUMS_SUFFIX,
    file_name,
    snapshot_manifest_name,
    step_directory,
    step_of,
)
from elasticzero.checkpoint.storage import DiskStorage
from elasticzero.errors import ElasticZeroError

_GENERATION = re.compile(r"gen-(\d{1,18})")
_MANIFEST = re.compile(r"manifest-rank-(\d{5,9})-of-(\d{5,9})\.json")
_SHARD = re.compile(r"rank-\d{5,9}-of-\d{5,9}-[A-Za-z0-9_-]{1,64}\.safetensors(\.sums)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSnapshot:
    """The part of one snapshot that lies on this node."""

    generation: int
    step: int
    ranks: tuple[int, ...]
    """Whose shards are here, whole; of the world that wrote the snapshot."""
    world_size: int


class SnapshotStore:
    """This node's snapshots, in a directory of shared memory that the agent owns."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, generation: int, step: int) -> Path:
        """The directory of one snapshot, there or not."""
        return self.root / f"gen-{generation}" / step_directory(step)

    def held(self) -> list[HeldSnapshot]:
        """Every snapshot of which some rank's shard stands here whole, oldest first."""
        found = []
        for generation in self._generations():
            for name in _names(self.root / f"gen-{generation}"):
                step = step_of(name)
                if step is not None:
                    found += _held(self.path(generation, step), generation, step)
        return sorted(found, key=lambda h: (h.generation, h.step))

    def keep_only(self, generation: int, step: int) -> None:
        """Remove every snapshot but this one, if it is here."""
        for other in self._generations():
            folder = self.root / f"gen-{other}"
            for name in _names(folder):
                if (other, name) != (generation, step_directory(step)):
                    shutil.rmtree(folder / name, ignore_errors=True)
            with suppress(OSError):
                folder.rmdir()

    def clear(self) -> None:
        """Remove every snapshot; the root itself stays."""
        for generation in self._generations():
            shutil.rmtree(self.root / f"gen-{generation}", ignore_errors=True)

    def open_file(self, generation: int, step: int, name: str) -> BinaryIO:
        """Open one of a snapshot's files to read; `FileNotFoundError` for any other name."""
        if not (_SHARD.fullmatch(name) or _MANIFEST.fullmatch(name)) or min(generation, step) < 0:
            raise FileNotFoundError(f"a snapshot has no file {name!r}")
        path = self.path(generation, step) / name
        if path.is_symlink():
            raise FileNotFoundError(f"{name!r} is a link, which no snapshot has")
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")

    def _generations(self) -> list[int]:
        matches = (_GENERATION.fullmatch(name) for name in _names(self.root))
        return sorted(int(match[1]) for match in matches if match)


def _held(path: Path, generation: int, step: int) -> list[HeldSnapshot]:
    ranks: dict[int, list[int]] = {}
    storage = DiskStorage(path, durable=False)
    for name in _names(path):
        if match := _MANIFEST.fullmatch(name):
            rank, world = int(match[1]), int(match[2])
            if name == snapshot_manifest_name(rank, world) and _whole(storage, name, rank, world):
                ranks.setdefault(world, []).append(rank)
    return [
        HeldSnapshot(
            generation=generation, step=step, ranks=tuple(sorted(of_world)), world_size=world
        )
        for world, of_world in sorted(ranks.items())
    ]


def _whole(storage: DiskStorage, name: str, rank: int, world_size: int) -> bool:
    try:
        manifest = read_manifest(storage, name)
        file = manifest.files[rank]
        return (
            file.name == file_name(rank, world_size, manifest.token)
            and storage.size(file.name) == file.bytes
            and storage.size(file.name + SUMS_SUFFIX) > 0
        )
    except (ElasticZeroError, FileNotFoundError, IndexError):
        return False


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []
