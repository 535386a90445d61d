"""Lends a snapshot of this node to an island that comes, while this node's workers train on.

Snapshots are replaced as training goes on, and the memory of one that is still read could not be
used again. So what is lent is a copy, which is removed once nobody has read it for a while. A node
lends one snapshot at a time.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from contextlib import suppress
from typing import Any, BinaryIO

from elasticzero.checkpoint.format.names import SUMS_SUFFIX, snapshot_manifest_name
from elasticzero.checkpoint.ram.store import HeldSnapshot, ShardName, SnapshotStore
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.errors import StorageError
from elasticzero.launcher.islands.files import RoundFiles
from elasticzero.serialization import encode

LENT = "lent"
"""Folder of the copy, and of its files as they are served."""
_WANTED = re.compile(r"generation=(\d{1,18})&step=(\d{1,18})")
SILENCE_S = 20.0
"""Seconds after which a copy is removed that nobody reads."""


def wanted_in(query: str) -> tuple[int, int] | None:
    """Returns the generation and step that a request names, `generation=3&step=40`; None: it names
    none."""
    asked = _WANTED.fullmatch(query)
    return (int(asked[1]), int(asked[2])) if asked else None


class SnapshotLender:
    """Lends what this node holds of snapshots; callable from any thread."""

    def __init__(self, snapshots: SnapshotStore) -> None:
        """Begins with nothing lent.

        Args:
            snapshots: The node's snapshots.
        """
        self._snapshots = snapshots
        self._lock = threading.Lock()
        self._lent: HeldSnapshot | None = None
        self._files: RoundFiles | None = None
        """Files of what is lent; None: nothing is."""
        self._read_s = 0.0
        """When it was last asked for or read, on the monotonic clock."""

    def answer(self, asked: tuple[int, int] | None) -> dict[str, Any]:
        """Returns what this node holds, and what it lends.

        Args:
            asked: Generation and step of the snapshot that it is to lend; None: none.
        """
        if asked is not None:
            with self._lock:
                self._lend(*asked)
        return {"held": encode(self._snapshots.held()), "lent": encode(self._lent)}

    def _lend(self, generation: int, step: int) -> None:
        """Makes a copy of a snapshot, unless another one is being read, or memory is short."""
        lent = self._lent
        if lent is not None and (lent.generation, lent.step) == (generation, step):
            self._read_s = time.monotonic()
        elif lent is None:
            for held in self._snapshots.held():
                if (held.generation, held.step) == (generation, step):
                    with suppress(StorageError, FileNotFoundError):
                        self._copy(held)

    def _copy(self, held: HeldSnapshot) -> None:
        """Copies what this node has of a snapshot, which may be removed meanwhile.

        Args:
            held: The snapshot.

        Raises:
            FileNotFoundError: It was removed.
            StorageError: There is no memory.
        """
        snapshots, of = self._snapshots, (held.generation, held.step)
        shards = [ShardName(*of, rank, held.world_size) for rank in held.ranks]
        names = {shard: snapshots.file_of(shard) for shard in shards}
        size = sum((snapshots.path_of(s) / name).stat().st_size for s, name in names.items())
        files = RoundFiles(snapshots.root_with(size) / LENT)
        copy = DiskStorage(files.root, durable=False)
        try:
            for shard, name in names.items():
                with snapshots.holding(shard, name) as source:
                    seal = snapshots.read_seal(shard)
                    copy.write(name, source.parts(sealed=True), size=len(source.data))
                copy.write(name + SUMS_SUFFIX, [seal.sums])
                copy.write(snapshot_manifest_name(shard.rank, shard.world_size), [seal.manifest])
        except BaseException:
            shutil.rmtree(files.root, ignore_errors=True)
            raise
        self._lent, self._files, self._read_s = held, files, time.monotonic()

    def open_file(self, name: str) -> BinaryIO:
        """Opens a file of what is lent; raises `FileNotFoundError` if there is none."""
        files, self._read_s = self._files, time.monotonic()
        if files is None:
            raise FileNotFoundError(name)
        return files.open_file(name)

    def turn(self, now_s: float) -> None:
        """Removes the copy once nobody reads it.

        Args:
            now_s: Present time, on the monotonic clock.
        """
        if self._lent is not None and now_s - self._read_s > SILENCE_S:
            self.close()

    def close(self) -> None:
        """Removes the copy."""
        with self._lock:
            files, self._files, self._lent = self._files, None, None
        if files is not None:
            shutil.rmtree(files.root, ignore_errors=True)
