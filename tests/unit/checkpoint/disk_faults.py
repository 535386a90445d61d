"""Harm at the n-th call into the operating system: an error, a kill, a power cut."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

CREATING = (
    *("open", "write", "pwrite", "fsync", "link", "replace", "rename", "mkdir"),
    *("posix_fallocate", "ftruncate"),
)
OTHERS = ("unlink", "rmdir", "preadv", "stat", "lstat", "listdir", "scandir")
Harm = Literal["none", "full", "full for good", "error", "error for good", "kill", "power cut"]


class Killed(BaseException):
    """The process is no more: from here on nothing that it calls has an effect."""


class Faults:
    """While entered, lets the calls of `os` pass until the `at`-th (from 0) that `harm` concerns.

    A killed process leaves all that it has written. A power cut leaves below `root` what was made
    durable: file contents by fsync of the file, names by fsync of the directory; other files are
    empty.
    """

    def __init__(self, root: Path, harm: Harm = "none", at: int = -1) -> None:
        self.calls: list[str] = []
        self._root = root
        self.harm = harm
        self._at = at
        self._real: list[tuple[Any, str, Callable[..., Any]]] = []
        """The module, the name in it, and what has that name else."""
        self._own = False
        """What is called now is called by this object."""
        self._contents: dict[int, bytes] = {}
        """By inode: what of each file is durable."""
        self._names: dict[int, dict[str, int]] = {}
        """By a directory's inode: which names are durable, and what they name."""
        for folder, _, files in os.walk(root):
            self._note_directory(Path(folder), os.stat(folder).st_ino)
            for name in files:
                path = Path(folder) / name
                self._contents[path.stat().st_ino] = path.read_bytes()

    def __enter__(self) -> Faults:
        concerned = CREATING if self.harm.startswith("full") else CREATING + OTHERS
        self._real = [(os, name, getattr(os, name)) for name in concerned]
        if concerned != CREATING:
            self._real.append((io, "open", io.open))  # what pathlib reads files by
        for module, name, real in self._real:
            setattr(module, name, self._watched(name if module is os else "io.open", real))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, real in self._real:
            setattr(module, name, real)
        if self.harm == "power cut":
            top = self._root.stat().st_ino
            for path in sorted(self._root.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            self._restore(self._root, top)

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self._own:
                return real(*arguments, **options)
            number = len(self.calls)
            self.calls.append(name)
            if number >= self._at >= 0:
                self._do_harm(number, name, real, arguments)
            result = real(*arguments, **options)
            self._own = True
            self._note(name, arguments, result)
            self._own = False
            return result

        return call

    def _do_harm(
        self, number: int, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        if self.harm in ("kill", "power cut"):
            if name == "write" and number == self._at:
                real(arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2])
            raise Killed
        if number == self._at or self.harm.endswith("for good"):
            code = errno.ENOSPC if self.harm.startswith("full") else errno.EIO
            raise OSError(code, os.strerror(code))

    def _note(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        if name == "open" and arguments[1] & os.O_CREAT:
            self._contents.pop(os.fstat(result).st_ino, None)
        if name == "fsync":
            status = os.fstat(arguments[0])
            path = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
            if stat.S_ISDIR(status.st_mode):
                self._note_directory(path, status.st_ino)
            else:
                self._contents[status.st_ino] = path.read_bytes()

    def _note_directory(self, path: Path, inode: int) -> None:
        self._names[inode] = {}
        with os.scandir(path) as entries:
            for entry in entries:
                self._names[inode][entry.name] = entry.inode()
                if entry.is_dir():
                    self._names.setdefault(entry.inode(), {})

    def _restore(self, path: Path, inode: int) -> None:
        path.mkdir(exist_ok=True)
        for name, below in self._names[inode].items():
            if below in self._names:
                self._restore(path / name, below)
            else:
                (path / name).write_bytes(self._contents.get(below, b""))
