"""Starts, stops and kills one node's workers of one generation, and handles their messages.

A `WorkerGroup` lives as long as its generation's workers. It turns messages and exits into the
`WorkerGroupState` that `decide` gets, and passes on to the agent what metrics and the event log
need.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from elasticzero.ipc.assignment import Assignment
from elasticzero.ipc.channel import MAX_ERROR_LINE_CHARACTERS
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import (
    CPU,
    Abort,
    Attached,
    AwaitsBoundary,
    Finished,
    Message,
    Prepare,
    PrepareFailed,
    Request,
    Restored,
    SaveState,
    ScriptEnded,
    Stepped,
    Stopping,
    Switched,
    Waiting,
    Withdraw,
)
from elasticzero.launcher.protocol.documents import Failure, Proposal, World
from elasticzero.launcher.protocol.failure_policy import explains, judge_exit
from elasticzero.launcher.protocol.view import WorkerGroupState
from elasticzero.launcher.workers import error_file
from elasticzero.launcher.workers.console_output import ConsoleOutput
from elasticzero.launcher.workers.forking.client import ForkServer
from elasticzero.launcher.workers.forking.requests import Launch
from elasticzero.launcher.workers.group_lifecycle import GroupEvent, advance, group_events
from elasticzero.launcher.workers.lifecycle import Event
from elasticzero.launcher.workers.process import (
    NO_RANK,
    Worker,
    fatal_stack,
    fork,
    reassign,
    worker_logs,
)
from elasticzero.launcher.workers.progress_monitor import ProgressMonitor, WorkerProgress
from elasticzero.processes import is_exiting
from elasticzero.serialization import field_values
from elasticzero.text import shortened, with_short_lines

T = TypeVar("T")
MAX_TRACEBACK = 4000
"""Maximum number of characters of the end of a traceback that documents hold."""
MAX_TEXT = 4000
"""Maximum number of characters of a text of a worker that goes on to documents, logs and terminals.
The script decides how long it is, and etcd refuses a document of more than 1.5 MiB; the worker's
own log has all of it."""
LATE_AFTER_S = 5.0
"""Seconds after which workers without a loaded state count as slow; those that have not even called
`elasticzero.run` are taken for a plain script."""
EXIT_TIMEOUT_S = 30.0
EXIT_MARGIN_S = 2.0
"""Seconds after --exit-timeout, when a process should have exited, at which it counts as stuck."""
EXIT_FUNCTIONS_S = 10.0
"""Seconds that a failed script gets for its exit functions once the workers are told to stop."""
UNASKED_GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL for a script that cannot be requested to stop."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Says that a worker's process has exited."""

    exit_code: int


Received = tuple[Worker, Message | Ended]


def in_order(received: list[Received]) -> list[Received]:
    """Returns messages of workers with those first that a worker has sent before it has entered
    another generation.

    All workers enter one at the same boundary, but their messages are read one worker after
    another.
    """
    entered = {id(worker) for worker, message in received if isinstance(message, Switched)}
    if not entered:
        return received
    before: list[Received] = []
    after: list[Received] = []
    for worker, message in received:
        if isinstance(message, Switched):
            entered.discard(id(worker))
        has_entered = worker.switched and id(worker) not in entered
        (after if has_entered else before).append((worker, message))
    return before + after


