"""Defines the interface to the files of a step, and opens the storage that a path or URL means.

Names are relative to one step's directory. A missing file raises `FileNotFoundError`, and every
other fault raises `StorageError`.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from elasticzero.errors import ElasticZeroError, StorageError, UserError

_T = TypeVar("_T")

Bytes = bytes | bytearray | memoryview

_URL_OF_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/|$)")
"""Matches a URL that lost a slash, as `pathlib.Path("s3://bucket")` does."""
_WITH_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})


class Readable(Protocol):
    """Reads the files of one step."""

    @property
    def where(self) -> str:
        """Returns the place for messages: a directory or a URL."""
        ...

    def size(self, name: str) -> int:
        """Returns the size of the file in bytes."""
        ...

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        """Fills the buffers, one after the other, from byte `start` on; returns the number of
        bytes.

        That is less than the size of the buffers only at the file's end.
        """
        ...


class Storage(Readable, Protocol):
    """Reads and writes the files of one step."""

    def write(
        self, name: str, chunks: Iterable[Bytes], *, size: int | None = None, cached: bool = True
    ) -> None:
        """Creates or replaces the file, which gets its name only once it is whole and durable.

        `size`: number of bytes of `chunks`, if it is known. The iterator may reuse a chunk once the
        next is requested. `cached=False`: the file is not read soon, and need not go through the
        page cache.
        """
        ...

    def create_exclusive(self, name: str, data: bytes) -> bool:
        """Creates the file whole and durable; False if a file of that name with other bytes exists.

        A file of that name with the same bytes is a success: the answer to an earlier try was lost.
        """
        ...

    def names(self) -> list[str]:
        """Returns the names of all files, sorted; none if the step does not exist."""
        ...

    def remove(self, name: str) -> None:
        """Removes the file if it exists."""
        ...


class Directory(Protocol):
    """Lists and makes the steps of a checkpoint directory."""

    @property
    def where(self) -> str:
        """Returns the place for messages: a path or a URL."""
        ...

    def names(self) -> list[str]:
        """Returns the names of all steps and other entries, sorted; none if the directory does not
        exist."""
        ...

    def files(self) -> dict[str, dict[str, float]]:
        """Returns the time of the last write of each file, by the step's name, then the file's.

        The times are in seconds by the storage's own clock.
        """
        ...

    def step(self, name: str) -> Storage:
        """Returns the storage of one step, which need not exist."""
        ...

    def make(self, name: str) -> Storage:
        """Returns the storage of a step that is about to be written; makes its directory durably if
        necessary."""
        ...

    def remove(self, name: str) -> None:
        """Removes a step without files; does nothing if it holds files or does not exist."""
        ...

    def check_writable(self) -> None:
        """Makes the directory if necessary and checks that it can be written; else raises
        `StorageError`."""
        ...


class Views:
    """Fills several buffers from front to back as if they were one."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._rest = [buffer for buffer in reversed(buffers) if len(buffer)]

    def rest(self) -> list[memoryview]:
        """Returns the buffers that are not filled yet."""
        return self._rest[::-1]

    def take(self, size: int) -> list[memoryview]:
        """Returns the buffers of the next `size` bytes."""
        taken = []
        while size:
            view = self._rest.pop()
            if len(view) > size:
                self._rest.append(view[size:])
                view = view[:size]
            taken.append(view)
            size -= len(view)
        return taken


def holds(storage: Readable, name: str, data: bytes) -> bool:
    """Returns whether a file with exactly these bytes exists."""
    found = bytearray(len(data) + 1)
    try:
        return found[: storage.read_into(name, 0, memoryview(found))] == data
    except FileNotFoundError:
        return False
    except StorageError as error:
        if out_of_reach(error):
            raise
        return False


def open_directory(url: str | os.PathLike[str]) -> Directory:
    """Returns the checkpoint directory at a path, a `file://` URL or any URL that fsspec supports.

    Raises `UserError` for an invalid URL, or if its package is not installed.
    """
    path = _disk_path(url)
    if path is not None:
        from elasticzero.checkpoint.storage.disk import DiskDirectory

        return DiskDirectory(path)
    from elasticzero.checkpoint.storage.object_store import ObjectDirectory, file_system

    text = _remote_url(os.fspath(url))
    return ObjectDirectory(*file_system(text), text)


