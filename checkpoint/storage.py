"""Where bytes live: the files of one step, on a disk or behind an agent's HTTP server.

Names are relative to one step's directory. A file that is not there raises `FileNotFoundError`;
anything else that goes wrong raises `StorageError`.
"""

from __future__ import annotations

import errno
import http.client
import os
import urllib.parse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from elasticzero.errors import StorageError, UserError

Bytes = bytes | bytearray | memoryview

_WRITE_BUFFER_BYTES = 1 << 20


class Readable(Protocol):
    """The files of one step, to read."""

    @property
    def where(self) -> str:
        """The place in messages: a directory or a URL."""
        ...

    def size(self, name: str) -> int:
        """Bytes of the file."""
        ...

    def read_into(self, name: str, start: int, buffer: memoryview) -> int:
        """Fill `buffer` from byte `start` on; fewer bytes than it holds only at the file's end."""
        ...


class Storage(Readable, Protocol):
    """The files of one step, to read and write."""

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        """Create or replace the file; it has its name only once it is whole and durable."""
        ...

    def create_exclusive(self, name: str, data: bytes) -> bool:
        """Create the file whole and durable, unless one of that name stands there: then False."""
        ...

    def names(self) -> list[str]:
        """The names of all files, sorted."""
        ...

    def remove(self, name: str) -> None:
        """Remove the file if it is there."""
        ...


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

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
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
            return sorted(os.listdir(self.path))

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


class HttpStorage:
    """One step's files behind an agent's HTTP server; read only, for one thread."""

    def __init__(self, base_url: str, token: str, *, timeout_s: float = 10.0) -> None:
        """`base_url`: the address of the step, `http://host:port/snapshots/<generation>/<step>`."""
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme != "http" or not parts.hostname:
            raise UserError(f"{base_url!r} is not an http:// address")
        self.where = base_url.rstrip("/")
        self._path = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._connection = http.client.HTTPConnection(
            parts.hostname, parts.port or 80, timeout=timeout_s
        )

    def size(self, name: str) -> int:
        response = self._request("HEAD", name, {})
        response.read()
        if response.status != 200:
            raise self._refusal(name, response)
        length = response.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise StorageError(f"{self.where}/{name}: the server does not say its size")
        return int(length)

    def read_into(self, name: str, start: int, buffer: memoryview) -> int:
        if not len(buffer):
            return 0
        headers = {"Range": f"bytes={start}-{start + len(buffer) - 1}"}
        response = self._request("GET", name, headers)
        if response.status != 206:
            self.close()
            if response.status == 416:
                return 0
            raise self._refusal(name, response)
        try:
            done = self._receive(response, start, buffer)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise StorageError(f"{self.where}/{name}: {explain(error)}") from error
        return done

    def close(self) -> None:
        """Hang up; the next read connects again."""
        self._connection.close()

    def _request(self, method: str, name: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        path = f"{self._path}/{urllib.parse.quote(name, safe='')}"
        for last_try in (self._connection.sock is None, True):
            try:
                self._connection.request(method, path, headers=self._headers | headers)
                return self._connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if last_try:
                    raise StorageError(f"{self.where}/{name}: {explain(error)}") from error
        raise AssertionError("unreachable")

    @staticmethod
    def _receive(response: http.client.HTTPResponse, start: int, buffer: memoryview) -> int:
        length = response.length
        given = response.headers.get("Content-Range", "")
        if length is None or length > len(buffer) or not given.startswith(f"bytes {start}-"):
            raise http.client.HTTPException("the answer is not the range that was asked for")
        done = 0
        while done < length:
            count = response.readinto(buffer[done:length])
            if not count:
                raise http.client.HTTPException(f"the answer broke off after {done} bytes")
            done += count
        return done

    def _refusal(self, name: str, response: http.client.HTTPResponse) -> Exception:
        if response.status == 404:
            return FileNotFoundError(errno.ENOENT, "no such file", f"{self.where}/{name}")
        return StorageError(
            f"{self.where}/{name}: the server answered {response.status} {response.reason}"
        )


def read_small(storage: Readable, name: str, limit_bytes: int) -> bytes:
    """The whole of a small file; `StorageError` for one larger than `limit_bytes`."""
    size = storage.size(name)
    if size > limit_bytes:
        raise StorageError(
            f"{storage.where}/{name} has {size} bytes, more than the {limit_bytes} allowed for it"
        )
    data = bytearray(size)
    return bytes(data[: storage.read_into(name, 0, memoryview(data))])


def local_path(url: str | os.PathLike[str]) -> Path:
    """The directory that a checkpoint directory's URL means: a plain path or `file://`."""
    text = os.fspath(url)
    parts = urllib.parse.urlsplit(text)
    if "://" not in text:
        return Path(text).expanduser()
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(urllib.parse.unquote(parts.path))
    raise UserError(
        f"the checkpoint directory {text!r} is not one that can be used: "
        "give a local path or a file:// URL (a directory that all nodes share)"
    )


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def explain(error: BaseException) -> str:
    """An error's cause in words, without its number and file name."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
