"""Finds the files that a script writes into its working directory, where each run finds those of
the run before it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

FileTimes = Mapping[str, tuple[int, int]]
"""For each file the time of its last change, in nanoseconds, and its size in bytes."""
MOST_FILES = 20_000
"""Files beyond which the directory is not looked at."""
PASSED_OVER = frozenset({"__pycache__", "node_modules"})
"""Names of directories that are not looked at, besides those that begin with a dot."""


def file_times(directory: Path) -> FileTimes:
    """Returns the files below a directory; none if there are too many to look at."""
    times: dict[str, tuple[int, int]] = {}
    for folder, folders, files in os.walk(directory):
        folders[:] = [n for n in folders if n not in PASSED_OVER and not n.startswith(".")]
        for name in files:
            path = os.path.join(folder, name)
            try:
                status = os.stat(path)
            except OSError:
                continue
            times[os.path.relpath(path, directory)] = status.st_mtime_ns, status.st_size
        if len(times) > MOST_FILES:
            return {}
    return times


def changed_files(before: FileTimes, after: FileTimes) -> list[str]:
    """Returns the files that are new or have changed; none where one of two looks has found too
    many files."""
    if not before and len(after) > MOST_FILES // 2:
        return []
    return sorted(path for path, times in after.items() if before.get(path) != times)
