"""Lends a snapshot of this node to an island that comes, while this node's workers train on.

Snapshots are replaced as training goes on, and the memory of one that is still read could not be
used again. So what is lent is a copy, which is removed once nobody has read it for a while. A node
lends one snapshot at a time, and only where its own work has room beside it.
"""

from __future__ import annotations

import itertools
import re
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from elasticzero.checkpoint.format.names import SUMS_SUFFIX, snapshot_manifest_name
from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.errors import StorageError
from elasticzero.launcher.islands.files import RoundFiles
from elasticzero.launcher.protocol.documents import Holding
from elasticzero.serialization import encode

LENT = "lent"
"""Folder of the copy, and of its files as they are served."""
SILENCE_S = 60.0
"""Seconds after which a copy is removed that nobody reads."""
SPARE = 2
"""Multiple of the copy's bytes that stay free beside it, for rounds and snapshots."""
_ASKED = re.compile(
    r"generation=(\d{1,18})&step=(\d{1,18})&world_size=(\d{1,9})&ranks=([\d,]{1,9999})"
)


def query_of(snapshot: Holding) -> str:
    """Returns the query of a request to lend some ranks' shards of a snapshot."""
    ranks = ",".join(map(str, snapshot.ranks))
    of = f"generation={snapshot.generation}&step={snapshot.step}"
    return f"{of}&world_size={snapshot.world_size}&ranks={ranks}"


def asked_in(query: str) -> Holding | None:
    """Returns what a request asks for; None: nothing."""
    asked = _ASKED.fullmatch(query)
    ranks = [] if asked is None else [int(rank) for rank in asked[4].split(",") if rank]
    if asked is None or not ranks:
        return None
    return Holding(
        generation=int(asked[1]), step=int(asked[2]), world_size=int(asked[3]), ranks=tuple(ranks)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loan:
    """Holds a copy."""

    of: Holding
    files: RoundFiles


class SnapshotLender:
    """Lends what this node holds of snapshots; callable from any thread."""

    def __init__(self, snapshots: SnapshotStore) -> None:
        """Begins with nothing lent.

        Args:
            snapshots: The node's snapshots.
        """
        self._snapshots = snapshots
        self._lock = threading.Lock()
        """Is held while a copy is made, or taken away."""
        self._loan: _Loan | None = None
        self._read_s = 0.0
        """When the copy was last asked for or read, on the monotonic clock."""
        self._numbers = itertools.count()
        """Numbers the folders of copies, of which one may still be removed."""

    def answer(self, asked: Holding | None) -> dict[str, Any]:
        """Returns what this node holds, and what it lends.

        Args:
            asked: What it is to lend; None: nothing.
        """
        if asked is not None:
            with self._lock, suppress(StorageError, OSError):
                self._lend(asked)
        loan = self._loan
        return {
            "held": encode(self._snapshots.held()),
            "lent": [] if loan is None else [encode(loan.of)],
        }

    def _lend(self, asked: Holding) -> None:
        """Makes a copy, unless there is one.

        Raises:
            FileNotFoundError: The snapshot was removed.
            StorageError: There is no room.
        """
        self._read_s = time.monotonic()
        if self._loan is not None:
            return
        of = asked.generation, asked.step
        shards = [ShardName(*of, rank, asked.world_size) for rank in asked.ranks]
        names = [self._snapshots.file_of(shard) for shard in shards]
        size = sum(
            (self._snapshots.path_of(shard) / name).stat().st_size
            for shard, name in zip(shards, names, strict=True)
        )
        root = self._snapshots.root_with(size, spare=SPARE * size)
        files = RoundFiles(root / LENT / str(next(self._numbers)))
        try:
            self._copy(shards, names, files)
        except BaseException:
            shutil.rmtree(files.root, ignore_errors=True)
            raise
        self._loan, self._read_s = _Loan(of=asked, files=files), time.monotonic()

    def _copy(self, shards: Sequence[ShardName], names: Sequence[str], files: RoundFiles) -> None:
        copy = DiskStorage(files.root, durable=False)
        for shard, name in zip(shards, names, strict=True):
            with self._snapshots.holding(shard, name) as source:
                seal = self._snapshots.read_seal(shard)
                copy.write(name, source.parts(sealed=True), size=len(source.data))
            copy.write(name + SUMS_SUFFIX, [seal.sums])
            copy.write(snapshot_manifest_name(shard.rank, shard.world_size), [seal.manifest])

    def open_file(self, name: str) -> BinaryIO:
        """Opens a file of what is lent; raises `FileNotFoundError` if there is none."""
        loan = self._loan
        if loan is None:
            raise FileNotFoundError(name)
        file = loan.files.open_file(name)
        self._read_s = time.monotonic()
        return file

    def turn(self, now_s: float) -> None:
        """Removes the copy once nobody reads it; returns at once.

        Args:
            now_s: Present time, on the monotonic clock.
        """
        if self._loan is None or not self._lock.acquire(blocking=False):
            return
        try:
            if now_s - self._read_s > SILENCE_S:
                self._take_away()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Removes the copy; one that is being made stays, and goes with the node's snapshots."""
        if self._lock.acquire(blocking=False):
            self._take_away()
            self._lock.release()

    def _take_away(self) -> None:
        loan, self._loan = self._loan, None
        if loan is not None:
            name = "elasticzero-lent"
            remove = threading.Thread(
                target=shutil.rmtree, args=(loan.files.root, True), name=name, daemon=True
            )
            remove.start()
