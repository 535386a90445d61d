"""Processes of this machine (Linux): which exist, which are below which, and which end together."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
REAP_POLL_S = 0.005

_BIND_AND_EXEC = """
import ctypes, os, signal, sys
number, parent = int(sys.argv[1]), int(sys.argv[2])
if number != signal.SIGKILL:
    signal.signal(number, signal.SIG_DFL)
ctypes.CDLL(None).prctl(1, number)
if os.getppid() == parent:
    os.execvp(sys.argv[3], sys.argv[3:])
"""


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Has the kernel send this process a signal when the thread of `parent` that started it ends.

    Exits at once if that parent is gone already.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def bound_to_this_process(
    command: Sequence[str], number: signal.Signals = signal.SIGKILL
) -> list[str]:
    """Returns a command that becomes `command`, which gets a signal when this process dies.

    An interpreter of its own binds it and then executes it, since code between fork and exec may
    hang in a process that has gRPC's threads. The thread that starts it must live as long.
    """
    binder = [sys.executable, "-I", "-S", "-c", _BIND_AND_EXEC]
    return [*binder, str(int(number)), str(os.getpid()), *command]


def adopt_orphans() -> None:
    """Makes this process the parent of every process below it that loses its own."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(limit_s: float) -> bool:
    """Sends SIGKILL to every process below this one and reaps them; False: some are left.

    Complete where this process has called `adopt_orphans`.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(REAP_POLL_S)


def children_of(pid: int) -> list[int]:
    """Process ids of the children of every thread of `pid`; empty if it does not exist."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{task}/children").read_text()
            found += [int(word) for word in text.split()]
    return found


def descendants(pid: int) -> list[int]:
    """All processes under `pid`, parents first."""
    found: list[int] = []
    for child in children_of(pid):
        found += [child, *descendants(child)]
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
