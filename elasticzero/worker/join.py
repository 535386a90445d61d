"""Joins a worker to a generation: the ranks meet, and all agree when to save."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from elasticzero.checkpoint.storage.base import Storage, within
from elasticzero.checkpoint.storage.urls import open_directory, open_storage
from elasticzero.comm import nccl
from elasticzero.comm.nccl import device_of
from elasticzero.comm.process_group import ProcessGroups, connect
from elasticzero.comm.rendezvous import RankInfo, rendezvous
from elasticzero.comm.worlds.unconnected import unconnected
from elasticzero.errors import EntryRefused, ExitCode, StorageError, UserError
from elasticzero.ipc.agent_client import AgentClient, exit_now
from elasticzero.ipc.assignment import Assignment
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import Attached
from elasticzero.processes import resident_bytes
from elasticzero.serialization import decode, encode, parse_json
from elasticzero.text import print_foreign
from elasticzero.worker import nccl_log

log = logging.getLogger(__name__)

STORAGE_LIMIT_S = 10.0
"""Time limit for storage, in seconds; `_check_shared` does not wait for a slower one."""
SHARED_WAIT_S = 3.0
"""Time in seconds that a network's file system may take to show a file that another node wrote."""
LOOK_S = 0.25
"""Seconds between two looks at whether a step of the start takes too long."""
CUBLAS_WORKSPACE = ":4096:8"
"""The workspace with which cuBLAS is deterministic; it is read when a GPU is first used."""


def join_world(link: AgentClient) -> tuple[torch.device, ProcessGroups | None]:
    """Returns this worker's device, and the process groups of its world; None without an agent.

    While it connects there is no state yet, so an `Abort` ends the process at once; the caller sets
    what an `Abort` does after that.
    """
    a = link.assignment
    info = RankInfo.from_assignment(a)
    _set_up_process(link)
    if link.standalone:
        return device_of(info.local_rank), None
    watchdog = StartupWatchdog(link)
    watchdog.allow(info.start_timeout_s, "looking for this rank's device")
    try:
        device = device_of(info.local_rank)
        with link.busy("meeting the other ranks"):
            store = rendezvous(info, watchdog.allow)
        if device.type != "cuda" or a.local_rank:
            return device, connect(info, device, store)
        return device, _connect_and_tell(link, lambda: connect(info, device, store))
    finally:
        watchdog.cancel()


def begin_unconnected(link: AgentClient) -> ProcessGroups:
    """Returns the groups of a worker that is to enter a world inside of the others' loops."""
    _set_up_process(link)
    info = RankInfo.from_assignment(link.assignment)
    device = device_of(info.local_rank)
    if device.type == "cuda":
        nccl.set_up(device)
    return unconnected(info, device)


def _set_up_process(link: AgentClient) -> None:
    """Sets what torch computes with, and tells the agent that this worker obeys it."""
    a = link.assignment
    if a.changes_with_nccl:
        nccl.connect_at_once()
    own_threads = "OMP_NUM_THREADS" in os.environ and a.settings.threads is None
    if a.deterministic:
        compute_deterministically(fixed_threads=own_threads)
    if link.standalone:
        return
    os.environ.pop(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", None
    )  # for scripts that set up process groups themselves
    if not own_threads and not a.deterministic:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // a.local_world_size))
    _ignore_sigterm()
    link.send(Attached(pid=os.getpid(), resident_bytes=resident_bytes()))
    link.on_abort(lambda: exit_now(ExitCode.LEFT))


def _connect_and_tell(link: AgentClient, set_up: Callable[[], ProcessGroups]) -> ProcessGroups:
    """Returns the process groups, and tells the agent which network NCCL takes, if that can be
    read.

    Args:
        link: The client of the agent.
        set_up: Connects the ranks by NCCL.
    """
    with nccl_log.setup_log() as log:
        groups = set_up()
        network = log.network()
    if network is not None:
        link.send(nccl_log.message(network, link.assignment.nodes))
    return groups


