"""Starts a worker's process or reuses one, and exchanges messages with it."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from elasticzero.ipc.assignment import Assignment, NodePlace, torchrun_environment
from elasticzero.ipc.channel import Channel, ChannelClosed
from elasticzero.ipc.messages import Locate, Message, Prepare
from elasticzero.ipc.rank_variables import WORLD_VARIABLES
from elasticzero.launcher import secrets as secret
from elasticzero.launcher.workers.console_output import ConsoleOutput
from elasticzero.launcher.workers.error_file import error_file
from elasticzero.launcher.workers.forking.client import ForkServer
from elasticzero.launcher.workers.forking.requests import Launch
from elasticzero.launcher.workers.lifecycle import Event, WorkerState
from elasticzero.text import shown

log = logging.getLogger(__name__)
STACK_BYTES = 1 << 16
"""Number of bytes at the end of a log that are searched for the stack of a crash."""
FATAL = "Fatal Python error: "
"""Text with which such a stack begins."""
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
LOCAL_RANK_MACRO = "${local_rank}"
"""Placeholder in the arguments of scripts; torchrun replaces it too."""
NO_RANK = -1
"""Rank of a process that stands by."""
REASSIGN_TIMEOUT_S = 1.0
"""Seconds within which a reused process must take its new assignment."""


@dataclass(slots=True)
class Worker:
    """Holds one worker's process, its channel, its logs, and what it has reported so far."""

    rank: int
    local_rank: int
    pid: int
    channel: Channel
    log: Path
    """File that gets its stderr, and its stdout unless that has a file of its own."""
    log_start: int
    """Size of the log when this worker began."""
    stdout_log: Path | None = None
    stdout_start: int = 0
    channel_closed: bool = False
    """True if its end of the channel is closed; the process may still run."""
    state: WorkerState = field(default_factory=WorkerState)
    script_ended_s: float | None = None
    """Time at which its script and the exit functions had ended; the process may still run."""
    script_exit_code: int | None = None
    exiting: bool = False
    """True if its exit had begun when it was told to stop."""
    exit_code: int | None = None
    ended_s: float = 0.0
    """Time at which its process had ended; 0: it has not."""
    from_beginning: bool = True
    """True if its process has run the script from its beginning for this generation."""
    switched: bool = False
    """True if it has entered a generation inside its loop since this group's agent prepared it."""

    @property
    def running(self) -> bool:
        """Returns whether its process exists."""
        return self.state.running

    @property
    def at_work(self) -> bool:
        """Returns whether its process works for the generation."""
        return self.state.at_work

    def record(self, event: Event) -> None:
        """Advances its state by an event."""
        self.state = self.state.after(event)

    def send(self, message: Message) -> None:
        """Sends a message; does nothing if the channel is closed, for its exit is noticed
        elsewhere."""
        with suppress(ChannelClosed):
            self.channel.send(message)

    def prepare(self, message: Prepare, store_fd: int | None) -> None:
        """Sends what the worker needs to connect another generation beside its training.

        Args:
            message: The message; its assignment is None where the worker's node leaves.
            store_fd: The bound socket of rank 0's store, for rank 0.
        """
        with suppress(ChannelClosed):
            self.channel.send_with_fd(message, store_fd, REASSIGN_TIMEOUT_S)

    def request_location(self) -> None:
        """Requests a report of where its main thread is."""
        self.send(Locate())

    def receive(self) -> list[Message]:
        """Returns the messages since the last call; does not wait."""
        if not self.running or self.channel_closed:
            return []
        try:
            return self.channel.drain()
        except ChannelClosed:
            self.channel_closed = True
            return []
        finally:
            if (refusal := self.channel.take_refusal()) is not None:
                log.warning(
                    "rank %d: what its processes write to the agent is no message, and is left "
                    "out: %.200s",
                    self.rank,
                    shown(refusal),
                )

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to its whole process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """Says where the output of a node's workers goes."""

    directory: Path
    separate_stdout: frozenset[int] = frozenset()
    """Local ranks whose stdout has a file of its own."""

    def paths(self, local_rank: int) -> tuple[Path, Path | None]:
        """Returns the log of a worker, and that of its stdout; None: they are one."""
        stdout_log = self.directory / f"{local_rank}.stdout.log"
        separate = local_rank in self.separate_stdout
        return self.directory / f"{local_rank}.log", stdout_log if separate else None


def worker_logs(console: ConsoleOutput, directory: Path, local_ranks: Iterable[int]) -> Logs:
    """Returns where the output of a node's workers goes.

    Args:
        console: What of it is repeated on the terminal.
        directory: Directory of the logs.
        local_ranks: The workers.
    """
    separate = frozenset(rank for rank in local_ranks if console.needs_separate_stdout(rank))
    return Logs(directory=directory, separate_stdout=separate)


