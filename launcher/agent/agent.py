"""The agent of one node: observe, decide, act.

One loop in one thread. Store threads and workers only wake it; it gathers what is so into a
`View`, asks `decide`, and performs the actions. Every action may be lost or done twice without
harm: reports and alarms are overwritten by equal ones, worlds are written under a condition.
"""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.errors import ElasticZeroError, ExitCode, StoreUnavailable
from elasticzero.ipc.channel import ChannelClosed
from elasticzero.ipc.messages import AbandonSave, Captured, Message, Saved, SnapshotHeld
from elasticzero.launcher.agent.assignments import assignments, post
from elasticzero.launcher.agent.config import AgentOptions
from elasticzero.launcher.agent.observer import ClusterObserver
from elasticzero.launcher.agent.reporter import AgentReporter
from elasticzero.launcher.agent.store_writer import StoreWriter
from elasticzero.launcher.observability.event_log import EventLog
from elasticzero.launcher.observability.metrics import Metrics
from elasticzero.launcher.protocol.actions import (
    Action,
    Decision,
    DumpStacks,
    KillSuspended,
    KillUnresponsive,
    KillWorkers,
    Leave,
    PutReport,
    RaiseAlarm,
    RequestBoundaryStop,
    SaveHeldSnapshot,
    Start,
    StopWorkers,
    WriteDone,
    WriteWorld,
)
from elasticzero.launcher.protocol.decide import decide
from elasticzero.launcher.protocol.documents import World
from elasticzero.launcher.protocol.drain import merge_notices
from elasticzero.launcher.protocol.view import PreemptionNotice, View, WorkerGroupState
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.snapshots.checkpoint_probe import CheckpointProbe
from elasticzero.launcher.snapshots.checkpoint_saver import (
    CheckpointSaver,
    SaveFailed,
    SaveFinished,
)
from elasticzero.launcher.snapshots.shared_memory import OwnedDirectory
from elasticzero.launcher.store.api import Store
from elasticzero.launcher.store.job_token import Agreed, agree_on_token
from elasticzero.launcher.store.membership import Membership
from elasticzero.launcher.store.recovery import StoreRecovery
from elasticzero.launcher.store.watch_cache import MEMBERS, WatchCache, members_of
from elasticzero.launcher.workers.fork_server import ForkServer
from elasticzero.launcher.workers.group import WorkerGroup
from elasticzero.launcher.workers.process import Worker, kill_all

REST_S = 0.25
"""The loop looks at the clock, and hears of steps, so often when nothing happens."""
BUSY_S = 0.02
"""The same while a round is open or workers start."""
LONG_ROUND_S = 5.0
"""A round that waits for nodes need not be looked at every BUSY_S."""
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.fsdp",
    "numpy",
    "elasticzero.entry_point",
    "elasticzero.comm.gloo",
    "elasticzero.parallel.ddp",
    "elasticzero.parallel.zero",
    "elasticzero.parallel.fsdp",
)
"""What a worker would import anyway, the strategies among it, which are imported when created."""


