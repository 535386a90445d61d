"""Checkpoints in object stores and other places that fsspec reaches by URL."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from elasticzero.checkpoint.storage import Bytes, explain
from elasticzero.errors import StorageError, UserError

_READ_BYTES = 16 << 20
_OBJECT_STORES = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "memory"}
)
"""Where directories are only parts of names."""


class ObjectStorage:
    """One step's files under a URL."""

    def __init__(self, fs: Any, root: str, where: str) -> None:
        """`fs`: of fsspec; `root`: the step's path in it."""
        self.where = where
        self._fs = fs
        self._root = root

    def size(self, name: str) -> int:
        with self._complaining("look at", name):
            found = self._fs.info(self._path(name))
        if found["type"] != "file":
            raise FileNotFoundError(f"{self.where}/{name}")
        return int(found["size"])

    def read_into(self, name: str, start: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            stop = min(len(buffer), done + _READ_BYTES)
            with self._complaining("read", name):
                data = self._fs.cat_file(self._path(name), start=start + done, end=start + stop)
            buffer[done : done + len(data)] = data
            done += len(data)
            if done < stop:
                break
        return done

    def write(self, name: str, chunks: Iterable[Bytes], *, size: int | None = None) -> None:
        data = b"".join(chunks)
        with self._complaining("write", name):
            self._fs.pipe_file(self._path(name), data)

    def create_exclusive(self, name: str, data: bytes) -> bool:
        with self._complaining("create", name):
            try:
                self._fs.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return False
        return True

    def names(self) -> list[str]:
        with self._complaining("list", "its files"):
            try:
                found = self._fs.ls(self._root, detail=True, refresh=True)
            except FileNotFoundError:
                return []
        return sorted(_base(entry) for entry in found if entry["type"] == "file")

    def remove(self, name: str) -> None:
        with self._complaining("remove", name), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _complaining(self, verb: str, name: str) -> Iterator[None]:
        with _complaining(f"cannot {verb} {name} in {self.where}"):
            yield


class ObjectDirectory:
    """A checkpoint directory under a URL."""

    def __init__(self, fs: Any, root: str, where: str) -> None:
        """`fs`: of fsspec; `root`: the directory's path in it."""
        self.where = where
        self._fs = fs
        self._root = root

    def names(self) -> list[str]:
        with _complaining(f"cannot list {self.where}"):
            try:
                found = self._fs.ls(self._root, detail=True, refresh=True)
            except FileNotFoundError:
                return []
        return sorted(_base(entry) for entry in found)

    def files(self) -> dict[str, dict[str, float]]:
        with _complaining(f"cannot list {self.where}"):
            try:
                listed = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        found: dict[str, dict[str, float]] = {}
        for path, entry in listed.items():
            step, slash, name = str(path).removeprefix(self._root).strip("/").partition("/")
            if slash and "/" not in name:
                found.setdefault(step, {})[name] = _written_s(entry)
        return found

    def step(self, name: str) -> ObjectStorage:
        return ObjectStorage(self._fs, f"{self._root}/{name}", f"{self.where}/{name}")

    def make(self, name: str) -> ObjectStorage:
        storage = self.step(name)
        if not self._has_no_directories():
            with _complaining(f"cannot make the directory {storage.where}"):
                self._fs.makedirs(f"{self._root}/{name}", exist_ok=True)
        return storage

    def remove(self, name: str) -> None:
        if not self._has_no_directories():
            with suppress(OSError):
                self._fs.rmdir(f"{self._root}/{name}")

    def check_writable(self) -> None:
        probe = f"{self._root}/.writable-{os.getpid()}-{os.urandom(4).hex()}"
        with _complaining(f"the checkpoint directory {self.where} cannot be written"):
            if not self._has_no_directories():
                self._fs.makedirs(self._root, exist_ok=True)
            try:
                self._fs.pipe_file(probe, b"-")
            except FileNotFoundError as error:
                raise OSError(str(error)) from error
            self._fs.rm_file(probe)

    def _has_no_directories(self) -> bool:
        protocols = self._fs.protocol
        return not _OBJECT_STORES.isdisjoint(
            {protocols} if isinstance(protocols, str) else protocols
        )


def file_system(url: str) -> tuple[Any, str]:
    """(fsspec's file system, the path in it) of a URL."""
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError:
        raise UserError(f"{url!r} needs the package fsspec: pip install fsspec") from None
    scheme = url.split("://")[0]
    try:
        fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise UserError(f"{url!r} cannot be used: {error}") from None
    except ValueError as error:
        raise UserError(
            f"{url!r} is no place that fsspec knows ({error}): give a path, file://, s3://, gs://, "
            f"or install the package for {scheme}://"
        ) from None
    return fs, root.rstrip("/")


def _written_s(entry: Mapping[str, Any]) -> float:
    """When a file was last written, in seconds; packages spell it in several ways. 0 where none is known: then nothing is old."""
    for key in ("LastModified", "last_modified", "mtime", "updated", "modified", "created"):
        value = entry.get(key)
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0


def _base(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]


@contextmanager
def _complaining(what: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, StorageError):
        raise
    except Exception as error:
        raise StorageError(f"{what}: {explain(error)}") from error
