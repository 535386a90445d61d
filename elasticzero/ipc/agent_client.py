"""Implements a worker's client of its agent, which receives messages and ends the process."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NoReturn

import torch

from elasticzero.errors import ExitCode, OperatorError
from elasticzero.ipc.assignment import Assignment, LeftOutBatch, Resume
from elasticzero.ipc.channel import CHANNEL_FD_VARIABLE, WAKEUP_FD_VARIABLE, Channel, ChannelClosed
from elasticzero.ipc.messages import (
    Abort,
    Busy,
    FaultStruck,
    Locate,
    Located,
    LoopExited,
    Message,
    Prepare,
    PrepareFailed,
    Request,
    Saved,
    SaveState,
    SnapshotHeld,
    Tagged,
    TagStep,
    Withdraw,
)
from elasticzero.ipc.rounds import RoundNews
from elasticzero.ipc.standby import first_message
from elasticzero.ipc.thread_location import main_thread
from elasticzero.log_output import (
    attach_to_stderr,
    attach_to_stderr_by_default,
    keep_write_errors,
)

STANDALONE = Assignment(
    job="",
    node="",
    generation=1,
    token="alone",
    rank=0,
    local_rank=0,
    world_size=1,
    local_world_size=1,
    group_rank=0,
    master_address="127.0.0.1",
    master_port=0,
    store_fd=None,
    strategy="ddp",
    resume=Resume(tier="fresh"),
    snapshot_root="",
)
"""Assignment of a process without an agent."""


class GenerationEnded(BaseException):
    """Ends the script's loop. It is no `Exception`, so that no handler of the script catches it."""

    def __init__(self, reason: str, *, aborted: bool = False, switched: str = "") -> None:
        """Says how the generation has ended on this rank.

        Args:
            reason: Why it has.
            aborted: True if the agent has ended it; False if all ranks agreed at a boundary.
            switched: Token of the world that the other ranks have gone over to; empty: none.
        """
        super().__init__(reason)
        self.reason = reason
        self.aborted = aborted
        self.switched = switched


class RolledBack(GenerationEnded):
    """Ends the script's loop on all ranks, because training goes back to a held state."""

    def __init__(self, reason: str, reason_here: str, left_out: LeftOutBatch) -> None:
        """Says which step was not applied, and why.

        Args:
            reason: Why it was not applied, as all ranks know it.
            reason_here: What is not finite on this rank; empty: everything is finite.
            left_out: The global batch, which is left out from now on.
        """
        on_this_rank = f" (here {reason_here})" if reason_here else ""
        super().__init__(
            f"step {left_out.step} was not applied: {reason}{on_this_rank}; "
            "training goes back to a held state, and leaves this batch out"
        )
        self.left_out = left_out


