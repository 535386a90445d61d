"""The page cache, for loads from a disk that nobody has read before."""

from __future__ import annotations

import os
from pathlib import Path


def forget(folder: Path) -> None:
    """Let the page cache drop a folder's files (those on tmpfs stay: they have no other place)."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
