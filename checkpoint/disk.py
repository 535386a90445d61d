"""Checkpoints on a local or shared file system."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elasticzero.checkpoint.storage import Bytes, explain
from elasticzero.errors import StorageError

_WRITE_BUFFER_BYTES = 1 << 20


class DiskStorage:
    """One step's directory on a file system."""

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        """`durable=False`, for shared memory, leaves out every fsync."""
        self.path = path
        self._durable = durable

    @property
    def where(self) -> str:
        return str(self.path)

    def size(self, name: str) -> int:
        with self._complaining("look at", name):
            return (self.path / name).stat().st_size

    def read_into(self, name: str, start: int, buffer: memoryview) -> int:
        with self._complaining("read", name):
            fd = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < len(buffer):
                    count = os.preadv(fd, [buffer[done:]], start + done)
                    if not count:
                        break
                    done += count
                return done
            finally:
                os.close(fd)

    def write(self, name: str, chunks: Iterable[Bytes], *, size: int | None = None) -> None:
        staged = self.path / f".{name}.partial"
        with self._complaining("write", name):
            try:
                self._write_file(staged, chunks)
                os.replace(staged, self.path / name)
            finally:
                staged.unlink(missing_ok=True)
            self._sync_directory()

    def create_exclusive(self, name: str, data: bytes) -> bool:
        staged = self.path / f".{name}.{os.getpid()}-{os.urandom(4).hex()}.partial"
        with self._complaining("create", name):
            try:
                self._write_file(staged, [data])
                os.link(staged, self.path / name)
            except FileExistsError:
                return False
            finally:
                staged.unlink(missing_ok=True)
            self._sync_directory()
            return True

    def names(self) -> list[str]:
        with self._complaining("list", "its files"):
            try:
                return sorted(os.listdir(self.path))
            except FileNotFoundError:
                return []

    def remove(self, name: str) -> None:
        with self._complaining("remove", name), suppress(FileNotFoundError):
            os.unlink(self.path / name)

    def _write_file(self, path: Path, chunks: Iterable[Bytes]) -> None:
        with open(path, "wb", buffering=_WRITE_BUFFER_BYTES) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            if self._durable:
                os.fsync(file.fileno())

    def _sync_directory(self) -> None:
        if self._durable:
            sync_directory(self.path)

    @contextmanager
    def _complaining(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError(f"cannot {verb} {name} in {self.where}: {explain(error)}") from error


class DiskDirectory:
    """A checkpoint directory on a file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def where(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"cannot list {self.path}: {explain(error)}") from error

    def step(self, name: str) -> DiskStorage:
        return DiskStorage(self.path / name)

    def make(self, name: str) -> DiskStorage:
        path = self.path / name
        try:
            _make_directories(path)
        except OSError as error:
            raise StorageError(f"cannot make the directory {path}: {explain(error)}") from error
        return DiskStorage(path)

    def remove(self, name: str) -> None:
        with suppress(OSError):
            os.rmdir(self.path / name)

    def check_writable(self) -> None:
        probe = self.path / f".writable-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            _make_directories(self.path)
            probe.write_bytes(b"")
        except OSError as error:
            raise StorageError(
                f"the checkpoint directory {self.path} cannot be written: {explain(error)}"
            ) from error
        finally:
            with suppress(OSError):
                probe.unlink()


def _make_directories(path: Path) -> None:
    """Make a directory and those above it, each with a durable name."""
    missing = [p for p in (path, *path.parents) if not p.is_dir()]
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        sync_directory(new.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
