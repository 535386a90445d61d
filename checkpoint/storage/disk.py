"""Stores checkpoints on a local or shared file system."""

from __future__ import annotations

import errno
import os
import random
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elasticzero.checkpoint.storage.base import (
    Bytes,
    Views,
    as_storage_error,
    holds,
    partial_name,
)
from elasticzero.checkpoint.storage.linux import UNSUPPORTED, exchange, rename_new
from elasticzero.checkpoint.storage.new_file import write_new
from elasticzero.errors import StorageError, UserError, directory_problem

_EXCHANGES, _PAUSE_S = 100, 0.001
"""Maximum number of times that two files exchange their names in one replacement, and the longest
pause between them. More than two are needed only where several writers replace the same file within
microseconds."""
_REMAKES = 8
"""Maximum number of times that a step's directory is made again for one file."""

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
"""Kinds of files that are not regular files, and the name of each in a message."""


class DiskStorage:
    """Stores one step's directory on a file system.

    A file is opened for each range: that takes microseconds beside the reading, and a file that was
    replaced meanwhile is noticed.
    """

    def __init__(
        self, path: Path, *, durable: bool = True, writes_through_link: bool = True
    ) -> None:
        """Takes the directory.

        Args:
            path: The directory.
            durable: False, for shared memory, omits every fsync.
            writes_through_link: False: if the directory is a link to another one, files are only
                read; nothing is written or removed there.
        """
        self.path = path
        self._durable = durable
        self._writes_through_link = writes_through_link

    @property
    def where(self) -> str:
        return str(self.path)

    def size(self, name: str) -> int:
        with self._as_storage_error("look at", name):
            return _regular(os.stat(self.path / name), self.path / name).st_size

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        with self._as_storage_error("read", name):
            fd = os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                _regular(os.fstat(fd), self.path / name)
                done, size, views = 0, sum(map(len, buffers)), Views(buffers)
                while done < size:
                    count = os.preadv(fd, views.rest(), start + done)
                    if not count:
                        break
                    views.take(count)
                    done += count
                return done
            finally:
                os.close(fd)

    def write(
        self, name: str, chunks: Iterable[Bytes], *, size: int | None = None, cached: bool = True
    ) -> None:
        """Creates or replaces the file as the protocol says.

        A process that removes leftovers may have taken the directory of a step for one that a
        failed save has left, as long as it is empty: then it is made again. A snapshot's directory
        is never made again: a newer snapshot has taken its place.

        Args:
            name: The file's name.
            chunks: Its bytes.
            size: Number of bytes of `chunks`; None: it is not known.
            cached: False: the file need not go through the page cache.
        """
        remake = not self._writes_through_link
        with (
            self._as_storage_error("write", name, or_missing=remake),
            self._staged(name) as staged,
        ):
            fd = self._create(staged, remake=remake)
            write_new(fd, chunks, size, durable=self._durable, cached=cached)
            os.replace(staged, self.path / name)
            self._sync_directory()

    def create_exclusive(self, name: str, data: bytes, *, instead_of: bytes | None = None) -> bool:
        """Creates the file as the protocol says, by a hard link, or by Linux's exclusive rename.

        A file system that has neither gets an existence check and a rename under a lock file. A
        process that is killed while it holds that lock leaves it behind, and the error then names
        it. A file is replaced by Linux's exchange of two names, so that it is never missing. Where
        a file system has no exchange (NFS), it is missing for a moment.

        Args:
            name: The file's name.
            data: Its bytes.
            instead_of: Bytes of the file that this one replaces; None: there is no such file.
        """
        if instead_of is not None and not holds(self, name, instead_of):
            return holds(self, name, data)
        with (
            self._as_storage_error("create", name, or_missing=True),
            self._staged(name) as staged,
        ):
            write_new(self._create(staged), [data], len(data), durable=self._durable)
            if instead_of is None:
                created = _name_new(staged, self.path / name)
            else:
                created = _replace(staged, self.path / name, instead_of, data)
            self._sync_directory()
        return created or holds(self, name, data)

    def names(self) -> list[str]:
        with self._as_storage_error("list", "its files"):
            try:
                return sorted(os.listdir(self.path))
            except FileNotFoundError:
                return []

    def versions(self) -> dict[str, str]:
        with self._as_storage_error("look at", "its files"):
            versions = [(name, _version(self.path / name)) for name in self.names()]
        return {name: version for name, version in versions if version}

    def remove(
        self, name: str, *, holding: bytes | None = None, version: str | None = None
    ) -> None:
        """Removes the file as the protocol says.

        One that must have certain bytes, or be of a certain version, is renamed first and looked at
        under the new name: no other writer can change it then.

        Args:
            name: The file's name.
            holding: The bytes that it must have; None: it may have any.
            version: The version that it must have; None: it may have any.
        """

        def is_expected(path: Path) -> bool:
            same = version is None or _version(path) == version
            return same and (holding is None or read_regular(path) == holding)

        if holding is not None and not holds(self, name, holding):
            return
        with self._as_storage_error("remove", name), suppress(FileNotFoundError):
            self._check_no_link()
            if holding is None and version is None:
                self._unlink(name)
                return
            if version is not None and _version(self.path / name) != version:
                return
            aside = self.path / partial_name(name)
            if _take_away(self.path / name, aside, is_expected):
                self._unlink(aside.name)

    def _unlink(self, name: str) -> None:
        """Removes a file; never through a link that has just taken the directory's place."""
        if self._writes_through_link:
            os.unlink(self.path / name)
            return
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(self.path, flags)
        try:
            os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)

    def _check_no_link(self) -> None:
        """Raises `StorageError` if the directory is a link, and may only be read then."""
        if not self._writes_through_link:
            _check_no_link(self.path)

    @contextmanager
    def _staged(self, name: str) -> Iterator[Path]:
        """Yields a name that no other writer uses; the file is removed afterwards."""
        self._check_no_link()
        staged = self.path / partial_name(name)
        try:
            yield staged
        finally:
            with suppress(OSError):
                os.unlink(staged)

    def _create(self, path: Path, *, remake: bool = False) -> int:
        """Returns the descriptor of a new file.

        Args:
            path: The file, which does not exist.
            remake: Whether its directory is made if it does not exist.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for _ in range(_REMAKES if remake else 0):
            try:
                return os.open(path, flags, 0o666)
            except FileNotFoundError:
                _make_directories(self.path)
        return os.open(path, flags, 0o666)

    def _sync_directory(self) -> None:
        if self._durable:
            sync_directory(self.path)

    @contextmanager
    def _as_storage_error(
        self, verb: str, name: str, *, or_missing: bool = False
    ) -> Iterator[None]:
        with as_storage_error(f"cannot {verb} {name} in {self.where}", or_missing=or_missing):
            yield


class DiskDirectory:
    """Manages a checkpoint directory on a file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def where(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        with as_storage_error(f"cannot list {self.path}"):
            try:
                return sorted(os.listdir(self.path))
            except FileNotFoundError:
                return []
            except NotADirectoryError:
                raise UserError(
                    f"{self.path} is a file, and checkpoints are directories: name the one that "
                    "has the steps; `elasticzero checkpoint import FILE DIR --format …` brings "
                    "another program's file in"
                ) from None

    def files(self) -> dict[str, dict[str, float]]:
        times_of_step = {name: _times(self.path / name) for name in self.names()}
        return {name: times for name, times in times_of_step.items() if times is not None}

    def step(self, name: str) -> DiskStorage:
        return DiskStorage(self.path / name, writes_through_link=False)

    def make(self, name: str) -> DiskStorage:
        path = self.path / name
        with as_storage_error(f"cannot make the directory {path}", or_missing=True):
            _check_no_link(path)
            _make_directories(path)
        return self.step(name)

    def remove(self, name: str) -> None:
        with suppress(OSError):
            os.rmdir(self.path / name)

    def check_writable(self) -> None:
        probe = self.path / f".writable-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            _make_directories(self.path)
            probe.write_bytes(b"")
        except OSError as error:
            problem = directory_problem(error)
            raise StorageError(
                f"the checkpoint directory {self.path} cannot be written: {problem}"
            ) from error
        finally:
            with suppress(OSError):
                probe.unlink()


def read_regular(path: Path) -> bytes:
    """Returns the whole of a regular file, following links; raises `OSError` or `StorageError`."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        _regular(os.fstat(fd), path)
        return file.read()


def _regular(status: os.stat_result, path: Path) -> os.stat_result:
    """Returns the status of a regular file; raises `StorageError` for another kind.

    Such a file may have no end, or block its reader for ever.
    """
    for is_kind, kind in _KINDS:
        if is_kind(status.st_mode):
            raise StorageError(f"{path} is {kind}, and a regular file is expected")
    return status


def _name_new(staged: Path, target: Path) -> bool:
    """Gives a file its name; False if the name is taken."""
    try:
        os.link(staged, target)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    try:
        rename_new(staged, target)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    return _rename_locked(staged, target)


def _rename_locked(staged: Path, target: Path) -> bool:
    lock = target.with_name(f".{target.name}.lock")
    try:
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC))
    except FileExistsError:
        if target.exists():
            return False
        raise StorageError(
            f"{lock} exists: another save is writing this step, or one was killed while it did; "
            "if none is running, remove that file"
        ) from None
    try:
        if target.exists():
            return False
        os.rename(staged, target)
        return True
    finally:
        os.unlink(lock)


def _replace(staged: Path, target: Path, expected: bytes, data: bytes) -> bool:
    """Gives a file its name in the place of one with the expected bytes; False if it has others.

    What comes out of the exchange goes back if it is not what was expected. Another writer may have
    taken this file out of its place meanwhile; then it is exchanged until it comes out itself.

    Args:
        staged: The new file.
        target: Its name.
        expected: Bytes of the file that has this name now.
        data: Bytes of the new file.

    Raises:
        OSError: The file system refuses it.
        StorageError: Other writers replace the file all the time.
    """
    try:
        exchange(staged, target)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return _replace_taken_away(staged, target, expected)
    taken = False
    try:
        taken = read_regular(staged) == expected
    finally:
        if not taken:
            exchange(staged, target)
    for _ in range(_EXCHANGES):
        if taken or read_regular(staged) == data:
            return taken
        time.sleep(random.uniform(0.0, _PAUSE_S))
        exchange(staged, target)
    raise StorageError(f"{target} is being replaced by several other writers")


def _replace_taken_away(staged: Path, target: Path, expected: bytes) -> bool:
    """Does as `_replace` does on a file system that cannot exchange two names.

    The old file loses its name before the new one gets it, and nothing is ever overwritten.

    Args:
        staged: The new file.
        target: Its name.
        expected: Bytes of the file that has this name now.
    """
    aside = target.with_name(partial_name(target.name))
    if not _take_away(target, aside, lambda path: read_regular(path) == expected):
        return False
    try:
        created = _name_new(staged, target)
    except OSError:
        with suppress(OSError, StorageError):
            _name_new(aside, target)
        raise
    finally:
        with suppress(OSError):
            os.unlink(aside)
    return created


def _take_away(target: Path, aside: Path, is_expected: Callable[[Path], bool]) -> bool:
    """Renames a file that is the expected one; another one has its name again, and the result is
    False.

    Args:
        target: The file.
        aside: Its new name, which no other writer uses.
        is_expected: Returns whether the file, by its new name, is the expected one.
    """
    try:
        os.rename(target, aside)
    except FileNotFoundError:
        return False
    taken = False
    try:
        taken = is_expected(aside)
    finally:
        if not taken:
            _name_new(aside, target)  # False: a still newer file has the name by now
            with suppress(FileNotFoundError):
                os.unlink(aside)
    return taken


def _check_no_link(path: Path) -> None:
    if os.path.islink(path):
        raise StorageError(
            f"{path} is a link to another directory: files are read there, and none is written or "
            "removed; put a directory in its place"
        )


def _version(path: Path) -> str:
    """Returns what tells a file from others that have, or had, its name; "" if it is gone."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return ""
    return f"{status.st_ino} {status.st_mtime_ns}"


def _times(path: Path) -> dict[str, float] | None:
    """Returns the time of the last write of each file in a directory; None if it is no directory,
    but a link to one, say."""
    times = {}
    with as_storage_error(f"cannot list {path}"), suppress(FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            return None
        for name in os.listdir(path):
            with suppress(FileNotFoundError):
                status = os.lstat(path / name)
                if stat.S_ISREG(status.st_mode):
                    times[name] = status.st_mtime
        return times
    return None


def _make_directories(path: Path) -> None:
    """Makes a directory and its missing parents, each with a durable name."""
    missing = [place for place in (path, *path.parents) if not place.is_dir()]
    for place in reversed(missing):
        place.mkdir(exist_ok=True)
        sync_directory(place.parent)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):  # it has no fsync of directories
            raise
    finally:
        os.close(fd)
