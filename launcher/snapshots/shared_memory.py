"""Owns directories in shared memory, and on disks for what does not fit there.

A lock claims a directory and ends with its owner, however that ends. An agent that is killed leaves
its directory behind without the lock; so the next agent that starts on this machine, of whatever
job, can tell that its owner is dead, and removes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import time
from contextlib import suppress
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
            try:
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
                status = root.lstat()
                if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                    raise OperatorError(
                        f"{root} is not a directory of this user: remove it, or give this node "
                        "another --node-name"
                    )
                fd = _locked(root)
            except FileNotFoundError:  # another agent has just removed it as an orphan
                continue
            if fd is None and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
                continue
            if fd is None:
                raise NameTaken(
                    f"another agent of this job runs on this machine under the same --node-name "
                    f"(it has {root}): give this node another name"
                )
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), (root / _LOCK).stat()):
                    self._fd = fd
                    return
            os.close(fd)  # it was removed as an orphan between the two steps: try again

    def release(self) -> None:
        """Removes the directory; a second call does nothing."""
        if self._fd >= 0:
            _remove(self.root)
            os.close(self._fd)
            self._fd = -1


def remove_orphans(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Removes the directories of agents that have died; returns those directories."""
    removed = []
    for root in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if root.is_dir() and root.stat().st_uid == os.geteuid():
                fd = _locked(root)
                if fd is not None:
                    _remove(root)
                    os.close(fd)
                    removed.append(root)
    return removed


def _remove(root: Path) -> None:
    """Removes a directory whose lock this process has; its name can be used again at once."""
    gone = root.with_name(f"{PREFIX}removed-{os.urandom(6).hex()}")
    try:
        root.rename(gone)
    except OSError:
        gone = root
    shutil.rmtree(gone, ignore_errors=True)


def _locked(root: Path) -> int | None:
    """Returns a descriptor that holds the directory's lock; None if another process has it."""
    fd = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