def _ignore_sigterm() -> None:
    """Ignores SIGTERM in the worker.

    The service that stops a machine often sends SIGTERM to every process on it, and the agent then
    lets its workers leave at a boundary. A script's own handler stays; processes that the script
    starts obey the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    worker = os.getpid()

    def ignore(number: int, frame: FrameType | None) -> None:
        if os.getpid() != worker:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, ignore)


def time_is_up(
    limit_s: float, is_over: Callable[[float], bool], clock: Callable[[], float]
) -> bool:
    """Waits; returns whether the limit was reached before the wait was over.

    What counts is the time in which this process ran: of a look that comes late, no more counts
    than it should have taken. On a busy machine all ranks are slow, and none of them is lost.

    Args:
        limit_s: Number of seconds.
        is_over: Waits for so many seconds; returns True at once if the wait is over.
        clock: Returns the time in seconds.
    """
    left_s = limit_s
    while left_s > 0.0:
        began_s, look_s = clock(), min(LOOK_S, left_s)
        if is_over(look_s):
            return False
        left_s -= min(look_s, clock() - began_s)
    return True


class StartupWatchdog:
    """Ends this process when a step of the start exceeds its limit: torch's store can block for
    ever."""

    def __init__(self, link: AgentClient) -> None:
        self._link = link
        self._is_over = threading.Event()

    def allow(self, limit_s: float, doing: str) -> None:
        """Gives the process this many seconds from now on, in place of the limit before.

        Args:
            limit_s: Number of seconds.
            doing: The step for which they are.
        """
        self.cancel()
        self._is_over = threading.Event()
        arguments = (self._is_over, limit_s, doing)
        name = "elasticzero-connect"
        threading.Thread(target=self._watch, args=arguments, name=name, daemon=True).start()

    def cancel(self) -> None:
        self._is_over.set()

    def _watch(self, is_over: threading.Event, limit_s: float, doing: str) -> None:
        if time_is_up(limit_s, is_over.wait, time.monotonic):
            self._give_up(limit_s, doing)

    def _give_up(self, limit_s: float, doing: str) -> None:
        text = (
            f"the ranks did not meet, or set up no process group, within {limit_s:g} s: rank "
            f"{self._link.assignment.rank} was still {doing}"
        )
        self._link.send(Failed(step=0, blame="peer", message=text, traceback=""))
        print_foreign(text)
        with suppress(Exception):  # stderr may be anything by now
            faulthandler.dump_traceback(all_threads=True)  # the log says where each thread was
        os._exit(ExitCode.LEFT)


def compute_deterministically(*, fixed_threads: bool) -> None:
    """Has torch choose deterministic kernels, and refuse operations that have none.

    Args:
        fixed_threads: Whether the user has set OMP_NUM_THREADS; otherwise one thread is used,
            because the number that is chosen for a machine depends on how many workers it runs.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    if not fixed_threads:
        torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    filling: Any = torch.utils.deterministic  # which has the property at run time alone
    filling.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False


def agree_on_checkpointing(link: AgentClient, groups: ProcessGroups) -> bool:
    """Makes all ranks save and verify at the same steps, whatever each node was configured with.

    Returns whether checkpoints are written, which is so if rank 0's node has a directory. Raises
    `UserError` on a rank that has none if rank 0 has one: a node that joins must not end the saves.
    """
    assignment = link.assignment
    every = groups.control_tree.allreduce_max(
        assignment.checkpoint_every if assignment.rank == 0 else 0
    )
    chosen = -1 if assignment.snapshot_every is None else assignment.snapshot_every
    snapshots = groups.control_tree.allreduce_max(chosen if assignment.rank == 0 else -1)
    chosen = -1 if assignment.verify_every is None else assignment.verify_every
    verify = groups.control_tree.allreduce_max(chosen if assignment.rank == 0 else -1)
    link.assignment = replace(
        assignment,
        checkpoint_every=every,
        snapshot_every=None if snapshots < 0 else snapshots,
        verify_every=None if verify < 0 else verify,
    )
    saves = groups.control_tree.allreduce_max(
        int(assignment.rank == 0 and assignment.checkpoint_dir is not None)
    )
    if saves and assignment.checkpoint_dir is None:
        raise UserError(
            f"{assignment.node} has no --checkpoint-dir, and rank 0's node has one; give the same "
            "directory on all nodes"
        )
    saving = not groups.control_tree.allreduce_max(int(assignment.checkpoint_dir is None))
    if saving:
        _check_shared(assignment, groups.control_tree.allreduce_max)
    elif assignment.checkpoint_dir is not None:
        log.warning("no checkpoints: rank 0's node has no --checkpoint-dir")
    return saving


