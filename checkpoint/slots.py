"""Files of shared memory that hold one shard each and are used in turn.

A slot's file stays for good, so its memory is allocated once. What it holds is made visible by a
hard link in a snapshot's directory, and whoever still reads it while that directory may go keeps a
link of their own: a slot that nobody links is free. Removing a snapshot's directory therefore gives
its slots back, in whatever process that happens, and none is ever written while somebody reads it.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

from elasticzero.checkpoint.disk import complaining
from elasticzero.checkpoint.storage import explain
from elasticzero.errors import StorageError

SLOTS = "slots"
"""The folder of the slots' files, beside the snapshots."""
_GRAIN_BYTES = 2 << 20
"""A mapping is this much larger than what it holds at most, so that a header that grows by some
bytes needs no new one."""


class SlotsInUse(StorageError):
    """What both slots hold is still read, or must stay."""


class Slot:
    """One file, mapped; the mapping stays while the file is resized within it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._map: mmap.mmap | None = None
        self._mapped_bytes = 0

    def free(self) -> bool:
        """Whether nobody links what it holds."""
        return os.fstat(self._fd).st_nlink <= 1

    @property
    def bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def resize(self, size: int) -> None:
        """Give the file `size` bytes, all of them allocated; raises `OSError`."""
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
                os.ftruncate(self._fd, before)  # a hole would kill who writes into it later
                raise

    def view(self) -> memoryview:
        """The bytes it holds, writable, in place; valid until it grows."""
        assert self._map is not None
        return memoryview(self._map)[: self.bytes]

    def link(self, path: Path) -> None:
        """Make what it holds visible under `path`, in place of what is there."""
        path.unlink(missing_ok=True)
        os.link(self.path, path)

    def close(self) -> None:
        """Close the descriptor; views stay valid until they are dropped."""
        os.close(self._fd)


class Slots:
    """Two slots of one writer: one holds its last shard while the other takes the next."""

    def __init__(self, root: Path, name: str) -> None:
        """`root`: of the node's snapshots. `name`: the writer's own on this node."""
        self._folder = root / SLOTS
        self._name = name
        self._slots: list[Slot] = []

    def reserve(self, size: int) -> list[Slot]:
        """Allocate and map the free ones of both slots for shards of `size` bytes, and give them.

        Raises `StorageError` when the memory is not there.
        """
        while len(self._slots) < 2:
            self._slots.append(self._open(len(self._slots)))
        free = [slot for slot in self._slots if slot.free()]
        for slot in free:
            self._resize(slot, size)
        return free

    def take(self, size: int, *, extra: bool = False) -> Slot:
        """A free slot of `size` bytes. `extra`: a third one, if need be; it goes once it is free.

        Raises `SlotsInUse` when none is free, and `StorageError` when there is no memory.
        """
        self._drop_extra()
        for number in range(3 if extra else 2):
            if number == len(self._slots):
                self._slots.append(self._open(number))
            if self._slots[number].free():
                self._resize(self._slots[number], size)
                return self._slots[number]
        raise SlotsInUse(f"both slots of {self._name} in {self._folder} are in use")

    def _drop_extra(self) -> None:
        """Give a third slot's memory back, of this process or of one before it."""
        while len(self._slots) > 2 and self._slots[2].free():
            self._slots.pop().close()
        path = self._path(2)
        with suppress(FileNotFoundError):
            if len(self._slots) <= 2 and path.stat().st_nlink <= 1:
                path.unlink()

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def _open(self, number: int) -> Slot:
        with complaining(f"cannot make a slot in {self._folder}", or_missing=True):
            self._folder.mkdir(parents=True, exist_ok=True)
            return Slot(self._path(number))

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}-{number}"

    def _resize(self, slot: Slot, size: int) -> None:
        try:
            slot.resize(size)
        except OSError as error:
            raise StorageError(
                f"{(size >> 20) + 1} MiB of shared memory for a snapshot cannot be had in "
                f"{self._folder}: {explain(error)}"
            ) from error