def open_storage(url: str | os.PathLike[str]) -> Storage:
    """Returns the files directly at a path or URL, which is as for `open_directory`."""
    path = _disk_path(url)
    if path is not None:
        from elasticzero.checkpoint.storage.disk import DiskStorage

        return DiskStorage(path)
    from elasticzero.checkpoint.storage.object_store import ObjectStorage, file_system

    text = _remote_url(os.fspath(url))
    return ObjectStorage(*file_system(text), text)


def _disk_path(url: str | os.PathLike[str]) -> Path | None:
    """Returns the absolute path of a directory on a file system, None for a URL of another kind."""
    text = os.fspath(url)
    if not text.strip():
        raise UserError('the path is empty: give a directory ("." for this one)')
    scheme, found, rest = text.partition("://")
    if not found:
        if match := _URL_OF_ONE_SLASH.match(text):
            raise UserError(
                f"{text!r} is neither a path nor a URL: give {match[1]}://..., as text and not as "
                f"a pathlib.Path, or ./{text} for a directory of that name"
            )
        return Path(os.path.abspath(os.path.expanduser(text)))
    if scheme.lower() not in ("file", "local"):
        return None
    host, _, path = rest.partition("/")
    if host not in ("", "localhost"):
        raise UserError(f"{text!r} is on another machine: a file:// URL means a path on this one")
    if not path:
        raise UserError(f"{text!r} names no directory: give file:///PATH")
    return Path(os.path.abspath("/" + urllib.parse.unquote(path)))


def _remote_url(text: str) -> str:
    """Returns the URL without slashes at its end; raises `UserError` for one that names no
    place."""
    scheme, _, rest = text.partition("://")
    if not rest.strip("/") or (scheme.lower() in _WITH_BUCKETS and rest.startswith("/")):
        example = "BUCKET/DIRECTORY" if scheme.lower() in _WITH_BUCKETS else "DIRECTORY"
        raise UserError(f"{text!r} names no place: give {scheme}://{example}")
    return text.rstrip("/")


def read_small(storage: Readable, name: str, limit_bytes: int) -> bytes:
    """Returns the whole of a small file; raises `StorageError` if it is larger than
    `limit_bytes`."""
    size = storage.size(name)
    if size > limit_bytes:
        raise StorageError(
            f"{storage.where}/{name} has {size} bytes, more than the {limit_bytes} allowed for it"
        )
    data = bytearray(size)
    return bytes(data[: storage.read_into(name, 0, memoryview(data))])


def out_of_reach(error: BaseException) -> bool:
    """Returns whether a `StorageError` says nothing about the bytes: no permission, or no
    answer."""
    cause = error.__cause__
    if not isinstance(error, StorageError) or cause is None:
        return False
    if isinstance(cause, StorageError):
        return out_of_reach(cause)
    return isinstance(cause, (PermissionError, TimeoutError, ConnectionError)) or not isinstance(
        cause, OSError
    )


def within(limit_s: float, where: str, work: Callable[[], _T]) -> _T:
    """Returns the result of `work`; raises `StorageError` if it takes longer than `limit_s`.

    Opening a file on a network's file system may block for good. The thread that waits there is
    then abandoned.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - the top of a thread: handed to the caller
            errors.append(error)

    thread = threading.Thread(target=body, name="elasticzero-storage", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise StorageError(f"{where}: the storage did not answer within {limit_s:g} s")
    return results[0]


def out_of_space(error: BaseException) -> bool:
    """Returns whether a `StorageError` was caused by a full file system or a quota."""
    cause = error.__cause__
    if isinstance(cause, StorageError):
        return out_of_space(cause)
    full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, StorageError) and full


def partial_name(name: str) -> str:
    """Returns a new name for a partial file, which no other writer uses."""
    return f".{name}.{os.getpid()}-{os.urandom(4).hex()}.partial"


@contextmanager
def as_storage_error(
    what: str, *, or_missing: bool = False, foreign: bool = False
) -> Iterator[None]:
    """Raises the system's errors as `StorageError`, with `what` failed in front.

    `or_missing`: also `FileNotFoundError`. `foreign`: also the exceptions that packages define;
    Python's own, except `OSError`, come from mistakes in code and stay as they are.
    """
    try:
        yield
    except ElasticZeroError:
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError):
            converted = or_missing
        elif isinstance(error, OSError):
            converted = True
        else:
            converted = foreign and type(error).__module__ != "builtins"
        if not converted:
            raise
        raise StorageError(f"{what}: {explain(error)}") from error


def explain(error: BaseException) -> str:
    """Returns the text of an error's cause, without its number and file name."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