class Agent:
    """Supervises this node's workers until the job is done or the node leaves."""

    def __init__(
        self,
        options: AgentOptions,
        store: Store,
        membership: Membership,
        metrics: Metrics,
        agreed: Agreed,
    ) -> None:
        """agreed: on the job's token, the password of what agents serve."""
        self.options = options
        self._agreed = agreed
        self.adopted: Callable[[Secret], None] = lambda token: None
        """Told of the job's token when it becomes another one."""
        self._store = store
        self._membership = membership
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._observer = WatchCache(store, self.wake)
        self.snapshots = SnapshotStore(options.snapshot_dir, options.overflow_dir)
        self._events = EventLog(options.log_dir)
        self.reporter = AgentReporter(options, self._events, metrics)
        self._server = ForkServer(_preload(self.options.checkpoint_dir))
        self._gang: WorkerGroup | None = None
        self.claim: OwnedDirectory | None = None
        """Of this node's memory and name on this machine; released when the agent ends."""
        look = CheckpointProbe(options.checkpoint_dir, self.wake)
        self._cluster = ClusterObserver(store, self._observer, membership, self.snapshots, look)
        self._store_actions = StoreWriter(
            store,
            self._observer,
            membership,
            self._cluster,
            lambda now_s: self._decide(now_s)[1],
            time.monotonic,
        )
        self._store_actions.token_digest = agreed.digest
        self._recovery = StoreRecovery(
            store,
            self._observer,
            membership,
            self._cluster,
            agreed,
            self.reporter.store_recovery,
        )
        self.saver = CheckpointSaver(
            self.snapshots, options.checkpoint_dir, options.keep, self.wake
        )
        self._saved_held: SaveHeldSnapshot | None = None
        self._world_token = ""
        self._notices: list[PreemptionNotice] = []
        self._backoff_until_s = 0.0
        self.view: View | None = None
        self.exit_code: ExitCode | None = None

    def prepare(self) -> None:
        """Get ready to start workers at once; before that this node is of no use to a world."""
        self._server.wait_until_ready()

    def wake(self) -> None:
        """Have the loop look again at once; callable from any thread and from signal handlers."""
        with suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def leave(self, reason: str, by_s: float | None = None) -> None:
        """Have this node leave at the next boundary; callable from any thread and from signal
        handlers.

        reason: goes into the world's. by_s: the machine is gone then (monotonic clock).
        """
        self._notices.append(PreemptionNotice(reason=reason, heard_s=time.monotonic(), by_s=by_s))
        self.wake()

    @property
    def notice(self) -> PreemptionNotice | None:
        """Why this node is to leave, and by when; None: it is not."""
        return merge_notices(self._notices)

    def run(self) -> ExitCode:
        """The loop; returns when the job is done or this node has left."""
        self._cluster.begin(time.monotonic())
        try:
            while self.exit_code is None:
                now_s = time.monotonic()
                view, decision = self._decide(now_s)
                self.view = view
                self.reporter.decided(view, decision)
                self._act(view, decision, now_s)
                self._say_who_is_here(view)
                if self.exit_code is None:
                    self._sleep(view, decision)
            return self.exit_code
        finally:
            self.close()

    def _sleep(self, view: View, decision: Decision) -> None:
        training = view.workers.restored and view.round_s is None and not decision.actions
        long_round = view.round_s is not None and time.monotonic() - view.round_s > LONG_ROUND_S
        idle = training or view.world is None or view.outside_s is not None or long_round
        gang = self._gang
        looking = gang is not None and gang.hangs.looking
        timeout_s = REST_S if idle and not decision.actions and not looking else BUSY_S
        sources: list[Any] = [self._wake_read, self._server]
        readable = select.select(sources, [], [], timeout_s)[0]
        if self._wake_read in readable:
            with suppress(BlockingIOError):
                os.read(self._wake_read, 4096)

    def _decide(self, now_s: float) -> tuple[View, Decision]:
        view = self._observe(now_s)
        return view, decide(view, now_s, self.options.limits)

    def _observe(self, now_s: float) -> View:
        saving = self.saver.saving  # before the news of its end is heard
        self._recovery.attend(now_s)
        self._store_actions.keep_registered(now_s, leaving=self.notice is not None)
        self._hear(now_s)
        if self._observer.control().drains(self._membership.me) and self.notice is None:
            self.leave("drained by an operator")
        workers = WorkerGroupState()
        if self._gang is not None:
            workers = replace(self._gang.view(now_s), token=self._world_token)
        if not workers.running:
            workers = replace(workers, sealing=self.saver.unsealed())
        notice = self.notice
        view = self._cluster.view(workers, notice is not None, now_s, self.options.limits)
        view = replace(view, notice=notice, saving=saving)
        if (held := self._saved_held) is not None:
            state = (held.generation, held.step)
            view = replace(view, saved_held=state, saved_ranks=held.ranks)
        return view

    def _say_who_is_here(self, view: View) -> None:
        if view.done is not None or (view.world is not None and view.round_s is None):
            self.reporter.not_waiting()
            return
        with suppress(StoreUnavailable):
            self.reporter.waiting(lambda: members_of(self._store.read(MEMBERS)))

    def _hear(self, now_s: float) -> None:
        try:
            ended = self._server.ended()
        except (ChannelClosed, OSError):
            ended = []
            self._replace_server()
        if self._gang is not None:
            heard = self._gang.poll_messages(now_s, ended)
            self.reporter.heard(self._gang, heard, now_s)
            for _, message in heard:
                match message:
                    case Captured():
                        self.saver.captured(message)
                    case AbandonSave(generation=generation, step=step):
                        self.saver.give_up(generation, step)
                    case _:
                        pass
            self._gang.kill_unresponsive_scripts(now_s)
            for worker in self._gang.kill_overdue(now_s):
                self.reporter.stuck_at_exit(worker, self.options.launch.exit_timeout_s)
            self.reporter.outlasted(self._gang, now_s)
            for failure in self._gang.poll_stalls(now_s):
                self.reporter.looked(self._gang, failure)
        self._hear_saver()

    def _hear_saver(self) -> None:
        """Pass on to the workers what became of their captures."""
        for news in self.saver.events():
            match news:
                case SaveFailed():
                    self.reporter.save_failed(news)
                    continue
                case SnapshotHeld():
                    message: Message = news
                    self.reporter.kept(news)
                case SaveFinished():
                    message = Saved(step=news.step, generation=news.generation, error=news.error)
                    self.reporter.saved(news)
                    if news.error is None:
                        self._cluster.saved(news.step)
            if self._gang is not None and self._gang.generation == news.generation:
                self._gang.tell(message)

    def _replace_server(self) -> None:
        """The fork server died, and its workers with it."""
        if self._gang is not None:
            self._gang.fail_all("the fork server of this node died")
        self._server.close()
        self._server = ForkServer(_preload(self.options.checkpoint_dir))

    def _act(self, view: View, decision: Decision, now_s: float) -> None:
        if now_s < self._backoff_until_s:
            return
        try:
            for action in decision.actions:
                self._do(view, decision, action, now_s)
        except StoreUnavailable as error:
            self.reporter.store_trouble(error)
            # Others could not write either: their time to answer begins anew.
            self._membership.well_since_s = time.monotonic()
            self._backoff_until_s = time.monotonic() + BUSY_S * 10

    def _do(self, view: View, decision: Decision, action: Action, now_s: float) -> None:
        match action:
            case Start(world, index):
                self._start(world, index, now_s)
            case RequestBoundaryStop(flags) if self._gang is not None:
                self._gang.ask(flags)
            case StopWorkers(reason) if self._gang is not None:
                self._gang.stop(reason, now_s)
            case KillWorkers(spare_saving=spare_saving) if self._gang is not None:
                self._gang.kill(spare_saving=spare_saving)
            case KillUnresponsive() if self._gang is not None:
                self._gang.kill_unresponsive()
            case KillSuspended() if self._gang is not None:
                self._gang.kill_suspended()
            case DumpStacks(limit_s) if self._gang is not None:
                self._gang.hangs.dump_stacks(limit_s, now_s)
            case RaiseAlarm() | PutReport() | WriteWorld() | WriteDone():
                self._store_actions.do(action, view, now_s, self.options.limits)
            case SaveHeldSnapshot(generation, step, world_size, ranks):
                self._saved_held = action
                self.saver.save_held(ShardName(generation, step, r, world_size) for r in ranks)
            case Leave(code):
                self.reporter.leaves(decision.reason)
                self.exit_code = code
            case _:
                pass

    def _start(self, world: World, index: int, now_s: float) -> None:
        options = self.options
        if world.token_digest not in ("", self._agreed.digest):
            self._adopt_token()
        token = self._agreed.secret
        kept = self._retire_gang()
        self.snapshots.keep_only({(world.resume.generation, world.resume.step)})
        given = assignments(options, world, index, token)
        first = world.first_rank(index)
        self.saver.begin(post(world, index, token))
        gang = WorkerGroup(
            self._server,
            world.generation,
            wakeup_fd=self._wake_write,
            first_rank=first,
            started_s=now_s,
            console=options.console,
        )
        self._gang, self._world_token = gang, world.token
        kill_all(worker for local_rank, worker in kept.items() if local_rank >= len(given))
        self.reporter.starting(world, index, now_s)
        store = self._membership.take_store_socket() if first == 0 else None
        try:
            gang.start(given, options.launch, options.log_dir, store, kept)
        except (ChannelClosed, OSError):
            self._replace_server()
        finally:
            if store is not None:
                store.close()
        self.reporter.started(gang)

    def _adopt_token(self) -> None:
        """Take the token that the other nodes use, where this one came to a store that had lost its
        data and made a token of its own; raises `UserError` if it was given another one."""
        agreed = agree_on_token(self._store, self._given_token())
        self._agreed = agreed
        self._store_actions.token_digest = agreed.digest
        self._recovery.adopt(agreed)
        self.adopted(agreed.secret)

    def _given_token(self) -> Secret | None:
        return self._agreed.secret if self._agreed.record.token is None else None

    def _retire_gang(self) -> dict[int, Worker]:
        """No worker of an older generation lives on beside the new ones; returns those that are
        ready for the new one, by local rank."""
        gang = self._gang
        if gang is None:
            return {}
        gang.kill()
        deadline_s = time.monotonic() + 2.0
        while gang.view(0.0).running and time.monotonic() < deadline_s:
            select.select([self._server], [], [], 0.05)
            self._hear(time.monotonic())
        gang.hangs.close()
        self.reporter.retired(gang)
        self._gang = None
        return gang.take_waiting()

    def status(self) -> dict[str, Any]:
        """For `/status`: plain values, no secrets."""
        return self.reporter.status(self.view, self.notice is not None)

    def close(self) -> None:
        """Stop the workers, give the name back, free the shared memory."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it
        with suppress(ElasticZeroError, ChannelClosed):
            self._retire_gang()
        self._server.close()
        self.saver.close()
        self._membership.close()
        self.reporter.close(self.exit_code)
        if self.claim is not None:
            self.claim.release()


def _preload(checkpoint_dir: str | None) -> tuple[str, ...]:
    """What workers have imported when they begin: also what reads the checkpoints."""
    scheme = (checkpoint_dir or "").partition("://")[0]
    package = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}.get(scheme)
    known = package is not None and importlib.util.find_spec(package) is not None
    return (*PRELOAD, package) if known and package else PRELOAD
