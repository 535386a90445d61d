"""The workers of one node in one generation: start, ask, stop, reap; their logs; what they say.

A `Gang` lives as long as its generation's workers. It turns messages and exits into the `Workers`
value that `decide` sees, and passes on to the agent what metrics and the event log want.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from elasticzero.channel import Channel, ChannelClosed
from elasticzero.launcher import secret
from elasticzero.launcher.forkserver import ForkServer, Launch
from elasticzero.launcher.hang_watch import HangWatch, Pace
from elasticzero.launcher.view import Workers
from elasticzero.launcher.world import BLAME_ORDER, Failure
from elasticzero.messages import (
    Abort,
    Assignment,
    Attached,
    Failed,
    Finished,
    Locate,
    Message,
    Request,
    Restored,
    Save,
    Stepped,
    Stopping,
    Waiting,
    torchrun_environment,
)

MAX_TRACEBACK = 4000
TAIL_BYTES = 1 << 20
PLAIN_AFTER_S = 5.0
"""A worker that has not called `elasticzero.run` by then is taken for a plain script."""
HAND_S = 1.0
"""A kept process takes its new assignment within so long."""
UNASKED_GRACE_S = 2.0
"""A script that cannot be asked to stop gets SIGTERM, and SIGKILL so much later."""


@dataclass(slots=True)
class Worker:
    """One process and what it has said so far."""

    rank: int
    local_rank: int
    pid: int
    channel: Channel
    log: Path
    log_start: int
    """Size of the log when this worker began."""
    deaf: bool = False
    """Its end of the channel is closed, though the process may still run."""
    attached: bool = False
    restored: bool = False
    finished: bool = False
    stopping: Stopping | None = None
    failed: Failed | None = None
    waiting: bool = False
    """At an end with its generation, and ready for another."""
    exit_code: int | None = None

    @property
    def running(self) -> bool:
        return self.exit_code is None

    @property
    def at_work(self) -> bool:
        """It belongs to its generation still."""
        return self.running and not self.waiting


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker's process is gone."""

    exit_code: int


Heard = tuple[Worker, Message | Ended]


