"""The machine's memory: warm before anything is timed, and without a file's pages where a load is
to be cold."""

from __future__ import annotations

import mmap
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


def warm_memory(of: int = 1) -> None:
    """Touch half of the free memory, so that what is timed next finds it at hand: this process's
    part, where `of` of them do so now.

    A virtual machine gets a page from its host when it first touches it, and gives free ones back:
    a file written to memory would be timed by its luck, many times over.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    mmap.mmap(-1, free // (2 * of), flags=flags).close()
