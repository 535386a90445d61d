"""Small file systems of a test's own, full or short of room at its word."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, mebibytes: int) -> Iterator[Path]:
    """A file system of so many MiB at `place`, in memory; gone afterwards. Without the permission
    to mount one the test skips, or fails where CI=true."""
    place.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = f"a file system cannot be mounted here: {getattr(error, 'stderr', '') or error}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, capture_output=True)


def let_write(place: Path, *, writes: bool) -> None:
    """Whether the file system at `place` takes writes from now on."""
    how = f"remount,{'rw' if writes else 'ro'}"
    subprocess.run(["mount", "-o", how, str(place)], check=True, capture_output=True)


def fill(place: Path) -> Path:
    """Leave no room in the file system; returns the file whose removal gives it back."""
    filler = place / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(16 << 10))
    return filler