@dataclass(slots=True)
class Gang:
    """This node's workers of one generation."""

    server: ForkServer
    generation: int
    workers: list[Worker] = field(default_factory=list)
    first_rank: int = 0
    started_s: float = 0.0
    failure: Failure | None = None
    hangs: HangWatch = field(default_factory=HangWatch)
    kept: int = 0
    """So many workers are processes of a generation before."""
    _view: Workers = field(default_factory=Workers)
    _complete_given: bool = False

    def start(
        self,
        assignments: Sequence[Assignment],
        launch: Launch,
        log_dir: Path,
        store: socket.socket | None,
        kept: Mapping[int, Worker] | None = None,
    ) -> None:
        """A worker for each assignment: the one kept from a generation before for its local rank,
        or one that is forked. store: rank 0's bound socket, on the node of rank 0."""
        log_dir.mkdir(parents=True, exist_ok=True)
        for assignment in assignments:
            mine = store.fileno() if store is not None and assignment.rank == 0 else None
            old = (kept or {}).get(assignment.local_rank)
            worker = _hand(old, assignment, mine) if old is not None else None
            if worker is not None:
                self.kept += 1
            else:
                worker = self._fork(assignment, launch, log_dir, mine)
            self.workers.append(worker)
            ask = partial(_ask_where, worker.channel)
            pace = Pace(rank=worker.rank, pid=worker.pid, log=worker.log, ask=ask)
            self.hangs.add(pace)
        self._view = Workers(generation=self.generation, running=len(self.workers))

    def _fork(
        self, assignment: Assignment, launch: Launch, log_dir: Path, store_fd: int | None
    ) -> Worker:
        log = log_dir / f"{assignment.local_rank}.log"
        mine, theirs = socket.socketpair()
        log_fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        log_start = os.fstat(log_fd).st_size
        fds = [log_fd, theirs.fileno()]
        if store_fd is not None:
            fds.append(store_fd)
        environment = launch.environment | torchrun_environment(assignment)
        try:
            pid, numbers = self.server.start(replace(launch, environment=environment), fds)
        finally:
            os.close(log_fd)
            theirs.close()
        channel = Channel(mine)
        its_fd = numbers[2] if len(numbers) > 2 else None
        with suppress(ChannelClosed):
            channel.send(replace(assignment, store_fd=its_fd))
        mine.setblocking(False)  # a worker that reads no more must not hold the agent up
        return Worker(assignment.rank, assignment.local_rank, pid, channel, log, log_start)

    def take_waiting(self) -> dict[int, Worker]:
        """The workers that are ready for another generation, by local rank; they are no more this
        gang's."""
        ready = {w.local_rank: w for w in self.workers if w.running and w.waiting and not w.deaf}
        self.workers = [worker for worker in self.workers if worker not in ready.values()]
        return ready

    def view(self, now_s: float) -> Workers:
        """What `decide` sees."""
        workers = self.workers
        plain = now_s - self.started_s >= PLAIN_AFTER_S
        running = sum(worker.at_work for worker in workers)
        left = all(w.stopping is not None and w.failed is None for w in workers)
        return replace(
            self._view,
            running=running,
            attached=all(worker.attached for worker in workers),
            restored=all(worker.restored for worker in workers),
            plain=plain and not any(worker.attached for worker in workers),
            saving=sum(w.at_work and w.stopping is not None for w in workers),
            finished=running == 0 and all(worker.finished for worker in workers),
            at_boundary=bool(workers) and left and self._view.aborted_s is None,
            failed=self.failure is not None,
            failure=self.failure,
            **self.hangs.seen(now_s),
        )

    def watch_for_hangs(self, now_s: float) -> list[Failure]:
        """Go on with a look at workers that make no step; what it found, when it is over."""
        found = self.hangs.poll(now_s, ending=self._view.aborted_s is not None)
        for failure in found:
            if failure.rank in self.hangs.guilty:
                self._fail(failure)
        return found

    def tell(self, message: Message) -> None:
        """Pass a message on to every worker."""
        self._send_all(message)

    def ask(self, flags: int) -> None:
        """Have the workers raise `flags` in the control word."""
        self._view = replace(self._view, asked=self._view.asked | flags)
        self._send_all(Request(flags=self._view.asked))

    def stop(self, reason: str, now_s: float) -> None:
        """Tell the workers to stop where they are; a script that does not listen gets SIGTERM."""
        self._view = replace(self._view, aborted_s=now_s)
        self._send_all(Abort(reason=reason))
        for worker in self.workers:
            if worker.running and not worker.attached:
                _signal(worker, signal.SIGTERM)

    def kill(self, *, spare_saving: bool = False) -> None:
        """SIGKILL, to each worker's whole process group; perhaps not to those that write their
        snapshot."""
        self._view = replace(self._view, killed=not spare_saving)
        for worker in self.workers:
            if worker.at_work and not (spare_saving and worker.stopping):
                _signal(worker, signal.SIGKILL)

    def kill_deaf(self) -> None:
        """SIGKILL to those that, as a look has found, could not obey."""
        for worker in self.workers:
            if worker.running and worker.rank in self.hangs.deaf:
                _signal(worker, signal.SIGKILL)

    def kill_stopped(self) -> None:
        """SIGKILL to those that a signal has stopped."""
        for worker in self.workers:
            if worker.at_work and worker.rank in self.hangs.stopped:
                _signal(worker, signal.SIGKILL)

    def end_the_deaf(self, now_s: float) -> None:
        """SIGKILL to scripts that did not heed SIGTERM in time."""
        told_s = self._view.aborted_s
        if told_s is not None and now_s - told_s >= UNASKED_GRACE_S:
            for worker in self.workers:
                if worker.running and not worker.attached:
                    _signal(worker, signal.SIGKILL)

    def hear(self, now_s: float, ended: Sequence[tuple[int, int]]) -> list[Heard]:
        """Everything the workers said, and which of them ended, since the last call; does not
        wait."""
        heard: list[Heard] = []
        for worker in self.workers:
            heard += [(worker, message) for message in _receive(worker)]
        by_pid = {worker.pid: worker for worker in self.workers}
        for pid, code in ended:
            if pid in by_pid:
                worker = by_pid[pid]
                heard += [(worker, message) for message in _receive(worker)]
                heard.append((worker, Ended(code)))
        for worker, message in heard:
            self._take(worker, message, now_s)
        return heard

    def lost(self, message: str) -> None:
        """The fork server died, and with it every worker."""
        for worker in self.workers:
            if worker.running:
                self._take(worker, Ended(-signal.SIGKILL), 0.0)
        self._fail(Failure(rank=self.first_rank, blame="environment", message=message))

    def _take(self, worker: Worker, message: Message | Ended, now_s: float) -> None:
        if isinstance(message, Ended):
            self.hangs.gone(worker.rank, now_s)
        else:
            self.hangs.note(worker.rank, message, now_s)
        match message:
            case Attached():
                worker.attached = True
                if self._view.asked:
                    self._send(worker, Request(flags=self._view.asked))
                if self._view.aborted_s is not None:
                    self._send(worker, Abort(reason="the generation is over"))
            case Restored():
                worker.restored = True
            case Stepped():
                step = max(self._view.step, message.step)
                self._view = replace(self._view, step=step, stepped_s=now_s)
            case Waiting():
                worker.waiting = True
            case Finished():
                worker.finished = True
                self._view = replace(self._view, step=max(self._view.step, message.step))
            case Stopping():
                worker.stopping = message
                wanted = message.clean and not (message.complete and self._complete_given)
                self._complete_given |= wanted and message.complete
                self._send(worker, Save(wanted=wanted))
            case Failed():
                worker.failed = message
                self._blame(worker, message)
            case Ended():
                worker.exit_code = message.exit_code
                worker.channel.close()
                if message.exit_code != 0 or worker.stopping is not None:
                    _signal(worker, signal.SIGKILL)  # what it started must not outlive it
                self._judge_exit(worker)
            case _:
                pass

    def _judge_exit(self, worker: Worker) -> None:
        """An exit that no message explains is a failure of its own; a plain script says nothing at
        all."""
        code = worker.exit_code or 0
        if worker.failed or worker.stopping:
            return
        if code == 0:
            worker.finished = True
            return
        if self._view.aborted_s is not None:
            return
        step = self._view.step
        if code < 0:
            text = f"killed by {_signal_name(-code)}"
            self._fail(Failure(rank=worker.rank, blame="killed", message=text, step=step))
        else:
            text = f"exited with status {code}"
            self._fail(Failure(rank=worker.rank, blame="user", message=text, step=step))

    def _blame(self, worker: Worker, message: Failed) -> None:
        if self._view.aborted_s is not None and message.blame == "peer":
            return
        failure = Failure(
            rank=worker.rank,
            blame=message.blame,
            message=message.message,
            step=message.step,
            final=message.final,
            bad_step=message.bad_step,
            traceback=message.traceback[-MAX_TRACEBACK:],
        )
        self._fail(failure)

    def _fail(self, failure: Failure) -> None:
        """Keep the failure that explains the others; of equals the first."""
        known = self.failure
        order = BLAME_ORDER.index
        if known is None or order(failure.blame) < order(known.blame):
            self.failure = failure

    def _send_all(self, message: Message) -> None:
        for worker in self.workers:
            if worker.at_work:
                self._send(worker, message)

    def _send(self, worker: Worker, message: Message) -> None:
        with suppress(ChannelClosed):
            worker.channel.send(message)