@dataclass(slots=True)
class WorkerGroup:
    """Holds this node's workers of one generation, and the state that follows from their
    messages."""

    server: ForkServer
    generation: int
    wakeup_fd: int
    """Descriptor of a pipe by which workers wake the agent."""
    workers: list[Worker] = field(default_factory=list)
    first_rank: int = 0
    started_s: float = 0.0
    failure: Failure | None = None
    progress_monitor: ProgressMonitor = field(default_factory=ProgressMonitor)
    exit_timeout_s: float = 0.0
    """Seconds within which a process must exit after its script; 0: no limit."""
    console: ConsoleOutput = field(default_factory=ConsoleOutput)
    reused: int = 0
    """Number of workers that run in a process of an earlier generation."""
    stood_by: int = 0
    """Number of workers that run in a process that stood by for them."""
    script_s: float | None = None
    """Seconds from a worker's fork to `elasticzero.run`, the longest; None: not known."""
    script_bytes: int = 0
    """Most memory that a worker had in RAM there; 0: not known."""
    on_gpu: bool = False
    """True if a worker trains on a GPU."""
    _entered: str = ""
    """Token of the generation that the workers have entered inside their loops; empty: none."""
    _awaiting: set[int] = field(default_factory=set)
    """Local ranks that wait to come into the generation."""
    _next_first_rank: int = 0
    """First rank of this node in the proposed generation."""
    _view: WorkerGroupState = field(default_factory=WorkerGroupState)
    _complete_save_requested: bool = False
    _pending: list[Received] = field(default_factory=list)
    """Messages that were read from the channels before `poll_messages` was called."""

    def start(
        self,
        assignments: Sequence[Assignment],
        launch: Launch,
        log_dir: Path,
        store: socket.socket | None,
        reusable: Mapping[int, Worker] | None = None,
    ) -> None:
        """Starts a worker for each assignment, in a reusable process or in a new one.

        Args:
            assignments: One for each worker of this node.
            launch: The script, its arguments and its environment.
            log_dir: Directory of the workers' logs.
            store: Rank 0's bound socket, on the node of rank 0.
            reusable: Processes of an earlier generation, by local rank.
        """
        with suppress(OSError):  # a log that cannot be made is left out
            log_dir.mkdir(parents=True, exist_ok=True)
        self.exit_timeout_s = launch.exit_timeout_s
        logs = worker_logs(self.console, log_dir, [a.local_rank for a in assignments])
        for assignment in assignments:
            store_fd = store.fileno() if store is not None and assignment.rank == 0 else None
            old = (reusable or {}).get(assignment.local_rank)
            worker = reassign(old, assignment, store_fd) if old is not None else None
            if worker is not None and old is not None:
                self.reused += old.rank != NO_RANK
                self.stood_by += old.rank == NO_RANK
            else:
                worker = fork(self.server, assignment, launch, logs, self.wakeup_fd, store_fd)
            self.workers.append(worker)
            locate = worker.request_location
            self.progress_monitor.add(
                WorkerProgress(
                    rank=worker.rank, pid=worker.pid, log=worker.log, request_location=locate
                )
            )
        self._view = WorkerGroupState(generation=self.generation, running=len(self.workers))

    def take_waiting(self) -> dict[int, Worker]:
        """Removes the workers that are ready for another generation; returns them by local
        rank."""
        ready = {
            w.local_rank: w
            for w in self.workers
            if w.state.ready_for_another and not w.channel_closed
        }
        self.workers = [worker for worker in self.workers if worker not in ready.values()]
        return ready

    def view(self, now_s: float) -> WorkerGroupState:
        """Returns the state that `decide` gets."""
        state = replace(
            self._view,
            running=sum(worker.at_work for worker in self.workers),
            saving=sum(worker.at_work and worker.state.stopping for worker in self.workers),
            failure=self.failure,
        )
        if now_s - self.started_s >= LATE_AFTER_S:
            state = advance(state, GroupEvent.LATE)
        return self.progress_monitor.with_progress(state, now_s)

    def poll_stalls(self, now_s: float) -> list[Failure]:
        """Continues an examination of workers that make no step; returns its findings at its
        end."""
        failures = self.progress_monitor.poll(now_s, ending=self._view.aborted_s is not None)
        for failure in failures:
            if failure.rank in self.progress_monitor.at_fault:
                self._fail(failure)
        return failures

    def request(self, flags: int) -> None:
        """Requests that the workers put `flags` into the control word."""
        self._view = replace(self._view, requested=self._view.requested | flags)
        self._view = advance(self._view, GroupEvent.REQUEST)
        self.broadcast(Request(flags=self._view.requested))

    def come_in(self, world: World, proposal: Proposal) -> None:
        """Has the workers be those that come into a proposed generation, which they were started
        for.

        Args:
            world: World that the proposal changes.
            proposal: The proposal.
        """
        self._next_first_rank = self.first_rank
        self._view = replace(self._view, generation=world.generation, prepared=proposal)

    def prepare(
        self,
        proposal: Proposal,
        assigned: Sequence[Assignment],
        store: socket.socket | None,
        *,
        joins: bool,
    ) -> None:
        """Tells the workers to connect a proposed generation beside their training.

        Args:
            proposal: The proposal.
            assigned: The worker's places in that generation; none: this node leaves.
            store: Rank 0's bound socket, on the node of rank 0.
            joins: Whether others come into it.
        """
        self._view = replace(self._view, prepared=proposal, withdrawn=False, refused="")
        places = {assignment.local_rank: assignment for assignment in assigned}
        self._next_first_rank = min((a.rank for a in assigned), default=0)
        for worker in self.workers:
            place = places.get(worker.local_rank)
            is_first = place is not None and place.rank == 0 and store is not None
            store_fd = store.fileno() if is_first and store is not None else None
            message = Prepare(token=proposal.token, assignment=place, joins=joins)
            worker.prepare(message, store_fd)

    def withdraw(self, reason: str) -> None:
        """Tells the workers to forget the generation that they have prepared."""
        if (prepared := self._view.prepared) is not None:
            self._view = replace(self._view, withdrawn=True)
            self.broadcast(Withdraw(token=prepared.token, reason=reason))

    def enter(self, world: World, now_s: float) -> None:
        """Takes the workers for those of a world that they have entered, or are about to report to
        have entered.

        Args:
            world: The world.
            now_s: Present time.
        """
        self._enter(now_s, 0)
        self._view = replace(
            self._view,
            generation=world.generation,
            prepared=None,
            withdrawn=False,
            refused="",
            awaits=False,
            switched="no",
        )

    def _enter(self, now_s: float, step: int) -> None:
        """Gives the workers their ranks in the generation that they enter, once.

        Args:
            now_s: Present time.
            step: Boundary at which they do so.
        """
        prepared = self._view.prepared
        if prepared is None or self._entered == prepared.token:
            return
        self._entered, self.generation = prepared.token, prepared.generation
        self._view = replace(self._view, switched="entered", switched_step=step, switched_s=now_s)
        self.first_rank = self._next_first_rank
        self.progress_monitor.renumber(
            {worker.rank: self.first_rank + worker.local_rank for worker in self.workers}
        )
        for worker in self.workers:
            worker.rank = self.first_rank + worker.local_rank

    def stop(self, reason: str, now_s: float) -> None:
        """Tells the workers to stop where they are; a script that is not attached gets SIGTERM.

        It first reads their messages, and which exits have begun: see B7 in `failure_policy`.
        """
        for worker in self.workers:
            if worker.running:
                worker.exiting = is_exiting(worker.pid)
                self._pending += self._receive(worker, now_s)
        self._view = advance(replace(self._view, aborted_s=now_s), GroupEvent.STOP)
        self.broadcast(Abort(reason=reason))
        for worker in self.workers:
            if worker.state.needs_signal:
                worker.send_signal(signal.SIGTERM)

    def kill(self, *, spare_saving: bool = False) -> None:
        """Sends SIGKILL to each worker's whole process group.

        Args:
            spare_saving: Whether to leave out the workers that write their snapshot.
        """
        event = GroupEvent.KILL_UNSAVED if spare_saving else GroupEvent.KILL
        self._view = advance(self._view, event)
        for worker in self.workers:
            if worker.at_work and not (spare_saving and worker.state.stopping):
                worker.send_signal(signal.SIGKILL)

    def kill_unresponsive(self) -> None:
        """Sends SIGKILL to workers that a stack dump has found unable to obey."""
        for worker in self.workers:
            if worker.running and worker.rank in self.progress_monitor.unresponsive:
                worker.send_signal(signal.SIGKILL)

    def kill_suspended(self) -> None:
        """Sends SIGKILL to workers that a signal has suspended."""
        for worker in self.workers:
            if worker.at_work and worker.rank in self.progress_monitor.stopped:
                worker.send_signal(signal.SIGKILL)

    def kill_unresponsive_scripts(self, now_s: float) -> None:
        """Sends SIGKILL to scripts that did not end at SIGTERM in time."""
        stop_sent_s = self._view.aborted_s
        if stop_sent_s is not None and now_s - stop_sent_s >= UNASKED_GRACE_S:
            for worker in self.workers:
                state = worker.state
                ending = state.failed and not state.attached and state.running
                slow = ending and now_s - stop_sent_s >= EXIT_FUNCTIONS_S
                if worker.state.needs_signal or slow:
                    worker.send_signal(signal.SIGKILL)

    def kill_overdue(self, now_s: float) -> list[Worker]:
        """Sends SIGKILL to processes that outlast their scripts too long; returns those workers."""
        if self.exit_timeout_s <= 0:
            return []
        limit_s = self.exit_timeout_s + EXIT_MARGIN_S
        stuck = [
            worker
            for worker in self.workers
            if worker.running and now_s - (worker.script_ended_s or now_s) >= limit_s
        ]
        for worker in stuck:
            worker.script_ended_s = None
            worker.send_signal(signal.SIGKILL)
        return stuck

    def outlasted(self, now_s: float) -> list[Worker]:
        """Returns the workers that finished at least --exit-timeout ago, while the world still
        runs."""
        limit_s = self.exit_timeout_s or EXIT_TIMEOUT_S
        return [w for w in self.workers if w.state.finished and 0 < w.ended_s <= now_s - limit_s]

    def poll_messages(self, now_s: float, ended: Sequence[tuple[int, int]]) -> list[Received]:
        """Returns everything the workers sent, and which of them ended, since the last call; does
        not wait."""
        received, self._pending = self._pending, []
        for worker in self.workers:
            received += self._receive(worker, now_s)
        by_pid = {worker.pid: worker for worker in self.workers}
        for pid, code in ended:
            if pid in by_pid:
                worker = by_pid[pid]
                received += self._receive(worker, now_s)
                received.append((worker, Ended(code)))
                self._handle(worker, Ended(code), now_s)
        return in_order(received)

    def _receive(self, worker: Worker, now_s: float) -> list[Received]:
        messages = [_with_short_texts(message) for message in worker.receive()]
        for message in messages:
            self._handle(worker, message, now_s)
        return [(worker, message) for message in messages]

    def fail_all(self, message: str) -> None:
        """Records that the fork server died, and with it every worker."""
        for worker in self.workers:
            if worker.running:
                self._handle(worker, Ended(-signal.SIGKILL), 0.0)
                worker.send_signal(signal.SIGKILL)  # what it started must not outlive it
        self._fail(Failure(rank=self.first_rank, blame="environment", message=message))

    def _handle(self, worker: Worker, message: Message | Ended, now_s: float) -> None:
        if isinstance(message, Ended):
            self.progress_monitor.exited(worker.rank, now_s)
        else:
            self.progress_monitor.note(worker.rank, message, now_s)
        match message:
            case Attached(resident_bytes=resident_bytes):
                self._note_attached(worker, resident_bytes, now_s)
                if self._view.aborted_s is not None:
                    worker.send(Abort(reason="the generation is over"))
            case AwaitsBoundary():
                self._note_waiting(worker)
            case Restored(device=device):
                self.on_gpu = device != CPU
                self._record(worker, Event.RESTORED)
            case Stepped():
                step = max(self._view.step, message.step)
                at_s = max(self._view.stepped_s, message.at_s)
                self._view = replace(self._view, step=step, stepped_s=at_s)
                self._note_held(message)
            case Waiting():
                self._record(worker, Event.WAITING)
            case Finished():
                self._note_finished(worker, message)
            case Stopping():
                self._record(worker, Event.STOPPING)
                self._note_left(message, now_s)
                write_state = message.clean and not (
                    message.switched or (message.complete and self._complete_save_requested)
                )
                self._complete_save_requested |= write_state and message.complete
                worker.send(SaveState(write=write_state))
            case Switched(token=token) | PrepareFailed(token=token):
                if self._is_prepared_for(token):
                    self._note_prepared(worker, message, now_s)
            case Failed():
                self._record(worker, Event.FAILED)
                self._blame(worker, message)
            case ScriptEnded():
                worker.script_ended_s = now_s
                worker.script_exit_code = message.exit_code
            case Ended():
                script_code = worker.script_exit_code
                worker.exit_code = message.exit_code if script_code is None else script_code
                worker.ended_s = now_s
                self._record(worker, Event.EXITED)
                worker.channel.close()
                self._judge_exit(worker)
            case _:
                pass

    def _note_attached(self, worker: Worker, resident_bytes: int, now_s: float) -> None:
        """Notes that a worker's script has called `elasticzero.run`, and what it takes by then."""
        if worker.from_beginning:
            self.script_s = max(self.script_s or 0.0, now_s - self.started_s)
            self.script_bytes = max(self.script_bytes, resident_bytes)
        self._record(worker, Event.ATTACHED)
        if self._view.requested:
            worker.send(Request(flags=self._view.requested))

    def _note_waiting(self, worker: Worker) -> None:
        """Notes that a worker waits to come into the generation."""
        self._awaiting.add(worker.local_rank)
        self._view = replace(self._view, awaits=len(self._awaiting) == len(self.workers))

    def _note_finished(self, worker: Worker, message: Finished) -> None:
        self._record(worker, Event.FINISHED)
        step = max(self._view.step, message.step)
        self._view = replace(self._view, step=step, end_reason=message.reason)

    def _is_prepared_for(self, token: str) -> bool:
        prepared = self._view.prepared
        return prepared is not None and prepared.token == token

    def _note_prepared(
        self, worker: Worker, message: Switched | PrepareFailed, now_s: float
    ) -> None:
        """Notes what has become of the generation that a worker was to prepare.

        Args:
            worker: The worker.
            message: What it has sent.
            now_s: Time at which it came.
        """
        if isinstance(message, Switched):
            worker.switched = True
            self._enter(now_s, message.step)
        else:
            refused = f"rank {worker.rank} cannot be prepared: {message.reason}"
            self._view = replace(self._view, refused=self._view.refused or refused)

    def _note_left(self, message: Stopping, now_s: float) -> None:
        """Notes that a worker has left its loop because the others go on without its node.

        Args:
            message: What the worker has sent.
            now_s: Time at which it came.
        """
        if message.switched and self._is_prepared_for(message.switched):
            self._view = replace(
                self._view, switched="left", switched_step=message.step, switched_s=now_s
            )

    def _note_held(self, message: Stepped) -> None:
        """Notes that all nodes hold a newer snapshot than before."""
        held = self._view.held
        if message.held is not None and (held is None or message.held > held):
            self._view = replace(self._view, held=message.held, held_s=message.at_s)

    def _record(self, worker: Worker, event: Event) -> None:
        """Advances the states of the worker and of the group by an event."""
        worker.record(event)
        self._view = advance(self._view, *group_events([w.state for w in self.workers]))

    def _judge_exit(self, worker: Worker) -> None:
        """Records a failure for an exit that no message explains, also with status 0 (`os._exit`).

        A plain script sends no messages; its exit with status 0 is no failure.
        """
        code = worker.exit_code or 0
        if worker.state.failed or worker.state.stopping:
            return
        if code == 0 and (worker.state.finished or not worker.state.attached):
            self._record(worker, Event.FINISHED)
            return
        stop_requested = self._view.aborted_s is not None
        step = self._view.step
        failure = judge_exit(
            worker.rank, code, step, stop_requested=stop_requested, exiting=worker.exiting
        )
        if failure is None:
            return
        trace = fatal_stack(worker) if code < 0 else ""
        recorded = error_file.read(error_file.error_file(worker.log.parent, worker.local_rank))
        if recorded is not None and code > 0:
            failure, trace = replace(failure, message=recorded.message), recorded.traceback
        self._fail(replace(failure, traceback=trace[-MAX_TRACEBACK:]))

    def is_failure(self, worker: Worker, message: Failed) -> bool:
        """Returns whether this error of a worker counts: that of a script which SIGTERM has ended
        is no failure."""
        stop_requested = self._view.aborted_s is not None
        return not stop_requested or (message.blame != "peer" and worker.state.attached)

    def _blame(self, worker: Worker, message: Failed) -> None:
        if not self.is_failure(worker, message):
            return
        failure = Failure(rank=worker.rank, **field_values(message))
        self._fail(replace(failure, traceback=failure.traceback[-MAX_TRACEBACK:]))

    def _fail(self, failure: Failure) -> None:
        """Records a failure if it explains the known one better; of equals the first stays."""
        failure = _with_short_texts(failure)
        if self.failure is None or explains(failure) < explains(self.failure):
            self.failure = failure

    def broadcast(self, message: Message) -> None:
        """Sends a message to every worker whose process works for the generation."""
        for worker in self.workers:
            if worker.at_work:
                worker.send(message)


def _with_short_texts(message: T) -> T:
    """Returns a message of a worker, or a failure, with no text that is too long for a document."""
    changes: dict[str, str] = {}
    for name in ("message", "reason", "error"):
        text = getattr(message, name, None)
        if isinstance(text, str) and len(text) > MAX_TEXT:
            changes[name] = shortened(text, MAX_TEXT)
    trace = getattr(message, "traceback", "")
    if (short := with_short_lines(trace, MAX_ERROR_LINE_CHARACTERS)) != trace:
        changes["traceback"] = short
    changed: Any = replace(cast(Any, message), **changes) if changes else message
    result: T = changed
    return result