def fork(
    server: ForkServer,
    assignment: Assignment,
    launch: Launch,
    logs: Logs,
    wakeup_fd: int,
    store_fd: int | None,
) -> Worker:
    """Starts a new process for a worker.

    Args:
        server: Forks the process.
        assignment: What the worker is in its generation.
        launch: The script, its arguments and its environment.
        logs: Where the worker's output goes.
        wakeup_fd: The worker writes there to wake the agent.
        store_fd: The bound socket of rank 0's store, for rank 0.
    """
    local_rank = assignment.local_rank
    log, stdout_log = logs.paths(local_rank)
    with suppress(OSError):
        error_file(logs.directory, local_rank).unlink(missing_ok=True)
    agent_socket, worker_socket = socket.socketpair()
    opened = [_open_log(path) for path in (log, stdout_log) if path is not None]
    fds = [opened[0], worker_socket.fileno(), wakeup_fd]
    if store_fd is not None:
        fds.append(store_fd)
    fds += opened[1:]
    log_start, stdout_start = os.fstat(opened[0]).st_size, os.fstat(opened[-1]).st_size
    environment = launch.environment | torchrun_environment(assignment)
    worker_launch = replace(
        launch,
        environment=environment,
        arguments=_arguments(launch, local_rank),
        separate_stdout=stdout_log is not None,
    )
    try:
        server.prepare(assignment.tls)
        pid, numbers = server.start(worker_launch, fds)
    finally:
        for fd in opened:
            os.close(fd)
        worker_socket.close()
    channel = Channel(agent_socket)
    worker_store_fd = numbers[3] if store_fd is not None else None
    with suppress(ChannelClosed):
        channel.send(replace(assignment, store_fd=worker_store_fd))
    agent_socket.setblocking(False)  # a worker that reads no more must not hold the agent up
    return Worker(
        assignment.rank,
        local_rank,
        pid,
        channel,
        log,
        log_start,
        stdout_log=stdout_log,
        stdout_start=stdout_start,
    )


def fork_standby(
    server: ForkServer, place: NodePlace, launch: Launch, logs: Logs, wakeup_fd: int
) -> tuple[Worker, int]:
    """Starts a process that stands by for a worker, and returns it with its output.

    What it prints goes into a file without a name; once it has a rank, into its worker's log.

    Args:
        server: Forks the process.
        place: What its worker is on this node.
        launch: The script, its arguments and its environment.
        logs: Where the worker's output goes.
        wakeup_fd: The process writes there to wake the agent.
    """
    log, stdout_log = logs.paths(place.local_rank)
    agent_socket, worker_socket = socket.socketpair()
    opened = [_open_log(path) for path in (log, stdout_log) if path is not None]
    outputs = [os.memfd_create(f"standby-{place.local_rank}") for _ in opened]
    fds = [outputs[0], worker_socket.fileno(), wakeup_fd, *opened, *outputs[1:]]
    environment = {k: v for k, v in launch.environment.items() if k not in WORLD_VARIABLES}
    standby_launch = replace(
        launch,
        environment=environment | place.environment(),
        arguments=_arguments(launch, place.local_rank),
        separate_stdout=stdout_log is not None,
        stands_by=True,
    )
    try:
        pid, _ = server.start(standby_launch, fds)
    except BaseException:
        os.close(outputs[0])
        agent_socket.close()
        raise
    finally:
        for fd in (*opened, *outputs[1:]):
            os.close(fd)
        worker_socket.close()
    agent_socket.setblocking(False)
    channel = Channel(agent_socket)
    worker = Worker(NO_RANK, place.local_rank, pid, channel, log, 0, stdout_log=stdout_log)
    return worker, outputs[0]


def _arguments(launch: Launch, local_rank: int) -> tuple[str, ...]:
    """Returns the arguments of a worker's script."""
    return tuple(word.replace(LOCAL_RANK_MACRO, str(local_rank)) for word in launch.arguments)


def kill_all(workers: Iterable[Worker]) -> None:
    """Sends SIGKILL to processes that were kept for reuse and are not needed."""
    for worker in workers:
        worker.send_signal(signal.SIGKILL)
        worker.channel.close()


def reassign(old: Worker, assignment: Assignment, store_fd: int | None) -> Worker | None:
    """Assigns a reused process to another generation.

    Args:
        old: The worker of the generation before.
        assignment: What the worker is in the new generation.
        store_fd: The bound socket of rank 0's store, for rank 0.

    Returns:
        The new worker. None: the process cannot be reached; it is killed then.
    """
    try:
        old.channel.send_with_fd(assignment, store_fd, REASSIGN_TIMEOUT_S)
    except ChannelClosed:
        kill_all([old])
        return None
    return Worker(
        assignment.rank,
        assignment.local_rank,
        old.pid,
        old.channel,
        old.log,
        _size(old.log),
        stdout_log=old.stdout_log,
        stdout_start=0 if old.stdout_log is None else _size(old.stdout_log),
        from_beginning=False,
    )


def _open_log(path: Path) -> int:
    """Opens a log; where that cannot be made, as on a full disk, the output goes nowhere, because
    no training needs it."""
    try:
        return os.open(path, _APPEND, 0o644)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        log.warning("%s cannot be made, and the worker's output is lost: %s", path, error.strerror)
        return os.open(os.devnull, os.O_WRONLY)


def _size(path: Path) -> int:
    """Returns the size of a log; 0: somebody has deleted it."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def fatal_stack(worker: Worker) -> str:
    """Returns what Python wrote into a worker's log about the signal that ended it; empty if it
    wrote nothing."""
    try:
        with worker.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = worker.log_start if worker.log_start <= size else 0  # it was cut off meanwhile
            file.seek(max(start, size - STACK_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    begins = text.rfind(FATAL)
    return text[begins:].rstrip() if begins >= 0 else ""


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the agent's environment without the variables that hold secrets."""
    return {key: value for key, value in environment.items() if key not in secret.VARIABLES}
