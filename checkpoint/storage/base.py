"""Defines the interface to the files of a step, and what its implementations share.

Names are relative to one step's directory. A missing file raises `FileNotFoundError`, and every
other fault raises `StorageError`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from elasticzero.errors import ElasticZeroError, StorageError

_T = TypeVar("_T")

Bytes = bytes | bytearray | memoryview


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

        Args:
            name: The file's name.
            chunks: Its bytes. The iterator may reuse a chunk once the next is requested.
            size: Number of bytes of `chunks`; None: it is not known.
            cached: False: the file is not read soon, and need not go through the page cache.
        """
        ...

    def create_exclusive(self, name: str, data: bytes, *, instead_of: bytes | None = None) -> bool:
        """Creates the file whole and durable; False if a file of that name with other bytes exists.

        A file of that name with the same bytes is a success: the answer to an earlier try was lost.

        Args:
            name: The file's name.
            data: Its bytes.
            instead_of: Bytes of the file that this one replaces; if the file has other bytes, or is
                gone, nothing changes and the result is False. None: there is no such file.
        """
        ...

    def names(self) -> list[str]:
        """Returns the names of all files, sorted; none if the step does not exist."""
        ...

    def versions(self) -> dict[str, str]:
        """Returns by name what tells each file from any other that had its name before, or has it
        later: a file that is written again has another version, even with the same bytes."""
        ...

    def remove(
        self, name: str, *, holding: bytes | None = None, version: str | None = None
    ) -> None:
        """Removes the file if it exists and is the expected one.

        Args:
            name: The file's name.
            holding: The bytes that it must have; None: it may have any.
            version: The version that it must have; None: it may have any.
        """
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
    """Returns whether a file with exactly these bytes exists.

    Args:
        storage: The step's files.
        name: Name of the file.
        data: Expected contents.
    """
    content = bytearray(len(data) + 1)
    try:
        return content[: storage.read_into(name, 0, memoryview(content))] == data
    except FileNotFoundError:
        return False
    except StorageError as error:
        if out_of_reach(error):
            raise
        return False


def read_small(storage: Readable, name: str, limit_bytes: int) -> bytes:
    """Returns the whole of a small file.

    Args:
        storage: The step's files.
        name: Name of the file.
        limit_bytes: Largest size that is read.

    Raises:
        StorageError: The file is larger.
    """
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
    """Returns the result of `work`, which may take only so long.

    Opening a file on a network's file system may block for good. The thread that waits there is
    then abandoned.

    Args:
        limit_s: Time limit in seconds.
        where: Path or URL, for the message.
        work: Runs in a thread of its own; its error is raised.

    Raises:
        StorageError: `work` takes longer than the limit.
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
    """Raises the system's errors as `StorageError`.

    Args:
        what: What failed, for the front of the message.
        or_missing: `FileNotFoundError` is converted too.
        foreign: The exceptions that packages define are converted too. Python's own, except
            `OSError`, come from mistakes in code and stay as they are.
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
