"""A worker's side of its agent: messages, the end of a generation, and the stop protocol.

Rules of the end of a generation, whatever its cause:
 S0  A worker that is told to stop while it connects or restores has nothing to hand over: it exits
     at once, for what it reads from may be gone and never answer.
 S1  An exception, of this rank or through a peer: first shut the group's sockets, so that the
     peers notice at once; then say `Failed`, and whose fault it is. A boundary with a raised flag
     needs neither.
 S2  Say `Stopping`: the step, whether the state is clean, whether this worker has all of it.
 S3  Await `Save`, SAVE_WAIT_S at most; if it is wanted and clean, write the snapshot, say
     `Captured`; if it cannot be written, say `Failed`, so that nobody takes this for a clean stop.
 S4  Exit at once; nothing of the script runs any more. But where the agent keeps processes, and
     this generation ended by a boundary or by a peer, go on as `survival` says.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch

from elasticzero.channel import CHANNEL_FD_VARIABLE, Channel, ChannelClosed
from elasticzero.collectives import Groups, Place, connect, device_of
from elasticzero.errors import (
    CheckpointDamaged,
    ElasticZeroError,
    ExitCode,
    OperatorError,
    StorageError,
    UserError,
    is_final,
    is_peer_error,
    one_line,
)
from elasticzero.messages import (
    Abort,
    Assignment,
    Attached,
    Busy,
    Captured,
    Failed,
    Kept,
    Locate,
    Located,
    Message,
    Request,
    Resume,
    Save,
    Saved,
    Stopping,
)
from elasticzero.whereabouts import main_thread

SAVE_WAIT_S = 30.0
POLL_S = 0.05
ADVICE = "; use another step"
"""What a damaged checkpoint asks of a person: here the job does it."""

T = TypeVar("T")


class GenerationEnded(BaseException):
    """Leaves the user's loop: not an `Exception`, so that no handler of the script keeps it."""

    def __init__(self, reason: str, *, aborted: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.aborted = aborted
        """The agent says that the generation is over; else: all ranks agreed at a boundary."""


class AgentLink:
    """The channel to the agent, and a thread that hears what it says; without an agent, a process
    that trains alone."""

    def __init__(self, channel: Channel | None, assignment: Assignment) -> None:
        self.assignment = assignment
        self.flags = 0
        self.aborted: str | None = None
        self.kept = self.unkept = -1
        """Newest step whose snapshot this node holds, or could not."""
        self.saved = self.unsaved = -1
        """Newest step whose save is over on this node, and over without a checkpoint."""
        self.save_error: str | None = None
        """Why the newest of those without a checkpoint has none."""
        self.saves: queue.SimpleQueue[Save] = queue.SimpleQueue()
        self._channel = channel
        self._assignments: queue.SimpleQueue[Assignment] = queue.SimpleQueue()
        """Of generations to come."""
        self._doing: list[str] = []
        """The busy sections that the main thread is in, the innermost last."""
        self._shut: Callable[[], None] = lambda: None
        self.ending = threading.Event()
        """A thread is at the stop protocol."""
        self._end_lock = threading.Lock()
        if channel is not None:
            threading.Thread(target=self._hear, name="elasticzero-agent", daemon=True).start()

    @classmethod
    def from_environment(cls) -> AgentLink:
        """The link over the inherited socket, with the assignment that the agent sends first."""
        number = os.environ.get(CHANNEL_FD_VARIABLE)
        if number is None:
            return cls(None, ALONE)
        fd = int(number)
        os.set_inheritable(fd, False)
        channel = Channel(socket.socket(fileno=fd))
        first = channel.receive()
        if not isinstance(first, Assignment):
            raise OperatorError(f"the agent began with {first!r} and not with an assignment")
        return cls(channel, first)

    @property
    def alone(self) -> bool:
        return self._channel is None

    def on_abort(self, shut: Callable[[], None]) -> None:
        """Have `shut` called, in the hearing thread, when the agent ends the generation."""
        self._shut = shut
        if self.aborted is not None:
            shut()

    @contextmanager
    def leaving_at_once(self) -> Iterator[None]:
        """A section in which an `Abort` ends the process: S0."""
        before = self._shut
        self.on_abort(lambda: leave(ExitCode.LEFT))
        try:
            yield
        finally:
            self.on_abort(before)

    def check(self) -> None:
        """Raise `GenerationEnded` when the agent has ended the generation."""
        if self.aborted is not None:
            raise GenerationEnded(self.aborted, aborted=True)

    def take_the_end(self) -> bool:
        """Whether the stop protocol is the caller's to go through; one thread alone may."""
        with self._end_lock:
            mine = not self.ending.is_set()
            self.ending.set()
        return mine

    def change(self, begin: Callable[[], None]) -> None:
        """`begin()`, unless another thread is at the stop protocol: then never return, for the
        state is being saved."""
        with self._end_lock:
            if not self.ending.is_set():
                return begin()
        _wait_for_the_end()

    def await_assignment(self) -> None:
        """Wait for a place in another generation; until then the agent may end this process."""
        self.assignment = self._assignments.get()
        self.ending.clear()

    def _begin(self, assignment: Assignment) -> None:
        """The agent gives a place in another generation: what it said before is void."""
        assert self._channel is not None
        self.flags, self.aborted, self.save_error = 0, None, None
        self.kept = self.unkept = self.saved = self.unsaved = -1
        self.saves = queue.SimpleQueue()
        self._doing.clear()
        self._shut = lambda: None
        self._assignments.put(replace(assignment, store_fd=self._channel.taken_fd()))

    def send(self, message: Message) -> None:
        """Without an agent, nothing; a worker whose agent is gone ends here."""
        if self._channel is None:
            return
        try:
            self._channel.send(message)
        except ChannelClosed:
            os._exit(1)

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """A section that makes no steps and is no hang; sections may lie in each other."""
        self._doing.append(doing)
        self.send(Busy(doing=doing))
        try:
            yield
        finally:
            self._doing.pop()
            self.send(Busy(doing=self._doing[-1] if self._doing else None))

    def _hear(self) -> None:
        assert self._channel is not None
        while True:
            try:
                message = self._channel.receive()
            except (ChannelClosed, OSError, ValueError):
                os._exit(1)
            match message:
                case Assignment():
                    self._begin(message)
                case Request(flags=flags):
                    self.flags = flags
                case Abort(reason=reason):
                    self.aborted = reason
                    self._shut()
                case Locate():
                    place, waits = main_thread()
                    waits = waits or torch.cuda.is_initialized()
                    self.send(Located(place=place, waits=waits))
                case Save():
                    self.saves.put(message)
                case Kept(step=step, error=None):
                    self.kept = step
                case Kept(step=step):
                    self.unkept = step
                case Saved(step=step, error=error):
                    if error is not None:
                        self.unsaved, self.save_error = step, error
                    self.saved = step
                case _:
                    pass


ALONE = Assignment(
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
"""The assignment of a process without an agent."""


def enter_world(link: AgentLink) -> tuple[torch.device, Groups | None]:
    """This worker's device, and the process groups of its world; None without an agent.

    While it connects there is no state yet, so an `Abort` ends the process at once.
    """
    a = link.assignment
    place = Place(
        rank=a.rank,
        world_size=a.world_size,
        local_rank=a.local_rank,
        master_address=a.master_address,
        master_port=a.master_port,
        store_fd=a.store_fd,
        token=a.token,
        connect_timeout_s=a.connect_timeout_s,
        collective_timeout_s=a.collective_timeout_s,
    )
    if link.alone:
        return device_of(place), None
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // a.local_world_size))
    _leave_sigterm_to_the_agent()
    link.send(Attached(pid=os.getpid()))
    link.on_abort(lambda: leave(ExitCode.LEFT))
    watchdog = _limit_connecting(link)
    device = device_of(place)
    groups = connect(place, device)
    watchdog.cancel()
    link.on_abort(groups.shut)
    return device, groups


def _leave_sigterm_to_the_agent() -> None:
    """What stops a machine often sends SIGTERM to every process on it: the agent then has its
    workers leave at a boundary, unless they are dead by then.

    A script's own handler stays; processes that the script starts heed the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    worker = os.getpid()

    def pass_over(number: int, frame: FrameType | None) -> None:
        if os.getpid() != worker:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, pass_over)


def _limit_connecting(link: AgentLink) -> threading.Timer:
    """A watchdog that ends this process when it is not cancelled within the connect timeout:
    torch's store can block for ever."""
    limit_s = link.assignment.connect_timeout_s

    def give_up() -> None:
        text = f"the process group was not set up within {limit_s:g} s"
        link.send(Failed(step=0, blame="peer", message=text, traceback=""))
        print(text, file=sys.stderr, flush=True)
        os._exit(ExitCode.LEFT)

    timer = threading.Timer(limit_s, give_up)
    timer.name, timer.daemon = "elasticzero-connect", True
    timer.start()
    return timer


def run_interruptibly(work: Callable[[], T], check: Callable[[], None], name: str) -> T:
    """`work()` in a thread of its own, while `check` may raise here; the thread is then left."""
    result: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            result.append(work())
        except BaseException as error:  # noqa: BLE001 - the top of a thread: handed to the caller
            errors.append(error)

    thread = threading.Thread(target=body, name=f"elasticzero-{name}", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
        if thread.is_alive():
            check()
    if errors:
        raise errors[0]
    return result[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a worker has when its generation ends."""

    step: int = 0
    clean: bool = False
    complete: bool = False
    """This worker alone holds the whole state."""
    bad_step: int | None = None
    """The checkpoint it was to go on from, on storage."""
    save: Callable[[], Captured] | None = None
    """Writes the snapshot."""
    shut: Callable[[], None] = lambda: None
    """Breaks the group's connections."""


def _wait_for_the_end() -> NoReturn:
    while True:
        time.sleep(3600)


def end(link: AgentLink, error: BaseException, standing: Callable[[], Standing]) -> int:
    """`stop`, of the main thread: never returns where another thread is at it already."""
    if not link.take_the_end():
        _wait_for_the_end()
    return stop(link, error, standing())


def stop(
    link: AgentLink, error: BaseException, standing: Standing, *, may_keep: bool = True
) -> int:
    """The stop protocol; ends the process, or returns its exit code where it may be kept."""
    code, own = _explain(link, error, standing)
    kept = False
    try:
        answered = _hand_over(link, str(error) or type(error).__name__, standing)
        kept = may_keep and answered and not own and link.assignment.keep
    except BaseException as lost:  # noqa: BLE001 - the end of the process: what is left is to say so
        code = _not_kept(link, lost, standing.step)
    finally:
        if not kept:
            leave(code)
    return code


def leave(code: int) -> NoReturn:
    """End the process now; whatever else runs in it is dropped."""
    with suppress(Exception):
        sys.stdout.flush()
    with suppress(Exception):
        sys.stderr.flush()
    os._exit(code)


def _not_kept(link: AgentLink, error: BaseException, step: int) -> int:
    """Say that the snapshot could not be written; returns the exit code."""
    text = f"the state of step {step} could not be kept in memory: {one_line(error)}"
    trace = "" if isinstance(error, OperatorError) else _trace(error)
    print(f"error: {text}\n{trace}", end="", file=sys.stderr)
    link.send(Failed(step=step, blame="environment", message=text, traceback=trace))
    return 1


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _explain(link: AgentLink, error: BaseException, standing: Standing) -> tuple[int, bool]:
    """S1; returns the exit code, and whether the failure is this rank's own."""
    if isinstance(error, GenerationEnded):
        if error.aborted:
            standing.shut()
        return ExitCode.LEFT if error.aborted else 0, False
    standing.shut()
    if isinstance(error, KeyboardInterrupt):
        leave(ExitCode.INTERRUPTED)
    from_agent = link.aborted is not None
    unread = (CheckpointDamaged, StorageError)
    message = Failed(
        step=standing.step,
        blame=_blame(error, from_agent=from_agent),
        message=one_line(error).removesuffix(ADVICE),
        traceback="" if isinstance(error, OperatorError) else _trace(error),
        final=is_final(error),
        bad_step=standing.bad_step if isinstance(error, unread) else None,
    )
    link.send(message)
    if message.blame == "checkpoint" and message.bad_step is not None:
        return 1, True  # the agent says so, once for all ranks
    if message.blame == "peer":
        print(f"a peer is gone; this worker stops at step {standing.step}", file=sys.stderr)
        return ExitCode.LEFT, False
    if isinstance(error, ElasticZeroError):
        print(f"error: {error}", file=sys.stderr)
    else:
        print(message.traceback, end="", file=sys.stderr)
    return 1, True


def _blame(error: BaseException, *, from_agent: bool) -> Any:
    if isinstance(error, CheckpointDamaged):
        return "checkpoint"
    if isinstance(error, UserError):
        return "user"
    if is_peer_error(error) or (from_agent and isinstance(error, RuntimeError)):
        return "peer"
    return "environment" if isinstance(error, OperatorError) else "user"


def _hand_over(link: AgentLink, reason: str, standing: Standing) -> bool:
    """S2 and S3; False: no answer came."""
    clean = standing.clean and standing.save is not None
    link.send(
        Stopping(
            step=standing.step,
            clean=clean,
            complete=clean and standing.complete,
            reason=reason.splitlines()[0],
        )
    )
    try:
        wanted = link.saves.get(timeout=SAVE_WAIT_S).wanted
    except queue.Empty:
        return False
    if wanted and clean and standing.save is not None:
        link.send(standing.save())
    return True
