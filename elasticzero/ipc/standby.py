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
from typing import NoReturn

import torch

from elasticzero.errors import ElasticZeroError, one_line
from elasticzero.ipc.assignment import Assignment, torchrun_environment
from elasticzero.ipc.channel import Channel
from elasticzero.ipc.messages import CannotStandBy, Message, Outdated, StandsBy
from elasticzero.ipc.rank_variables import leave_world_variables, watch_world_variables
from elasticzero.ipc.script_files import ScriptFiles
from elasticzero.processes import STANDBY_NAME, private_bytes, set_name

LOGS_VARIABLE = "ELASTICZERO_STANDBY_LOGS"
"""Environment variable with the descriptors of the worker's logs, separated by a comma; with one of
them stdout and stderr share it."""
NAME_VARIABLE = "ELASTICZERO_STANDBY_NAME"
"""Environment variable with the name that the process has as a worker."""
COPIED_BYTES = 1 << 20
LOOK_S = 2.0
"""Seconds between two looks at whether the files that the script has read are as they were."""
CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, CU_COMPUTEMODE_DEFAULT = 20, 0
"""Number of the attribute, and its value where several processes may use a GPU (cuda.h)."""
LEAST_FREE_SHARE = 0.05
"""Share of a GPU's memory that must be free beside the context of a process that stands by."""


_files: list[ScriptFiles] = []
"""What this process's script has read, while it stands by."""


class GpuTaken(ElasticZeroError):
    """The GPU has no room for the context of a process that stands by."""


def begin_standby(leave: Callable[[str], NoReturn]) -> None:
    """Has this process stand by: it ends at the script's first look at what it does not know.

    Args:
        leave: Ends this process, and tells the agent why it cannot stand by.
    """
    os.environ[NAME_VARIABLE] = set_name(STANDBY_NAME)
    run_when_nothing_else_does()
    watch_world_variables(lambda name: leave(f"the script looks at {name} before elasticzero.run"))
    _files.append(ScriptFiles(lambda act: leave(f"the script {act} before elasticzero.run")))


def stand_by(channel: Channel) -> Message | None:
    """Waits for the assignment, and returns the first message.

    What the script has printed so far is then part of its worker's logs, and torchrun's variables
    are set.

    Args:
        channel: The channel to the agent.
    """
    try:
        make_gpu_context(int(os.environ["LOCAL_RANK"]))
    except (GpuTaken, RuntimeError) as error:
        channel.send(CannotStandBy(reason=one_line(error)))
        os._exit(0)
    run_like_others()
    for files in _files:
        files.close()
    channel.send(StandsBy(private_bytes=private_bytes()))
    while (first := channel.receive(LOOK_S)) is None:
        for files in _files:
            if changed := files.changed():
                channel.send(Outdated(path=changed))
                os._exit(0)
    take_logs([int(number) for number in os.environ.pop(LOGS_VARIABLE).split(",")])
    leave_world_variables()
    set_name(os.environ.pop(NAME_VARIABLE))
    if not isinstance(first, Assignment):
        return first
    os.environ.update(torchrun_environment(first))
    return replace(first, store_fd=channel.take_fd())


def take_logs(logs: Sequence[int]) -> None:
    """Has stdout and stderr write into these logs, after what they have written so far.

    Args:
        logs: Descriptors of the log of stderr and, if stdout has one of its own, of that.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    for number, log in ((2, logs[0]), (1, logs[-1])):
        if number == 2 or len(logs) > 1:
            _append(number, log)
        os.dup2(log, number)
    for log in logs:
        os.close(log)


def _append(output: int, log: int) -> None:
    """Appends the whole content of a file that this process has written to a log."""
    with suppress(OSError):  # a full disk
        start = 0
        while data := os.pread(output, COPIED_BYTES, start):
            os.write(log, data)
            start += len(data)


def run_when_nothing_else_does() -> None:
    """Has the kernel run this process only where a core would rest, if that can be undone.

    The beginning of a script takes seconds of a core beside the training. An ordinary user may not
    raise a priority again on each kernel, so a child tries that first.
    """
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
