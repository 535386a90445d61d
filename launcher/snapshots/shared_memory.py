"""Owns directories in shared memory, and on disks for what does not fit there.

A lock claims a directory and ends with its owner, however that ends. An agent that is killed leaves
its directory behind without the lock; so the next agent that starts on this machine, of whatever
job, can tell that its owner is dead, and removes it. Every user of the machine can make names in
shared memory, so a link is never followed: nothing is made or removed where it leads to.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elasticzero.errors import OperatorError, UserError

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "elasticzero-snapshots-"
_LOCK = "owner"
SWEEP_S, POLL_S = 3.0, 0.01
"""Seconds for which the lock is retried, because an agent that removes orphans may hold it, on a
disk for as long as that has other work; and the pause between tries."""


class NameTaken(UserError):
    """Says that another agent on this machine has the directory, and so the node's name."""


def snapshot_directory(job: str, node: str, folder: Path = SHARED_MEMORY) -> Path:
    """Returns the directory of a node's agent in shared memory, or in another folder.

    Args:
        job: The job's name.
        node: The node's name.
        folder: The folder that has the directories of all agents.
    """
    digest = hashlib.sha256(f"{job}/{node}".encode()).hexdigest()[:12]
    return folder / f"{PREFIX}{digest}-{node}"


class OwnedDirectory:
    """Owns a directory of shared memory until it is released or the process exits."""

    def __init__(self, root: Path) -> None:
        """Creates the directory if it does not exist; raises `NameTaken` if an agent that runs has
        it."""
        self.root = root
        deadline_s = time.monotonic() + SWEEP_S
        while True:
            with suppress(FileExistsError):
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                status = root.lstat()
                if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                    raise OperatorError(
                        f"{root} is not a directory of this user: remove it, or give this node "
                        "another --node-name"
                    )
                with _opened(root) as folder:
                    fd = _locked(folder)
            except (FileNotFoundError, NotADirectoryError):
                continue  # another agent has just removed it as an orphan
            if fd is None and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
                continue
            if fd is None:
                raise NameTaken(
                    f"another agent of this job runs on this machine under the same --node-name "
                    f"(it has {root}): give this node another name"
                )
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), (root / _LOCK).lstat()):
                    self._fd = fd
                    return
            os.close(fd)  # it was removed as an orphan between the two steps: try again

    def release(self) -> None:
        """Removes the directory; a second call does nothing."""
        if self._fd >= 0:
            with suppress(OSError), _opened(self.root) as folder:
                _remove(self.root, folder)
            os.close(self._fd)
            self._fd = -1


def remove_orphans(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Removes the directories of agents that have died; returns those directories."""
    return [root for root in folder.glob(f"{PREFIX}*") if remove_orphan(root)]


def remove_orphan(root: Path) -> bool:
    """Removes a directory if its agent has died; returns whether it was removed."""
    removed = False
    with suppress(OSError), _opened(root) as opened:
        if os.fstat(opened).st_uid == os.geteuid() and (fd := _locked(opened)) is not None:
            removed = _remove(root, opened)
            os.close(fd)
    return removed


def is_owned(root: Path) -> bool:
    """Returns whether an agent that runs has the directory: not one that is about to end, or that
    has its lock while it removes orphans."""
    deadline_s = time.monotonic() + SWEEP_S
    with suppress(OSError), _opened(root) as opened:
        while (fd := _locked(opened)) is None:
            if time.monotonic() >= deadline_s:
                return True
            time.sleep(POLL_S)
        os.close(fd)
    return False


def _remove(root: Path, folder: int) -> bool:
    """Removes a directory whose lock this process has; its name can be used again at once.

    Args:
        root: The directory.
        folder: Descriptor of the directory.

    Returns:
        False if something else had its name by now, which stays.
    """
    gone = root.with_name(f"{PREFIX}removed-{os.urandom(6).hex()}")
    try:
        root.rename(gone)
    except OSError:
        gone = root
    if not os.path.samestat(gone.lstat(), os.fstat(folder)):
        if gone != root:
            gone.rename(root)
        return False
    shutil.rmtree(gone, ignore_errors=True)
    return True


@contextmanager
def _opened(root: Path) -> Iterator[int]:
    """Yields a descriptor of a directory; raises `NotADirectoryError` for a link to one."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def _locked(folder: int) -> int | None:
    """Returns a descriptor that holds the lock of a directory, which is given by its descriptor;
    None if another process has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(_LOCK, flags, 0o600, dir_fd=folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
