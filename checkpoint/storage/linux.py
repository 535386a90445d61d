"""Calls Linux functions that Python's `os` lacks, if the kernel and file system have them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_FALLOC_KEEP_SIZE = 1
_SYNC_FILE_RANGE_WRITE = 2
_TMPFS_MAGIC = 0x01021994
_STATFS_BYTES = 256
"""Size of a buffer that exceeds the structure; its first word is the kind of file system."""
UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Error numbers by which a kernel or a file system says that it lacks a call."""


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def rename_new(source: Path, target: Path) -> None:
    """Renames a file atomically; raises `FileExistsError` if `target` exists."""
    _rename(source, target, _RENAME_NOREPLACE)


def exchange(one: Path, other: Path) -> None:
    """Gives each of two files the other's name, atomically; raises `FileNotFoundError` if one is
    gone."""
    _rename(one, other, _RENAME_EXCHANGE)


def _rename(source: Path, target: Path, flag: int) -> None:
    _call(
        "renameat2",
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(source)),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(target)),
        ctypes.c_uint(flag),
    )


def reserve(fd: int, size: int) -> None:
    """Reserves a file's space on the disk, so that a full disk is noticed before the writing.

    It does nothing in memory, where its pages would be cleared first, which takes a quarter of the
    writing.
    """
    if _is_memory(fd):
        return
    mode, start = ctypes.c_int(_FALLOC_KEEP_SIZE), ctypes.c_int64(0)
    _try("fallocate", ctypes.c_int(fd), mode, start, ctypes.c_int64(size))


def start_writeback(fd: int, start: int, size: int) -> None:
    """Makes the kernel begin to write a range to the disk; does not wait for it.

    Args:
        fd: The file.
        start: Position of the first byte.
        size: Number of bytes.
    """
    at, count = ctypes.c_int64(start), ctypes.c_int64(size)
    flags = ctypes.c_uint(_SYNC_FILE_RANGE_WRITE)
    _try("sync_file_range", ctypes.c_int(fd), at, count, flags)


def set_direct(fd: int, direct: bool) -> bool:
    """Switches a file's writes past the page cache, or through it again; False if that is not
    supported."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def _is_memory(fd: int) -> bool:
    about = ctypes.create_string_buffer(_STATFS_BYTES)
    _try("fstatfs", ctypes.c_int(fd), about)
    kind = ctypes.sizeof(ctypes.c_long)
    return int.from_bytes(about.raw[:kind], sys.byteorder) == _TMPFS_MAGIC


def _try(name: str, *arguments: object) -> None:
    try:
        _call(name, *arguments)
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.ESPIPE, errno.ENODEV):
            raise


def _call(name: str, *arguments: object) -> None:
    function = getattr(_libc(), name, None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
