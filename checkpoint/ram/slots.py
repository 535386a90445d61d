"""Manages the slots: files of shared memory that each hold one shard and are used in turn.

A slot's file is never deleted, so its memory is allocated once. A hard link in a snapshot's
directory makes its contents visible. A process that reads them while that directory may be removed
holds a link of its own. A slot without links is free. Removing a snapshot's directory, in whichever
process, therefore frees its slots, and no slot is written while a process reads it.

Where shared memory is short, a slot lies on a disk instead, for as long as its writer runs.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

from elasticzero.checkpoint.storage.base import as_storage_error, explain
from elasticzero.errors import StorageError

SLOTS = "slots"
"""Name of the folder of the slots' files, beside the snapshots."""
_GRAIN_BYTES = 2 << 20
"""A mapping's size is a multiple of this, so that a header that grows by some bytes needs no new
mapping."""


HEADROOM_BYTES = 1 << 20
"""Bytes of shared memory that stay free for the small files beside the slots."""


class SlotsInUse(StorageError):
    """Reports that both slots of a writer hold shards that are still read or must stay."""


class MemorySlot:
    """Maps one file; the mapping stays while the file is resized within it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._map: mmap.mmap | None = None
        self._mapped_bytes = 0
        self.closed = False

    @property
    def root(self) -> Path:
        """Returns the directory of the node's snapshots that contains the slot."""
        return self.path.parent.parent

    def free(self) -> bool:
        """Returns whether no link to its contents exists."""
        return os.fstat(self._fd).st_nlink <= 1

    @property
    def bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def resize(self, size: int) -> None:
        """Resizes the file and allocates all of its `size` bytes; raises `OSError`."""
        if size > self._mapped_bytes:
            mapped = -(-size // _GRAIN_BYTES) * _GRAIN_BYTES
            os.posix_fallocate(self._fd, 0, mapped)
            self._map = mmap.mmap(self._fd, mapped)
            self._mapped_bytes = mapped
        before = self.bytes
        os.ftruncate(self._fd, size)
        if before < size:
            try:
                os.posix_fallocate(self._fd, 0, size)
            except OSError:
                os.ftruncate(self._fd, before)  # a write into a hole would kill the process
                raise

    def view(self) -> memoryview:
        """Returns the slot's bytes, writable, in place; the view is valid until the slot grows."""
        assert self._map is not None
        return memoryview(self._map)[: self.bytes]

    def link(self, path: Path) -> None:
        """Makes the contents visible under `path`, in place of the file there."""
        path.unlink(missing_ok=True)
        os.link(self.path, path)

    def close(self) -> None:
        """Closes the descriptor; views stay valid until they are dropped."""
        os.close(self._fd)
        self.closed = True

    def release(self) -> None:
        """Frees the memory of a free slot and closes it for good."""
        self.path.unlink(missing_ok=True)
        self._map = None
        self.close()


class Slots:
    """Provides one writer with two slots: one holds its last shard while the other takes the
    next."""

    def __init__(self, root: Path, name: str, overflow: Path | None = None) -> None:
        """Takes the places of the slots' files.

        Args:
            root: The directory of the node's snapshots.
            name: Unique for the writer on this node.
            overflow: A directory on a disk, for slots that find no room in `root`; None: there is
                none.
        """
        self._roots: tuple[Path, ...] = (root,) if overflow is None else (root, overflow)
        self._name = name
        self._slots: list[MemorySlot] = []

    def reserve(self, size: int) -> list[MemorySlot]:
        """Allocates and maps the free slots among the first two for shards of `size` bytes; returns
        them.

        Raises `StorageError` if there is no memory.
        """
        while len(self._slots) < 2:
            self._slots.append(self._open(len(self._slots)))
        free = [number for number in range(2) if self._slots[number].free()]
        return [self._resized(number, size) for number in free]

    def take(self, size: int, *, extra: bool = False) -> MemorySlot:
        """Returns a free slot of `size` bytes.

        Args:
            size: Size of the shard in bytes.
            extra: Whether to allow a third slot, which is removed once it is free.

        Raises:
            SlotsInUse: No slot is free.
            StorageError: There is no memory.
        """
        self._drop_extra()
        for number in range(3 if extra else 2):
            if number == len(self._slots):
                self._slots.append(self._open(number))
            if self._slots[number].free():
                return self._resized(number, size)
        raise SlotsInUse(f"both slots of {self._name} in {self._roots[0] / SLOTS} are in use")

    def _drop_extra(self) -> None:
        """Frees the memory of a third slot, whether this process made it or one before it."""
        while len(self._slots) > 2 and self._slots[2].free():
            self._slots.pop().close()
        for root in self._roots:
            path = self._path(2, root)
            with suppress(FileNotFoundError):
                if len(self._slots) <= 2 and path.stat().st_nlink <= 1:
                    path.unlink()

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def _open(self, number: int) -> MemorySlot:
        """Opens a slot where its file exists, or else in shared memory."""
        there = [root for root in self._roots if self._path(number, root).exists()]
        return self._open_in(there[0] if there else self._roots[0], number)

    def _open_in(self, root: Path, number: int) -> MemorySlot:
        with as_storage_error(f"cannot make a slot in {root / SLOTS}", or_missing=True):
            (root / SLOTS).mkdir(parents=True, exist_ok=True)
            return MemorySlot(self._path(number, root))

    def _path(self, number: int, root: Path) -> Path:
        return root / SLOTS / f"{self._name}-{number}"

    def _resized(self, number: int, size: int) -> MemorySlot:
        """Returns a free slot with `size` bytes, moved to the disk if shared memory has no room for
        it."""
        slot = self._slots[number]
        movable = len(self._roots) > 1 and slot.root == self._roots[0]
        try:
            slot.resize(size)
            if not movable or free_bytes(slot.root) >= HEADROOM_BYTES:
                return slot
        except OSError as error:
            if not movable:
                raise _allocation_error(slot, size, error) from error
        slot.release()
        self._slots[number] = moved = self._open_in(self._roots[1], number)
        try:
            moved.resize(size)
        except OSError as error:
            raise _allocation_error(moved, size, error) from error
        return moved


def release_free_slots(root: Path, prefix: str) -> None:
    """Frees the memory of those slots in a directory of snapshots whose names begin with `prefix`
    and that hold nothing; no process may use them any more."""
    with suppress(FileNotFoundError):
        for entry in os.scandir(root / SLOTS):
            if entry.name.startswith(prefix) and os.stat(entry.path).st_nlink <= 1:
                os.unlink(entry.path)


def free_bytes(folder: Path) -> int:
    """Returns the free bytes of a directory's file system."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def allocated_bytes(root: Path) -> int:
    """Returns how many bytes the slots in a directory of snapshots take."""
    with suppress(FileNotFoundError):
        return sum(entry.stat().st_blocks * 512 for entry in os.scandir(root / SLOTS))
    return 0


def _allocation_error(slot: MemorySlot, size: int, error: OSError) -> StorageError:
    return StorageError(
        f"cannot allocate {(size >> 20) + 1} MiB for a snapshot in {slot.path.parent}: "
        f"{explain(error)}"
    )