def _check_shared(assignment: Assignment, allreduce_max: Callable[[int], int]) -> None:
    """Checks that every rank sees rank 0's file in the checkpoint directory; all call this
    together.

    A directory of that name on each node's own disk would never hold a whole checkpoint. If storage
    cannot be written or does not answer, the ranks print that and training goes on; only a job
    without any state does not begin.

    Args:
        assignment: This rank's place and settings.
        allreduce_max: Returns the greatest of the ranks' numbers.

    Raises:
        UserError: This rank does not see the file.
        StorageError: Rank 0 cannot write it, and the job has no state.
    """
    a = assignment
    if a.checkpoint_dir is None or a.local_world_size == a.world_size or not _may_differ(a):
        return
    where, url = f"the checkpoint directory {a.checkpoint_dir}", a.checkpoint_dir
    name = _shared_name(a.token)
    trouble = ""
    if a.rank == 0:
        try:
            within(STORAGE_LIMIT_S, where, lambda: _put(url, name, a.node))
        except StorageError as error:
            if a.resume.tier == "fresh":
                raise
            trouble = str(error)
    seen = True
    if not allreduce_max(int(bool(trouble))):
        try:
            seen = within(STORAGE_LIMIT_S, where, lambda: _appears(open_storage(url), name))
        except StorageError as error:
            trouble = str(error)
        allreduce_max(0)
        if a.rank == 0:
            with suppress(StorageError):
                within(STORAGE_LIMIT_S, where, lambda: open_storage(url).remove(name))
    if trouble:
        text = (
            f"{trouble}; training goes on from step {a.resume.step}, and saves are tried when due"
        )
        log.warning(text)
    if not seen:
        raise UserError(
            f"{where} on {a.node} is not the one of rank 0's node: a file that was written there "
            "is not here; give a directory that all nodes share"
        )


def _may_differ(assignment: Assignment) -> bool:
    """Returns whether the checkpoint directory may be another one on each node, as a path may."""
    url = assignment.checkpoint_dir
    return url is not None and ("://" not in url or url.startswith("file://"))


def _shared_name(token: str) -> str:
    """Returns the name of the file by which ranks of a generation see whether they share a
    directory."""
    return f".shared-{token}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """Holds what must be equal on a rank that comes into a world inside of the others' loops."""

    digests: tuple[int, ...]
    """Digests of what the ranks have compared in `session.prepare`."""
    saves: bool
    """Checkpoints are written."""
    device: str
    """The type of the ranks' devices."""
    shares: bool
    """A file in the checkpoint directory shows whether it is the same one."""


@contextmanager
def introduction(
    assignment: Assignment, digests: Sequence[int], token: str, device: str, *, saves: bool
) -> Iterator[str]:
    """Yields what rank 0 tells ranks that come into a world.

    Args:
        assignment: That of this rank in the present world.
        digests: Digests of what the ranks have compared in `session.prepare`.
        token: Token of the world.
        device: The type of this rank's device.
        saves: Whether checkpoints are written.
    """
    url, name = assignment.checkpoint_dir, _shared_name(token)
    shares = saves and url is not None and _may_differ(assignment)
    if shares and url is not None:
        where = f"the checkpoint directory {url}"
        within(STORAGE_LIMIT_S, where, lambda: _put(url, name, assignment.node))
    told = Introduction(digests=tuple(digests), saves=saves, device=device, shares=shares)
    text = json.dumps(encode(told))
    try:
        yield text
    finally:
        if shares and url is not None:
            with suppress(StorageError):
                within(STORAGE_LIMIT_S, where, lambda: open_storage(url).remove(name))


def check_introduction(
    assignment: Assignment, digests: Sequence[int], device: str, text: str
) -> None:
    """Raises unless this rank may come into a world inside of the others' loops.

    Args:
        assignment: That of this rank in the world.
        digests: Digests of what it would have compared.
        device: The type of its device.
        text: What rank 0 tells.

    Raises:
        EntryRefused: Something is not the same here.
    """
    told = decode(Introduction, parse_json(text.encode(), "an introduction"), "an introduction")
    url = assignment.checkpoint_dir
    if told.digests != tuple(digests):
        raise EntryRefused("the script, its options or versions of packages are others here")
    if told.device != device:
        raise EntryRefused(f"this rank's device is of type {device}, rank 0's of {told.device}")
    if told.saves and url is None:
        raise EntryRefused("this node has no --checkpoint-dir, and the others have")
    if url is not None and not told.saves:
        raise EntryRefused("this node has a --checkpoint-dir, and rank 0's has none")
    if told.shares and url is not None:
        name, where = _shared_name(assignment.token), f"the checkpoint directory {url}"
        if not within(STORAGE_LIMIT_S, where, lambda: _appears(open_storage(url), name)):
            raise EntryRefused(f"{where} is not the one of rank 0's node")


def _put(url: str, name: str, node: str) -> None:
    open_directory(url).check_writable()
    open_storage(url).write(name, [node.encode()])


def _appears(storage: Storage, name: str) -> bool:
    deadline_s = time.monotonic() + SHARED_WAIT_S
    while True:
        try:
            storage.size(name)
            return True
        except FileNotFoundError:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.05)
