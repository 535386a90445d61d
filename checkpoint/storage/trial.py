"""Tries out a checkpoint directory: how fast it is, and whether it keeps what a save relies on."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass

from elasticzero.checkpoint.storage.base import Directory, Storage
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import ElasticZeroError

TRIAL_BYTES = 16 << 20
_DATA, _ONCE = "data", "once"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageTrial:
    """Holds what a trial of a checkpoint directory has shown."""

    size_bytes: int
    """Number of bytes that were written and read."""
    write_s: float
    """Seconds until the file was durable and had its name."""
    read_s: float
    same: bool
    """True if the bytes that were read are those that were written last."""
    exclusive: bool
    """True if a second file of a name was refused, as the commit of a checkpoint needs it."""
    leftovers: tuple[str, ...]
    """Names of other files that the writes have left."""


def try_storage(url: str, size_bytes: int = TRIAL_BYTES) -> StorageTrial:
    """Writes, replaces and reads a file in a directory of its own, and removes both.

    Raises `StorageError` if the directory cannot be written or read, and `UserError` for an invalid
    URL.
    """
    directory = open_directory(url)
    name = f".trial-{os.getpid()}-{os.urandom(4).hex()}"
    storage = directory.make(name)
    try:
        return _tried(url, name, storage, size_bytes)
    finally:
        _remove(directory, name, storage)


def _tried(url: str, name: str, storage: Storage, size_bytes: int) -> StorageTrial:
    old, new = os.urandom(size_bytes), os.urandom(size_bytes)
    storage.write(_DATA, [old], size=size_bytes, cached=False)
    began_s = time.perf_counter()
    storage.write(_DATA, [new], size=size_bytes, cached=False)
    written_s = time.perf_counter()
    content = memoryview(bytearray(size_bytes))
    count = storage.read_into(_DATA, 0, content)
    read_s = time.perf_counter()
    exclusive = storage.create_exclusive(_ONCE, b"first")
    exclusive &= not storage.create_exclusive(_ONCE, b"second")
    if "://" in storage.where:
        from elasticzero.checkpoint.storage.object_store import refuses_second_put

        exclusive &= refuses_second_put(f"{url.rstrip('/')}/{name}", _ONCE)
    return StorageTrial(
        size_bytes=size_bytes,
        write_s=written_s - began_s,
        read_s=read_s - written_s,
        same=count == size_bytes and content == new,
        exclusive=exclusive,
        leftovers=tuple(other for other in storage.names() if other not in (_DATA, _ONCE)),
    )


def _remove(directory: Directory, name: str, storage: Storage) -> None:
    with suppress(ElasticZeroError):
        for file in storage.names():
            storage.remove(file)
        directory.remove(name)
