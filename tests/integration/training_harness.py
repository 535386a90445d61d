"""Plays the agent of every node: starts worker processes, gives assignments, answers `Stopping`."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.checkpoint.steps.retention import RetentionPolicy
from elasticzero.ipc.assignment import Assignment, Resume, Source
from elasticzero.ipc.channel import Channel, ChannelClosed
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import (
    AbandonSave,
    Captured,
    Finished,
    Message,
    Saved,
    SaveState,
    SnapshotHeld,
    Stepped,
    Stopping,
    Switched,
    Tagged,
    TagStep,
)
from elasticzero.launcher.http.server import AgentServer, listen
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.snapshots.checkpoint_saver import CheckpointSaver
from elasticzero.launcher.snapshots.roles import SnapshotRole
from elasticzero.launcher.snapshots.save_events import SaveFinished
from elasticzero.launcher.workers.forking.client import ForkServer
from elasticzero.launcher.workers.forking.requests import Launch
from tests.integration.http_server import no_events
from tests.support.deadlines import patience

PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.fsdp",
    "numpy",
    "elasticzero.entry_point",
)
PASSWORD = "the tests' own"
M = TypeVar("M")


@dataclass(slots=True, eq=False)
class Worker:
    """One process of a world. A later one may have its process id."""

    rank: int
    node: str
    pid: int
    channel: Channel
    log: Path
    heard: list[Message] = field(default_factory=list)
    exit_code: int | None = None
    ended_s: float = 0.0

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.heard if isinstance(message, kind)]

    def last(self, kind: type[M]) -> M:
        messages = self.all(kind)
        assert messages, f"rank {self.rank} never said {kind.__name__}:\n{self.log.read_text()}"
        return messages[-1]


class Pool:
    """A fork server with torch imported, and the worlds that were started from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server = ForkServer(PRELOAD)
        self._server.wait_until_ready()
        self._started = 0
        self._memories = 0
        self._alive: dict[int, Worker] = {}
        """Workers whose end the server has not reported, by process id."""
        self._ended: dict[Worker, int] = {}
        self._worlds: list[Running] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        for running in self._worlds:
            running.close()

    def end_worlds(self) -> None:
        """Kills what is left of all worlds so far, and closes them."""
        for running in self._worlds:
            running.kill()
            running.close()
        self._worlds.clear()

    def ended(self) -> dict[Worker, int]:
        """Exit codes of the workers of all worlds so far that have ended."""
        self._ended |= {self._alive.pop(pid): code for pid, code in self._server.ended()}
        return self._ended

    def fileno(self) -> int:
        return self._server.fileno()

    def train_through(
        self,
        script: Path,
        folder: Path,
        worlds: Iterable[tuple[int, dict[str, Any]]],
        **options: Any,
    ) -> list[Running]:
        """Trains in one world after the other, each going on from the last checkpoint of the one
        before. worlds: the number of ranks, and what the script is told, with its `steps`. given:
        goes into each assignment."""
        resume, made = Resume(tier="fresh"), []
        for generation, (world_size, told) in enumerate(worlds, 1):
            places = {"generation": generation, "resume": resume, "checkpoint_dir": str(folder)}
            running = self.start(script, [json.dumps(told)], world_size, **places, **options)
            assert running.finish() == told["steps"]
            resume = Resume(tier="storage", step=told["steps"])
            made.append(running)
        return made

    def start(
        self, script: Path, arguments: Sequence[str], world_size: int, **options: Any
    ) -> Running:
        """The first `world_size` workers of a world of `of` (all of it), one a node, or `row` a
        node; `options` go into each assignment, and `odd` changes those of single ranks. Nodes
        hold no snapshots of worlds before it, unless it goes on from them. Without `reports_held`
        no worker is told that a snapshot is held, so that the first one stays in flight."""
        of, row = options.pop("of", world_size), options.pop("row", 1)
        odd = options.pop("odd", {})
        reports_held = options.pop("reports_held", True)
        self._started += 1
        self._memories += options.get("resume", Resume(tier="fresh")).tier != "ram"
        store = socket.socket()
        store.bind(("127.0.0.1", 0))
        token = secrets.token_hex(8)
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        environment["OMP_NUM_THREADS"] = "1"
        launch = Launch(
            target=str(script),
            is_module=False,
            arguments=tuple(arguments),
            environment=environment,
            directory=str(self.folder),
        )
        workers, assignments = [], []
        for rank in range(world_size):
            assignment = Assignment(
                job="test",
                node=f"node{rank // row}",
                generation=options.get("generation", self._started),
                token=token,
                rank=rank,
                local_rank=rank if row == 1 else rank % row,
                world_size=of,
                local_world_size=row,
                group_rank=rank // row,
                nodes=of // row,
                master_address="127.0.0.1",
                master_port=store.getsockname()[1],
                store_fd=None,
                strategy="ddp",
                resume=Resume(tier="fresh"),
                snapshot_root=str(self.memory_of(rank // row)),
                password=PASSWORD,
            )
            assignment = replace(assignment, **options)
            assignment = odd.get(rank, lambda same: same)(assignment)
            first = store if assignment.rank == 0 else None
            workers.append(self._start(assignment, launch, first))
            assignments.append(assignment)
        store.close()
        self._worlds.append(Running(self, workers, assignments, reports_held=reports_held))
        self._worlds[-1].launch = launch
        return self._worlds[-1]

    def add(self, running: Running, assignment: Assignment) -> None:
        """Starts another worker of a world that runs."""
        assert running.launch is not None
        self._started += 1
        running.take(self._start(assignment, running.launch), assignment)

    def memory_of(self, node: int) -> Path:
        """The directory that the node's agent would own."""
        root = self.folder / f"snapshots-{self._memories}" / f"node{node}"
        root.mkdir(parents=True, exist_ok=True)
        return root

    def _start(
        self, assignment: Assignment, launch: Launch, store: socket.socket | None = None
    ) -> Worker:
        log = self.folder / f"{self._started}-{assignment.rank}.log"
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        ours, theirs = socket.socketpair()
        bell = os.open(os.devnull, os.O_WRONLY)  # the harness waits for the channels themselves
        fds = [log_fd, theirs.fileno(), bell] + ([store.fileno()] if store is not None else [])
        self.ended()  # a worker that has ended may have had the process id of this one
        pid, numbers = self._server.start(launch, fds)
        os.close(log_fd)
        os.close(bell)
        theirs.close()
        worker = Worker(assignment.rank, assignment.node, pid, Channel(ours), log)
        self._alive[pid] = worker
        store_fd = numbers[3] if len(numbers) > 3 else None
        with suppress(ChannelClosed):  # a script without a session may have ended already
            worker.channel.send(replace(assignment, store_fd=store_fd))
        return worker


class Running:
    """One generation."""

    def __init__(
        self,
        pool: Pool,
        workers: list[Worker],
        assignments: list[Assignment],
        *,
        reports_held: bool,
    ) -> None:
        self.pool = pool
        self.workers = workers
        self.assignments = assignments
        self._reports_held = reports_held
        self.launch: Launch | None = None
        """The script that its workers run, and how."""
        self.offered: dict[tuple[int, str], Assignment] = {}
        """The assignments of worlds that are entered inside of a loop, by the worker's place among
        the workers and the world's token."""
        self.stores: list[socket.socket] = []
        """The sockets of these worlds' stores, which workers get copies of."""
        self.overs: list[SaveFinished] = []
        """Every save that has ended, on whatever node."""
        self._complete: set[str] = set()
        self._servers: dict[str, AgentServer] = {}
        """Serve snapshots, by their directory."""
        self._savers: dict[str, CheckpointSaver] = {}
        for assignment in assignments:
            if assignment.node not in self._savers:
                ranks = tuple(a.rank for a in assignments if a.node == assignment.node)
                self._savers[assignment.node] = _saver(assignment, ranks)

    def take(self, worker: Worker, assignment: Assignment) -> None:
        """Takes in a worker of a node that is new."""
        self.workers.append(worker)
        self.assignments.append(assignment)
        self._savers[assignment.node] = _saver(assignment, (assignment.rank,))

    def address_of(self, place: int) -> str:
        """Where the snapshots are served of a worker's node, from now on."""
        root = self.assignments[place].snapshot_root
        if root not in self._servers:
            self._servers[root] = AgentServer(
                listen("127.0.0.1", 0),
                routes={},
                snapshots=SnapshotStore(Path(root)),
                events=no_events,
                token=lambda: Secret(PASSWORD),
            )
        return f"127.0.0.1:{self._servers[root].port}"

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
        for saver in self._savers.values():
            saver.close()
        for worker in self.workers:
            worker.channel.close()
        for store in self.stores:
            store.close()

    def kill(self) -> None:
        """Sends SIGKILL to the workers that have not ended, which may do so at this moment."""
        ended = self.pool.ended()
        for worker in self.workers:
            if worker.exit_code is None and worker not in ended:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)

    def until(self, done: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Hear the workers, and answer `Stopping`, until `done()`."""
        deadline_s = time.monotonic() + patience(timeout_s)
        while not done():
            if time.monotonic() > deadline_s:
                raise AssertionError("too late:\n" + self.logs())
            alive = [w.channel for w in self.workers if w.exit_code is None]
            select.select([self.pool.fileno(), *(one.fileno() for one in alive)], [], [], 0.02)
            self._hear()

    def _hear(self) -> None:
        ended = self.pool.ended()
        for worker in [w for w in self.workers if w.exit_code is None]:
            for message in _receive(worker.channel):
                worker.heard.append(message)
                if isinstance(message, Captured):
                    self._savers[worker.node].captured(message)
                if isinstance(message, AbandonSave):
                    self._savers[worker.node].abandon(message.generation, message.step)
                if isinstance(message, TagStep):
                    self._savers[worker.node].tag(message)
                if isinstance(message, Switched):
                    self._enter(self.workers.index(worker), message.token)
                if isinstance(message, Stopping):
                    with suppress(ChannelClosed):
                        worker.channel.send(SaveState(write=self._wanted(worker, message)))
            if worker in ended:
                last = _receive(worker.channel)
                worker.heard += last
                for message in last:
                    if isinstance(message, Captured):
                        self._savers[worker.node].captured(message)
                worker.channel.close()
                worker.exit_code = ended[worker]
                worker.ended_s = time.monotonic()

        for node, saver in self._savers.items():
            for news in saver.events():
                if isinstance(news, SnapshotHeld) and not self._reports_held:
                    continue
                notice: Message = (
                    news
                    if isinstance(news, (SnapshotHeld, Tagged))
                    else Saved(step=news.step, generation=news.generation, error=news.error)
                )
                self.overs += [news] if isinstance(news, SaveFinished) else []
                for worker in self.workers:
                    if worker.node == node and worker.exit_code is None:
                        with suppress(ChannelClosed):
                            worker.channel.send(notice)

    def _enter(self, place: int, token: str) -> None:
        """Has a worker that has gone over to another world be of that one; it has one a node."""
        self.assignments[place] = assignment = self.offered[place, token]
        self._savers[assignment.node].begin(_role(assignment, (assignment.rank,)))

    def _wanted(self, worker: Worker, stopping: Stopping) -> bool:
        """One complete snapshot a node is enough."""
        chosen = stopping.clean and not (stopping.complete and worker.node in self._complete)
        if chosen and stopping.complete:
            self._complete.add(worker.node)
        return chosen

    def reached(self, step: int) -> Callable[[], bool]:
        """Whether every worker still alive has done this step."""
        return lambda: all(
            any(s.step >= step for s in w.all(Stepped)) or w.exit_code is not None
            for w in self.workers
        )

    def ended(self) -> bool:
        return all(worker.exit_code is not None for worker in self.workers)

    def finish(self, timeout_s: float = 60.0) -> int:
        """Wait for a good end; returns the final step."""
        self.until(self.ended, timeout_s)
        assert [w.exit_code for w in self.workers] == [0] * len(self.workers), self.logs()
        assert not any(w.all(Failed) for w in self.workers), self.logs()
        return self.workers[0].last(Finished).step

    def settle(self) -> None:
        """Waits until every capture so far is sealed."""
        self.until(lambda: not any(saver.unsealed() for saver in self._savers.values()))

    def resume(self) -> Resume:
        """What the next generation is to go on from: the newest snapshot that is held whole."""
        self.settle()
        held = [(w, w.last(Captured)) for w in self.workers if w.all(Captured)]
        assert held, self.logs()
        step = max(h.step for _, h in held)
        sources = tuple(
            Source(rank=h.rank, node=w.node, address="127.0.0.1:1")
            for w, h in held
            if h.step == step
        )
        return Resume(tier="ram", step=step, generation=held[0][1].generation, sources=sources)

    def save_held(self) -> None:
        """Have the nodes save what `resume` names, each rank's shard by the first that has it."""
        resume = self.resume()
        holders: dict[int, str] = {}
        for source in resume.sources:
            holders.setdefault(source.rank, source.node)
        for node in set(holders.values()):
            ranks = [rank for rank, holder in holders.items() if holder == node]
            of = (resume.generation, resume.step)
            self._savers[node].save_held(ShardName(*of, rank, len(holders)) for rank in ranks)
        self.until(lambda: not any(saver.saving for saver in self._savers.values()))

    def logs(self) -> str:
        parts = []
        for worker in self.workers:
            messages = [m for m in worker.heard if not isinstance(m, Stepped)][-6:]
            parts.append(f"rank {worker.rank} exit {worker.exit_code} said {messages}")
            parts.append(worker.log.read_text()[-3000:])
        return "\n".join(parts)


def _saver(assignment: Assignment, ranks: tuple[int, ...]) -> CheckpointSaver:
    saver = CheckpointSaver(
        SnapshotStore(Path(assignment.snapshot_root)),
        assignment.checkpoint_dir,
        RetentionPolicy(),
        lambda: None,
    )
    saver.begin(_role(assignment, ranks))
    return saver


def _role(assignment: Assignment, ranks: tuple[int, ...]) -> SnapshotRole:
    return SnapshotRole(
        generation=assignment.generation,
        token=assignment.token,
        world_size=assignment.world_size,
        ranks=ranks,
        bad_steps=frozenset(assignment.bad_steps),
    )


def _receive(channel: Channel) -> list[Message]:
    messages: list[Message] = []
    with suppress(ChannelClosed, OSError, ValueError):
        while select.select([channel], [], [], 0)[0]:
            messages += channel.drain()
    return messages
