"""Moves a worker's process from one generation to the next.

It drops the old generation's objects, sends `Waiting`, and takes the next assignment. `reuse_rules`
decides what prevents that.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from elasticzero.comm.process_group import ProcessGroups
from elasticzero.ipc.agent_client import AgentClient, exit_now
from elasticzero.ipc.assignment import torchrun_environment
from elasticzero.ipc.messages import Waiting
from elasticzero.processes import children_of, resident_bytes
from elasticzero.state.rng import RngState
from elasticzero.torch_internals.groups import script_groups
from elasticzero.worker.reuse_rules import Leftovers, reason_not_to_reuse

log = logging.getLogger(__name__)

CLEAR_S = 3.0
"""Time in seconds after which a process that has not dropped the old generation is ended: a
destructor of torch may hang with Python's lock held."""
LINGER_S = 0.2
"""Time that threads and children get to end, in seconds."""
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class EndedGeneration:
    """Describes a generation that has ended, in a process that may be used again."""

    code: int
    """Exit code of the process if it is not used again."""
    groups: ProcessGroups | None
    """The process groups; None: the world was never formed."""


@dataclass(slots=True)
class ProcessBaseline:
    """Describes the process before its first generation."""

    threads: set[int | None] = field(default_factory=lambda: set(_threads()))
    children: set[int] = field(default_factory=lambda: set(children_of(os.getpid())))
    rng: RngState = field(default_factory=lambda: RngState.capture(torch.device("cpu")))
    resident_bytes: int | None = None
    """Resident memory in bytes after the first generation; None: it has not ended."""

    def generation_ended(self, resident_bytes: int) -> None:
        """Takes the resident memory in bytes, after the first generation alone."""
        if self.resident_bytes is None:
            self.resident_bytes = resident_bytes


def prepare_for_next_generation(
    link: AgentClient, ended: EndedGeneration, baseline: ProcessBaseline
) -> None:
    """Drops the old generation and waits for the next assignment; exits if a rule forbids the
    reuse.

    Nothing may refer to the old generation any more but `ended`.

    Args:
        link: The client of the agent, which gets the next assignment.
        ended: The old generation.
        baseline: What the process was before its first generation; the first call records its
            memory.
    """
    if ended.groups is None:
        exit_now(ended.code)
    faulthandler.dump_traceback_later(CLEAR_S, exit=True, file=2)  # it works without Python's lock
    link.on_abort(lambda: None)
    leftovers = _clear(ended.groups, baseline)
    faulthandler.cancel_dump_traceback_later()
    why = reason_not_to_reuse(leftovers)
    if why is not None:
        log.info("this worker's process is not kept: %s", why)
        exit_now(ended.code)
    baseline.generation_ended(leftovers.resident_bytes)
    link.send(Waiting())
    link.await_assignment()
    os.environ.update(torchrun_environment(link.assignment))
    baseline.rng.apply(torch.device("cpu"))  # as in a new process


def _clear(groups: ProcessGroups, baseline: ProcessBaseline) -> Leftovers:
    """Drops the objects of the generation, and returns what cannot be dropped."""
    left_groups = len(script_groups())
    gc.collect()
    released = not left_groups and groups.end_all()
    cuda_error = _empty_gpu()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    deadline_s = time.monotonic() + LINGER_S
    while True:
        threads = [name for ident, name in _threads().items() if ident not in baseline.threads]
        children = set(children_of(os.getpid())) - baseline.children
        if not (threads or children) or time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    return Leftovers(
        script_groups=left_groups,
        released=released,
        threads=tuple(threads),
        children=tuple(sorted(children)),
        cuda_error=cuda_error,
        resident_bytes=resident_bytes(),
        first_resident_bytes=baseline.resident_bytes,
    )


def _threads() -> dict[int | None, str]:
    """Returns the threads that Python has started, without torch's own that have run some
    Python."""
    return {
        thread.ident: thread.name
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)  # noqa: SLF001 - no public name
    }


def _empty_gpu() -> str | None:
    """Waits for the GPU and frees its memory; returns an error of CUDA, which would persist."""
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
