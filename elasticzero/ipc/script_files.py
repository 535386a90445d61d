"""Watches the files of a script that runs before its process has a rank.

What a script removes or empties as it begins, the training that goes on beside it may need. And
what it reads may be changed before the process gets its rank, while other ranks read it anew.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_FILES = 1000
"""Number of files that are looked at again at most, besides modules."""
INSTALLED = ("/site-packages/", "/dist-packages/", sysconfig.get_path("stdlib"))
"""Directories of packages, which do not change while a job runs."""
WRITES = os.O_WRONLY | os.O_RDWR
PASSING = ("/dev/", "/proc/", "/sys/")
"""Beginnings of paths that name no files of a script's."""

Stamp = tuple[int, int]
"""Time of the last change in nanoseconds, and size in bytes."""


class ScriptFiles:
    """Listens to Python's audit events until it is closed; native code is not heard."""

    def __init__(self, report: Callable[[str], None]) -> None:
        """Begins to listen.

        Args:
            report: Is called before each act that would take a file from somebody, with what the
                script is about to do. It raises an exception, which keeps the act from happening.
        """
        self._report = report
        self._listens = True
        self._made: set[str] = set()
        """Files and directories that this process has made."""
        self._imported_before = set(sys.modules)
        self._read: dict[str, Stamp] = {}
        self._spared = (os.path.expanduser("~/.cache/"), *PASSING)
        sys.addaudithook(self._hear)  # for good; closed, it does nothing

    def close(self) -> None:
        """Ends the watch, and adds the modules that were imported meanwhile to what was read."""
        self._listens = False
        for name, module in list(sys.modules.items()):
            # Not by getattr, at which a module that is loaded late would load.
            with suppress(AttributeError, TypeError):
                path = object.__getattribute__(module, "__dict__").get("__file__")
                if isinstance(path, str) and name not in self._imported_before:
                    self._note_read(os.path.abspath(path))

    def changed(self) -> tuple[str, str] | None:
        """Returns a file that is not as it was when the script read it, and what it is now; None:
        there is none."""
        for path, stamp in self._read.items():
            if (now := _stamp(path)) != stamp:
                return path, str(now)
        return None

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._listens:
            return
        if event == "open":
            self._hear_open(*arguments)
        elif event == "os.mkdir" and (path := _text(arguments[0], arguments[2])):
            self._made.add(path)
        for act, number, folder in ACTS.get(event, ()):
            path = _text(arguments[number], arguments[folder] if folder is not None else None)
            if path and _stamp(path) is not None and not self._is_spared(path):
                self._report(f"{act} {path}")

    def _hear_open(self, name: object, mode: object, flags: object) -> None:
        path = _text(name)
        if not path or not isinstance(flags, int):
            return
        if os.path.isdir(path):
            return
        stamp = _stamp(path)
        if stamp is None:
            self._made.update({path} if flags & os.O_CREAT else ())
        elif not flags & WRITES:
            self._note_read(path)
        elif flags & os.O_TRUNC and stamp[1] and not self._is_spared(path):
            self._report(f"empties {path}")

    def _is_spared(self, path: str) -> bool:
        """Returns whether a file is this process's own, or one of a cache that many share."""
        cached = "__pycache__" in path or path.endswith(".lock")
        made = path in self._made or not self._made.isdisjoint(map(str, Path(path).parents))
        return cached or made or path.startswith(self._spared)

    def _note_read(self, path: str) -> None:
        if path in self._read or (self._listens and len(self._read) >= MOST_FILES):
            return  # modules are noted all the same, when the watch ends
        stamp = _stamp(path)
        passes = path.startswith(PASSING) or any(name in path for name in INSTALLED)
        if stamp is not None and not passes:
            self._read[path] = stamp


ACTS: Mapping[str, Sequence[tuple[str, int, int | None]]] = {
    "os.remove": (("removes", 0, 1),),
    "os.rmdir": (("removes", 0, 1),),
    "shutil.rmtree": (("removes", 0, None),),
    "os.truncate": (("shortens", 0, None),),
    "os.rename": (("moves", 0, 2), ("replaces", 1, 3)),
}
"""Maps an audit event to the act in words, the number of the argument that names the file, and that
of the directory's descriptor from which a relative name begins."""


def _text(name: object, folder: object = None) -> str:
    """Returns a path as an absolute one; empty: it is none, as a descriptor.

    Args:
        name: The path.
        folder: Descriptor of the directory that a relative one begins from; another value: it
            begins from the present one.
    """
    with suppress(TypeError, ValueError, OSError):
        if isinstance(name, str | bytes | os.PathLike):
            path = os.fsdecode(name)
            if isinstance(folder, int) and folder >= 0:
                path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
            return os.path.abspath(path)
    return ""


def _stamp(path: str) -> Stamp | None:
    """Returns what a file is known by; None: there is none."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size
