"""Reads and controls processes of this machine (Linux): their states, their children, their end.

`/proc` is read here, but for what is about files, sockets or the network; so is the memory that is
left.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
REAP_POLL_S = 0.005
MAX_THREADS = 32
"""Maximum number of threads that an account of a process names."""
PF_EXITING, PF_DUMPCORE = 0x4, 0x200
"""Bits of a process's flags in /proc (include/linux/sched.h)."""

STANDBY_NAME = "ez-standby"
"""Name of a process that stands by for a worker, as `ps` shows it."""
MEMORY_FILE = Path("/proc/meminfo")
CGROUP_FOLDER = Path("/sys/fs/cgroup")

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


def kill_strays(limit_s: float, spared: Set[int]) -> bool:
    """Sends SIGKILL to every process below this one, but for some children and what is below them,
    and reaps them; False: some are left.

    Args:
        limit_s: Time limit in seconds.
        spared: Process ids of the children that live on.
    """
    deadline_s = time.monotonic() + limit_s
    while strays := [child for child in children_of(os.getpid()) if child not in spared]:
        for pid in [below for stray in strays for below in (stray, *descendants(stray))]:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in strays:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(REAP_POLL_S)
    return True


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
    """Returns the process ids of the children of every thread of `pid`; none if it does not
    exist."""
    children: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{task}/children").read_text()
            children += [int(word) for word in text.split()]
    return children


def descendants(pid: int) -> list[int]:
    """Returns all processes under `pid`, parents first."""
    pids: list[int] = []
    for child in children_of(pid):
        pids += [child, *descendants(child)]
    return pids


def process_state(pid: int) -> str:
    """Returns the state of a process as one letter, as in /proc/PID/stat; empty if there is no such
    process."""
    fields = _stat_fields(f"/proc/{pid}/stat")
    return fields[0] if fields else ""


def cpu_time(pid: int) -> int:
    """Returns a number that grows whenever a process runs; 0 if it is not known.

    It is the CPU time of its main thread in nanoseconds. A kernel that does not count these gives
    the CPU time of all threads, in clock ticks.
    """
    with suppress(OSError, ValueError, IndexError):
        if count := int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]):
            return count
    fields = _stat_fields(f"/proc/{pid}/stat")
    return int(fields[11]) + int(fields[12]) if fields else 0


def is_alive(pid: int) -> bool:
    """Returns whether a process runs (a zombie does not)."""
    return process_state(pid) not in ("", "Z")


def is_exiting(pid: int) -> bool:
    """Returns whether a process has begun to exit, or is gone.

    The kernel has marked it then, though it may still write a core dump or free its memory.
    """
    fields = _stat_fields(f"/proc/{pid}/stat")
    return not fields or fields[0] in "ZX" or bool(int(fields[6]) & (PF_EXITING | PF_DUMPCORE))


def kernel_wait(pid: int) -> str:
    """Returns the kernel's function in which the main thread of a process sleeps; empty if it runs
    or is not known."""
    with suppress(OSError):
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
        return "" if name == "0" else name
    return ""


def kernel_account(pid: int) -> str:
    """Returns what the kernel says of a process: its status, and where its threads sleep."""
    lines = []
    with suppress(OSError):
        status_fields = ("State", "Threads", "SigPnd", "ShdPnd", "SigBlk")
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        lines += [line for line in status if line.partition(":")[0] in status_fields]
    threads: list[str] = []
    with suppress(OSError):
        threads = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    for thread in threads[:MAX_THREADS]:
        with suppress(OSError):
            task = Path(f"/proc/{pid}/task/{thread}")
            state = (_stat_fields(task / "stat") or ["?"])[0]
            name, wait = (task / "comm").read_text().strip(), (task / "wchan").read_text().strip()
            lines.append(f"thread {thread} ({name}): state {state}, {wait}")
    with suppress(OSError):
        lines += ["the main thread's stack in the kernel:"]
        lines += Path(f"/proc/{pid}/stack").read_text().splitlines()
    return "\n".join(lines)


def collect_garbage_less_often() -> None:
    """Has Python look for garbage among the objects made from now on, and only now and then.

    The modules of a process stay until it ends, and to go through them takes tens of milliseconds.
    A document of a thousand nodes would have Python look three times while it is read.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def resident_bytes() -> int:
    """Returns the bytes of memory that this process has in RAM."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Ram:
    """Describes the RAM of the machine, or of the container that this process is in."""

    available_bytes: int
    """Bytes that processes can still take."""
    total_bytes: int


def ram(memory: Path = MEMORY_FILE, cgroup: Path = CGROUP_FOLDER) -> Ram:
    """Returns the RAM of the machine, or within the container if that has less left.

    Args:
        memory: The kernel's account of the machine's memory.
        cgroup: The folder of the container's control group, version 2.
    """
    lines = dict(line.split(":", 1) for line in memory.read_text().splitlines())
    available, total = (int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no limit, or no such group
        return Ram(available, total)
    with suppress(OSError, ValueError, KeyError):  # files that the kernel drops where room is asked
        counts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used -= int(counts["inactive_file"])
    return Ram(min(available, max(0, limit - used)), min(total, limit))


def set_name(name: str) -> str:
    """Gives this process the name that `ps` and /proc show; returns the one that it had.

    Args:
        name: The name, of 15 characters at most.
    """
    with suppress(OSError):
        file = Path("/proc/self/comm")
        before = file.read_text().strip()
        file.write_text(name)
        return before
    return name


def name_of(pid: int) -> str:
    """Returns the name of a process; empty if there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def private_bytes() -> int:
    """Returns the bytes of memory that this process shares with no other; 0: not known."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        private = [line.split()[1] for line in lines if line.startswith("Private_")]
        return 1024 * sum(map(int, private))
    return 0


def thread_states(name: str) -> list[str]:
    """Returns the states of this process's threads of one name, each as one letter: S sleeps, R
    runs or is ready to run."""
    states = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):
            text = Path(f"/proc/self/task/{task}/stat").read_text()
            before, _, rest = text.rpartition(")")
            if before.endswith(f"({name}"):
                states.append(rest.split()[0])
    return states


def _stat_fields(path: str | Path) -> list[str]:
    """Returns the fields of a `stat` file from the state on; none if the process is gone."""
    try:
        return Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return []
