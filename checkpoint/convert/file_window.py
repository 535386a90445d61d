"""Presents a range of bytes of a stored file as a file of its own, for readers that need one."""

from __future__ import annotations

import io
from typing import Any

from elasticzero.checkpoint.storage.base import Readable


class FileWindow(io.RawIOBase):
    """Reads a range of bytes of a stored file; nothing is kept in memory."""

    def __init__(self, storage: Readable, file: str, start: int, size: int) -> None:
        """Opens nothing; each read asks the storage.

        Args:
            storage: Where the file is.
            file: Name of the file.
            start: First byte of the range.
            size: Number of bytes of the range.
        """
        self._storage = storage
        self._file = file
        self._start = start
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}
        self._position = max(0, base[whence] + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size - self._position))
        start = self._start + self._position
        done = self._storage.read_into(self._file, start, view[:count]) if count else 0
        self._position += done
        return done


class ItemFile:
    """Presents a range of bytes of a stored file as the one file of a directory."""

    def __init__(self, storage: Readable, file: str, start: int, size: int) -> None:
        """Opens nothing; each read asks the storage.

        Args:
            storage: Where the file is.
            file: Name of the file, and of the one that is presented.
            start: First byte of the range.
            size: Number of bytes of the range.
        """
        self._storage, self._file = storage, file
        self._start, self._size = start, size

    @property
    def where(self) -> str:
        return self._storage.where

    def size(self, name: str) -> int:
        return max(0, min(self._size, self._storage.size(self._file) - self._start))

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        left, views = max(0, self._size - start), []
        for buffer in buffers:
            views.append(buffer[: min(left, len(buffer))])
            left -= len(views[-1])
        return self._storage.read_into(self._file, self._start + start, *views)
