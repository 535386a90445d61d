"""Stands by in a process that has run a script up to `elasticzero.run`, until it gets a rank.

The agent has it begin beside the training, so that a worker's successor need not run the beginning
of the script. The process belongs to a local rank; what it does not know is its world.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from elasticzero.errors import ElasticZeroError, one_line
from elasticzero.ipc.assignment import Assignment, torchrun_environment
from elasticzero.ipc.channel import Channel
from elasticzero.ipc.messages import CannotStandBy, Confirm, Message, Outdated, StandsBy
from elasticzero.ipc.rank_variables import leave_world_variables, watch_world_variables
from elasticzero.ipc.script_files import ScriptFiles
from elasticzero.processes import (
    STANDBY_NAME,
    children_of,
    name_of,
    private_bytes,
    set_name,
)

COPIED_BYTES = 1 << 20
LOOK_S = 2.0
"""Seconds between two looks at whether the files that the script has read are as they were."""
CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, CU_COMPUTEMODE_DEFAULT = 20, 0
"""Number of the attribute, and its value where several processes may use a GPU (cuda.h)."""
LEAST_FREE_SHARE = 0.05
"""Share of a GPU's memory that must be free beside the context of a process that stands by."""
OOM_SCORE_FILE = Path("/proc/self/oom_score_adj")
FIRST_TO_END = "1000"
"""Score of the process that the kernel ends first where memory is exhausted."""


class CannotHold(BaseException):
    """Unwinds a script that cannot be held, so that it releases what it holds.

    It is no `Exception`, so that no handler of the script catches it.
    """


class GpuTaken(ElasticZeroError):
    """The GPU has no room for the context of a process that stands by."""


class Standby:
    """Holds what a process has besides its script while it has no rank."""

    def __init__(self, tell: Callable[[Message], None], logs: Sequence[int]) -> None:
        """Has the process be the first that is ended where memory is exhausted, and run only where
        a core rests; begins to watch the script.

        Args:
            tell: Sends a message to the agent.
            logs: Descriptors of the logs of its worker: of stderr and, if stdout has one of its
                own, of that.
        """
        self._tell = tell
        self._logs = logs
        self._outputs = [os.dup(number) for number in (2, 1)[: len(logs)]]
        """Descriptors of the files that stderr and stdout go into."""
        self._refused = ""
        self._oom_score = FIRST_TO_END
        with suppress(OSError):
            self._oom_score = OOM_SCORE_FILE.read_text()
            OOM_SCORE_FILE.write_text(FIRST_TO_END)
        run_when_nothing_else_does()
        watch_world_variables(lambda name: self._refuse(f"the script looks at {name}"))
        self._files = ScriptFiles(lambda act: self._refuse(f"the script {act}"))

    def _refuse(self, what: str) -> None:
        """Tells the agent what the script does that cannot be, and unwinds it."""
        if not self._refused:
            self._refused = f"{what} before elasticzero.run"
            self._tell(CannotStandBy(reason=self._refused))
        raise CannotHold(self._refused)

    def _obstacle(self) -> str:
        """Returns why this process cannot wait for a rank; empty: it can."""
        if self._refused:
            return self._refused
        if children_of(os.getpid()):
            return "the script starts a process that still runs at elasticzero.run"
        if torch.cuda.is_initialized():
            return "the script uses the GPU before elasticzero.run"
        try:
            make_gpu_context(int(os.environ["LOCAL_RANK"]))
        except (GpuTaken, RuntimeError) as error:
            return one_line(error)
        return ""

    def wait(self, channel: Channel) -> Message | None:
        """Waits for the assignment, and returns the first message.

        What the script has printed so far is then part of its worker's logs, and torchrun's
        variables are set.

        Args:
            channel: The channel to the agent.
        """
        self._files.close()
        if why := self._obstacle():
            self._tell(CannotStandBy(reason=why))
            os._exit(0)
        run_like_others()
        stands_by = StandsBy(private_bytes=private_bytes())
        self._tell(stands_by)
        while (first := channel.receive(LOOK_S)) is None or isinstance(first, Confirm):
            if changed := self._files.changed():
                self._tell(Outdated(path=changed[0], stamp=changed[1]))
                os._exit(0)
            if first is not None:  # from now on the agent decides alone what becomes of it
                self._tell(stands_by)
                first = channel.receive()
                break
        leave_world_variables()
        take_logs(self._outputs, self._logs)
        with suppress(OSError):
            OOM_SCORE_FILE.write_text(self._oom_score)
        if name_of(os.getpid()) == STANDBY_NAME:
            set_name(name_of(os.getppid()))
        if not isinstance(first, Assignment):
            return first
        os.environ.update(torchrun_environment(first))
        return replace(first, store_fd=channel.take_fd())


