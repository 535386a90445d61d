"""Keeps the files of the rounds in this node's shared memory: outer states, contributions, means.

Each is a flat array, in a file that is whole under its name: what is being made has another name
until then. Workers write contributions, and read outer parameters; other agents read by range what
`open_file` opens.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from elasticzero.ipc.round_wire import Bytes
from elasticzero.ipc.rounds import FragmentShape

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")
_UNFINISHED = ".unfinished"
_NUMBERS = itertools.count()
"""Numbers files that are being made: of one name there may be several."""
_READ_BYTES = 16 << 20


class RoundFiles:
    """Makes, opens and removes files of the rounds."""

    def __init__(self, root: Path) -> None:
        """Uses a directory, which is made if it is missing, and empty then."""
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        for path in root.iterdir():
            path.unlink()
        self._opened_s: dict[str, float] = {}
        """When each file was last opened for another agent, by the monotonic clock."""

    def path(self, name: str) -> Path:
        return self.root / name

    def open_file(self, name: str) -> BinaryIO:
        """Opens a whole file for another agent; raises `FileNotFoundError` if there is none."""
        if not _NAME.match(name) or name.endswith(_UNFINISHED):
            raise FileNotFoundError(name)
        self._opened_s[name] = time.monotonic()
        return open(os.open(self.path(name), os.O_RDONLY | os.O_NOFOLLOW), "rb")

    def was_read(self, name: str, within_s: float) -> bool:
        """Returns whether another agent has read a part of a file in the last seconds."""
        return time.monotonic() - self._opened_s.get(name, -math.inf) <= within_s

    def data(self, name: str, nbytes: int) -> Bytes:
        """Maps the bytes of a file, to be read.

        Args:
            name: Name of the file.
            nbytes: Its size.

        Raises:
            OSError: There is no such file.
            ValueError: It has another size.
        """
        if self.path(name).stat().st_size != nbytes:
            raise ValueError(f"{self.path(name)} has not {nbytes} bytes")
        if not nbytes:
            return np.empty(0, np.uint8)
        mapped: Bytes = np.memmap(self.path(name), np.uint8, "r")
        return mapped

    @contextmanager
    def making(self, name: str, nbytes: int) -> Iterator[Bytes]:
        """Yields the bytes of a new file, zeros, which has its name once the context ends without
        an error.

        Args:
            name: Name of the file.
            nbytes: Its size.
        """
        unfinished = self.path(f"{name}.{next(_NUMBERS)}{_UNFINISHED}")
        try:
            with open(unfinished, "wb") as file:
                if nbytes:  # memory that is not there must be an error, and no signal
                    os.posix_fallocate(file.fileno(), 0, nbytes)
            mapped: Bytes = np.empty(0, np.uint8)
            if nbytes:
                mapped = np.memmap(unfinished, np.uint8, "r+")
            yield mapped
        except BaseException:
            with suppress(FileNotFoundError):
                unfinished.unlink()
            raise
        unfinished.rename(self.path(name))

    def keep_only(self, names: Collection[str], beginnings: tuple[str, ...] = ()) -> None:
        """Removes all files but some, and those that are being made.

        Args:
            names: Names of files that stay.
            beginnings: What names begin with of others that stay.
        """
        for path in self.root.iterdir():
            stays = path.name in names or path.name.startswith(beginnings)
            if not stays and not path.name.endswith(_UNFINISHED):
                self._opened_s.pop(path.name, None)
                with suppress(FileNotFoundError):
                    path.unlink()

    def remove(self, beginning: str) -> None:
        """Removes all files whose names begin so, but those that are being made."""
        for path in self.root.iterdir():
            if path.name.startswith(beginning) and not path.name.endswith(_UNFINISHED):
                path.unlink(missing_ok=True)

    def digest(self, *names: str) -> str:
        """Returns the digest of the bytes of files, one after the other."""
        hasher = xxhash.xxh3_128()
        for name in names:
            with open(self.path(name), "rb") as file:
                while part := file.read(_READ_BYTES):
                    hasher.update(part)
        return hasher.hexdigest()


def size_of(shape: FragmentShape) -> int:
    """Returns the bytes of a fragment's elements."""
    return shape.elements * np.dtype(shape.dtype).itemsize