class AgentClient:
    """Sends messages to the agent, and receives the agent's in a thread.

    Without an agent the process trains alone.
    """

    def __init__(self, channel: Channel | None, assignment: Assignment) -> None:
        self.assignment = assignment
        self.flags = 0
        self.aborted: str | None = None
        self.held = self.not_held = -1
        """Newest step whose snapshot this node holds, and newest one that it could not hold."""
        self.held_s = 0.0
        """Time on the monotonic clock at which the agent has told of the first of them."""
        self.saved = self.unsaved = -1
        """Newest step whose save has ended on this node, and newest one that ended without a
        checkpoint."""
        self.tags_missing = 0
        """Number of calls of `tag` that the agent has not answered yet."""
        self.save_error: str | None = None
        """Error of the newest save that ended without a checkpoint."""
        self.fault_struck = -1
        """Step up to which the faults of `elasticzero local` have come."""
        self.not_finite: str | None = None
        """The agent's finding of NaN or infinity in a captured state; None: it has found none."""
        self.saves: queue.SimpleQueue[SaveState] = queue.SimpleQueue()
        self.round_news: dict[int, RoundNews] = {}
        """News of the rounds that an island takes part in, by version."""
        self._channel = channel
        self._assignments: queue.SimpleQueue[Assignment] = queue.SimpleQueue()
        """Assignments of the generations to come."""
        self._busy_sections: list[str] = []
        """The busy sections that the main thread is in, the innermost last."""
        self._on_abort: Callable[[], None] = lambda: None
        self._on_change: Callable[[Prepare | Withdraw], None] = self._refuse_change
        self.awaits = ""
        """The place where the main thread left its loop, while it waits for the other ranks to
        leave theirs."""
        self.shutting_down = threading.Event()
        """Set while a thread runs the stop protocol."""
        self._shutdown_lock = threading.Lock()
        if channel is not None:
            threading.Thread(
                target=self._receive_messages, name="elasticzero-agent", daemon=True
            ).start()

    @classmethod
    def from_environment(cls) -> AgentClient:
        """Returns the client on the inherited socket, with the assignment that the agent sends
        first; notes of this package are shown from here on."""
        number = os.environ.get(CHANNEL_FD_VARIABLE)
        if number is None:
            attach_to_stderr_by_default()
            return cls(None, STANDALONE)
        keep_write_errors()  # a program that the agent has executed has none yet
        attach_to_stderr()
        fd = int(number)
        os.set_inheritable(fd, False)
        bell = os.environ.get(WAKEUP_FD_VARIABLE)
        if bell is not None:
            os.set_inheritable(int(bell), False)
        channel = Channel(socket.socket(fileno=fd), int(bell) if bell is not None else None)
        first = first_message(channel)
        if not isinstance(first, Assignment):
            raise OperatorError(f"the agent began with {first!r} and not with an assignment")
        return cls(channel, first)

    @property
    def standalone(self) -> bool:
        return self._channel is None

    def on_abort(self, act: Callable[[], None]) -> None:
        """Registers `act`, which the receiving thread calls when the agent ends the generation.

        If the generation has ended already, `act` is called at once.
        """
        self._on_abort = act
        if self.aborted is not None:
            act()

    def on_change(self, act: Callable[[Prepare | Withdraw], None]) -> None:
        """Registers `act`, which the receiving thread calls when the agent has another world
        prepared beside this one, and when it takes that back; `act` must not wait."""
        self._on_change = act

    def _refuse_change(self, message: Prepare | Withdraw) -> None:
        """Answers where no world can be entered inside of a loop."""
        if isinstance(message, Prepare):
            close_store_of(message)
            reason = "this generation has no loop in which another world can be entered"
            final = not self.assignment.changes_inside  # else the loop has not begun
            self.send(PrepareFailed(token=message.token, reason=reason, final=final))

    def enter_world(self, assignment: Assignment) -> None:
        """Takes the assignment of a world that is entered inside of the loop.

        What the agent has asked and told is still asked and true.
        """
        self.assignment = assignment

    @contextmanager
    def exit_on_abort(self) -> Iterator[None]:
        """Marks a section in which an `Abort` ends the process (rule S0)."""
        before = self._on_abort
        self.on_abort(lambda: exit_now(ExitCode.LEFT))
        try:
            yield
        finally:
            self.on_abort(before)

    def check(self) -> None:
        """Raises `GenerationEnded` if the agent has ended the generation."""
        if self.aborted is not None:
            raise GenerationEnded(self.aborted, aborted=True)

    def claim_shutdown(self) -> bool:
        """Returns whether the caller shall run the stop protocol: True for the first thread that
        asks."""
        with self._shutdown_lock:
            is_first = not self.shutting_down.is_set()
            self.shutting_down.set()
        return is_first

    def unless_shutting_down(self, begin: Callable[[], None]) -> None:
        """Calls `begin()`, unless another thread runs the stop protocol.

        In that case it never returns, because the state is being saved.
        """
        with self._shutdown_lock:
            if not self.shutting_down.is_set():
                return begin()
        park()

    def await_assignment(self) -> None:
        """Waits for the next generation's assignment; until then the agent may kill this
        process."""
        self.assignment = self._assignments.get()
        self.shutting_down.clear()

    def _begin(self, assignment: Assignment) -> None:
        """Applies the assignment of another generation, which voids the agent's earlier
        messages."""
        assert self._channel is not None
        self.flags, self.aborted, self.save_error, self.not_finite = 0, None, None, None
        self.held = self.not_held = self.saved = self.unsaved = -1
        self.tags_missing = 0
        self.saves = queue.SimpleQueue()
        self.round_news = {}
        self._busy_sections.clear()
        self.awaits = ""
        self._on_abort = lambda: None
        self._on_change = self._refuse_change
        self._assignments.put(replace(assignment, store_fd=self._channel.take_fd()))

    def send(self, message: Message) -> None:
        """Sends a message if there is an agent; a worker whose agent is gone exits."""
        if self._channel is None:
            return
        try:
            self._channel.send(message)
        except ChannelClosed:
            os._exit(1)

    def tag(self, step: int, tags: tuple[str, ...]) -> None:
        """Has tags name a step that is saved, once the saves that were requested before are over;
        rank 0 alone calls this."""
        self.tags_missing += 1
        self.send(TagStep(step=step, generation=self.assignment.generation, tags=tags))

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """Marks a section that makes no steps and is no hang; sections may be nested."""
        self._busy_sections.append(doing)
        self.send(Busy(doing=doing))
        try:
            yield
        finally:
            self._busy_sections.pop()
            self.send(Busy(doing=self._busy_sections[-1] if self._busy_sections else None))

    @contextmanager
    def awaiting(self, left_at: str) -> Iterator[None]:
        """Marks a section in which this rank has left its loop early and waits for the other
        ranks."""
        if not left_at:
            yield
            return
        self.awaits = f", having left its loop at {left_at}"
        self.send(LoopExited(awaits=True))
        yield
        self.awaits = ""
        self.send(LoopExited())

    @property
    def is_busy(self) -> bool:
        """Returns whether the main thread is in a busy section."""
        return bool(self._busy_sections)

    def _receive_messages(self) -> None:
        assert self._channel is not None
        while True:
            try:
                message = self._channel.receive()
            except (ChannelClosed, OSError, ValueError):
                os._exit(1)
            if message is not None:
                self._handle(message)

    def _handle(self, message: Message) -> None:
        assert self._channel is not None
        match message:
            case Assignment():
                self._begin(message)
            case Request(flags=flags):
                self.flags = flags
            case Prepare(assignment=Assignment() as assignment):
                placed = replace(assignment, store_fd=self._channel.take_fd())
                self._on_change(replace(message, assignment=placed))
            case Prepare() | Withdraw():
                self._on_change(message)
            case Abort(reason=reason):
                self.aborted = reason
                self._on_abort()
            case Locate():
                place, waits = main_thread()
                waits = waits or torch.cuda.is_initialized()
                left = bool(self.awaits)
                self.send(Located(place=place + self.awaits, waits=waits, left=left))
            case SaveState():
                self.saves.put(message)
            case RoundNews():
                self.round_news[message.version] = message
            case SnapshotHeld(step=step, error=None):
                self.held, self.held_s = step, time.monotonic()
            case SnapshotHeld(step=step, error=error, not_finite=not_finite):
                self.not_held = step
                if not_finite:
                    self.not_finite = error
            case Saved(step=step, error=error):
                if error is not None:
                    self.unsaved, self.save_error = step, error
                self.saved = step
            case Tagged():
                self.tags_missing = max(0, self.tags_missing - 1)
            case FaultStruck(step=step):
                self.fault_struck = max(self.fault_struck, step)
            case _:
                pass


def close_store_of(message: Prepare) -> None:
    """Closes the socket of rank 0's store, which came with a message that is not followed."""
    if message.assignment is not None and message.assignment.store_fd is not None:
        os.close(message.assignment.store_fd)


def exit_now(code: int) -> NoReturn:
    """Exits the process at once, without running any of the script's exit handlers."""
    with suppress(Exception):
        sys.stdout.flush()
    with suppress(Exception):
        sys.stderr.flush()
    os._exit(code)


def park() -> NoReturn:
    """Never returns, because another thread runs the stop protocol, which ends the process."""
    while True:
        time.sleep(3600)