_standbys: list[Standby] = []
"""Holds one element in a process that stands by, and none in all others."""


def begin_standby(tell: Callable[[Message], None], logs: Sequence[int]) -> None:
    """Has this process stand by, before its script begins.

    Args:
        tell: Sends a message to the agent.
        logs: Descriptors of the logs of its worker.
    """
    _standbys.append(Standby(tell, logs))


def first_message(channel: Channel) -> Message | None:
    """Returns the first message of the agent, for which a process that stands by waits for long.

    Args:
        channel: The channel to the agent.
    """
    return _standbys.pop().wait(channel) if _standbys else channel.receive()


def take_logs(outputs: Sequence[int], logs: Sequence[int]) -> None:
    """Has all descriptors of this process's outputs be those of logs, after what they have so far.

    What the script itself has put in the place of stdout or stderr stays.

    Args:
        outputs: Descriptors of the files that its output has gone into.
        logs: Descriptors of the logs, in the same order.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    for output, log in zip(outputs, logs, strict=True):
        start = _append(output, log, 0)
        file = os.fstat(output)
        for number in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # the listing's own
                if number != output and os.path.samestat(os.fstat(number), file):
                    os.dup2(log, number, inheritable=os.get_inheritable(number))
        _append(output, log, start)  # what a thread has written meanwhile
        os.close(output)
        os.close(log)


def _append(output: int, log: int, start: int) -> int:
    """Appends to a log what a file has from a byte on; returns the byte after the last one."""
    with suppress(OSError):  # a full disk
        while data := os.pread(output, COPIED_BYTES, start):
            start += os.write(log, data)
    return start


def run_when_nothing_else_does() -> None:
    """Has the kernel run this process only where a core would rest, if that can be undone.

    The beginning of a script takes seconds of a core beside the training. An ordinary user may not
    raise a priority again on each kernel, so a child tries that first. A process that has another
    policy than the usual one keeps it.
    """
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    child = os.fork()
    if child == 0:
        try:
            _schedule(os.SCHED_IDLE)
            _schedule(os.SCHED_OTHER)
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        _schedule(os.SCHED_IDLE)


def run_like_others() -> None:
    """Undoes `run_when_nothing_else_does`, for all threads that the script has started."""
    if os.sched_getscheduler(0) == os.SCHED_IDLE:
        _schedule(os.SCHED_OTHER)


def _schedule(policy: int) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread), policy, os.sched_param(0))


def make_gpu_context(index: int) -> None:
    """Makes the CUDA context of the worker's GPU, if there is one that processes may share.

    Args:
        index: Number of the GPU among those that this process sees.

    Raises:
        GpuTaken: Its memory is short, or one process alone may use it.
    """
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return
    if not _is_shared(index):
        raise GpuTaken("one process alone may use the GPU (its compute mode is exclusive)")
    torch.zeros(1, device=f"cuda:{index}")
    torch.cuda.synchronize(index)
    free, total = torch.cuda.mem_get_info(index)
    if free < LEAST_FREE_SHARE * total:
        raise GpuTaken(f"the GPU has only {free >> 20} MiB of memory left beside the training")


def _is_shared(index: int) -> bool:
    """Returns whether several processes may use a GPU at a time; True if that is not known."""
    mode = ctypes.c_int(CU_COMPUTEMODE_DEFAULT)
    with suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("libcuda.so.1")
        cuda.cuInit(0)
        cuda.cuDeviceGetAttribute(ctypes.byref(mode), CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, index)
    return mode.value == CU_COMPUTEMODE_DEFAULT
