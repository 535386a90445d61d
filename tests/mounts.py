"""Small file systems of a test's own, full or short of room at its word."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from elasticzero.launcher.local.cluster import Placement


@contextmanager
def small_disk(place: Path, mebibytes: int) -> Iterator[Path]:
    """A file system of so many MiB at `place`, in memory; gone afterwards. Without the permission
    to mount one the test skips, or fails where CI=true."""
    place.mkdir(parents=True, exist_ok=True)
    _try("mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(place))
    try:
        yield place
    finally:
        _run("umount", "--lazy", str(place))


@contextmanager
def disk_that_freezes(place: Path, mebibytes: int = 32) -> Iterator[Path]:
    """As `small_disk`, of a kind that `freeze` and `thaw` act on."""
    place.mkdir(parents=True, exist_ok=True)
    image = place.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(mebibytes << 20)
    _try("mkfs.ext4", "-q", str(image))
    _try("mount", "-o", "loop", str(image), str(place))
    try:
        yield place
    finally:
        thaw(place)
        _run("umount", "--lazy", str(place))


def with_own_memory(node: str) -> Placement:
    """Where an agent has a /dev/shm of its own, as each machine has one."""
    _try("unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    inside = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    return Placement(command_prefix=("unshare", "--mount", "sh", "-c", inside, node))


def freeze(place: Path) -> None:
    """From now on a write, and an open for one, blocks: as on a network's file system whose server
    is gone."""
    _run("fsfreeze", "-f", str(place))


def thaw(place: Path) -> None:
    """What is blocked goes on."""
    subprocess.run(["fsfreeze", "-u", str(place)], check=False, capture_output=True)


def let_write(place: Path, *, writes: bool) -> None:
    """Whether the file system at `place` takes writes from now on."""
    _run("mount", "-o", f"remount,{'rw' if writes else 'ro'}", str(place))


def fill(place: Path) -> Path:
    """Leave no room in the file system; returns the file whose removal gives it back."""
    filler = place / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(16 << 10))
    return filler


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _try(*command: str) -> None:
    """Run what needs permissions of its own."""
    try:
        _run(*command)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = f"a file system cannot be mounted here: {getattr(error, 'stderr', '') or error}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