def end(workers: Iterable[Worker]) -> None:
    """SIGKILL to processes that were kept and are not needed."""
    for worker in workers:
        _signal(worker, signal.SIGKILL)
        worker.channel.close()


def _hand(old: Worker, assignment: Assignment, store_fd: int | None) -> Worker | None:
    """Give a kept process its place in another generation; None: it cannot be reached, and is
    killed."""
    try:
        old.channel.hand(assignment, store_fd, HAND_S)
    except ChannelClosed:
        end([old])
        return None
    log_start = old.log.stat().st_size
    return Worker(assignment.rank, assignment.local_rank, old.pid, old.channel, old.log, log_start)


def _receive(worker: Worker) -> list[Message]:
    if not worker.running or worker.deaf:
        return []
    try:
        return worker.channel.drain()
    except ChannelClosed:
        worker.deaf = True
        return []


def _ask_where(channel: Channel) -> None:
    with suppress(ChannelClosed):
        channel.send(Locate())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _signal(worker: Worker, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, number)


SCRUBBED = ("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", *secret.VARIABLES)
"""The agent's own; a worker's imports must not see it."""


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The agent's environment as a worker may see it."""
    return {key: value for key, value in environment.items() if key not in SCRUBBED}


@dataclass(slots=True)
class LogTail:
    """Follows the workers' log files and gives whole new lines."""

    write: Callable[[str], object]
    _offsets: dict[Path, int] = field(default_factory=dict)

    def follow(self, worker: Worker, *, last: bool = False) -> None:
        """Write what was added to a worker's log since the last call, each line with its `[rank]`;
        last: also a last line without an end."""
        offset = self._offsets.setdefault(worker.log, worker.log_start)
        try:
            with worker.log.open("rb") as file:
                file.seek(offset)
                data = file.read(TAIL_BYTES)
        except FileNotFoundError:
            return
        whole = last or len(data) == TAIL_BYTES
        end = len(data) if whole else data.rfind(b"\n") + 1
        self._offsets[worker.log] = offset + end
        for line in data[:end].decode(errors="replace").splitlines():
            self.write(f"[{worker.rank}] {line}\n")
