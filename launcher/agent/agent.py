"""Runs the agent of one node, with its processes, its store and its clock, in one loop and one
thread.

Threads of the store and workers only wake the loop. It gathers what is known into a `View`, calls
`decide`, and performs the actions. Every action may be lost or done twice without harm: reports and
alarms are overwritten by equal ones, worlds are written under a condition.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.errors import ElasticZeroError, ExitCode, StoreUnavailable
from elasticzero.ipc.assignment import Assignment
from elasticzero.ipc.channel import ChannelClosed, readable
from elasticzero.ipc.messages import (
    AbandonSave,
    Captured,
    Message,
    Saved,
    SnapshotHeld,
    Switched,
    Tagged,
    TagStep,
)
from elasticzero.launcher.agent.assignments import assignments, begin_inside, snapshot_role
from elasticzero.launcher.agent.config import AgentOptions
from elasticzero.launcher.agent.console import log_for_node
from elasticzero.launcher.agent.core import AgentCore, StoreSide
from elasticzero.launcher.agent.extensions.base import AgentContext, ExtensionFactory, Extensions
from elasticzero.launcher.agent.observer import ClusterObserver
from elasticzero.launcher.agent.reporter import AgentReporter
from elasticzero.launcher.agent.status import Instruments, agent_routes
from elasticzero.launcher.agent.store_writer import StoreWriter
from elasticzero.launcher.agent.subscriptions import Subscriptions
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.http.agent_client import is_answering
from elasticzero.launcher.http.compute_poll import ComputePoll
from elasticzero.launcher.http.host_probe import HostProbe
from elasticzero.launcher.http.routes import Route
from elasticzero.launcher.observability.event_log import EventLog
from elasticzero.launcher.observability.events import EventName
from elasticzero.launcher.observability.output import contained
from elasticzero.launcher.observability.recovery.spans import open_spans
from elasticzero.launcher.protocol.actions import Decision, SaveHeldSnapshot
from elasticzero.launcher.protocol.documents import Proposal, World
from elasticzero.launcher.protocol.planned.proposal import coming_in
from elasticzero.launcher.protocol.planned.switch import world_after
from elasticzero.launcher.protocol.view import PreemptionNotice, View
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.snapshots.checkpoint_probe import CheckpointProbe
from elasticzero.launcher.snapshots.checkpoint_saver import CheckpointSaver
from elasticzero.launcher.snapshots.save_events import SaveFailed, SaveFinished
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.job_run import RunStore
from elasticzero.launcher.store.job_token import Agreed, agree_on_token
from elasticzero.launcher.store.membership import Membership
from elasticzero.launcher.store.recovery import StoreRecovery
from elasticzero.launcher.store.watch_cache import MEMBERS, WatchCache, members_of
from elasticzero.launcher.workers.forking.client import ForkServer
from elasticzero.launcher.workers.forking.preload import preloaded_modules
from elasticzero.launcher.workers.gloo_interface import check_members
from elasticzero.launcher.workers.group import WorkerGroup
from elasticzero.launcher.workers.process import worker_logs
from elasticzero.launcher.workers.reserve.reserve import Reserve
from elasticzero.launcher.workers.reserve.standbys import Standbys

REST_S = 0.25
"""Seconds between two turns of the loop while little happens and workers run."""
LONG_REST_S, LONG_REST_SHARE_OF_TTL = 1.0, 0.25
"""Maximum seconds between two turns, and their maximum share of the lease's TTL, while no timer is
due and no workers run."""
BUSY_S = 0.02
"""Seconds between two turns of the loop while a round is open or workers start."""
LONG_ROUND_S = 5.0
"""Seconds after which a round that waits for nodes is no longer checked every BUSY_S."""
RETIRE_S = 2.0
"""Seconds within which killed workers of an older generation are expected to be gone."""

log = logging.getLogger(__name__)


class Agent:
    """Supervises this node's workers until the job is done or the node leaves."""

    def __init__(
        self,
        options: AgentOptions,
        store: RunStore,
        membership: Membership,
        instruments: Instruments,
        agreed: Agreed,
        extensions: Sequence[ExtensionFactory],
    ) -> None:
        """Creates an agent that is not registered yet.

        Args:
            options: options of the node.
            store: the job's part of etcd.
            membership: the node's registration.
            instruments: metrics of the node, the pulse of the loop, and what shows progress.
            agreed: the agreement on the job's token, the password of what agents serve.
            extensions: make what else watches the agent, and is served by it.
        """
        self.options = options
        self._agreed = agreed
        self._metrics, self._pulse = instruments.metrics, instruments.pulse
        self._store = store
        self._membership = membership
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._observer = WatchCache(
            store, self.wake, run=membership.me.run, log_line=self._name_document
        )
        self.snapshots = SnapshotStore(options.snapshot_dir, options.overflow_dir)
        context = AgentContext(
            options=options,
            status=self.status,
            note=self._note,
            tell=self._tell,
            wake=self.wake,
            metrics=self._metrics,
            snapshots=self.snapshots,
        )
        self.extensions = Extensions(extensions, context)
        self._spans = open_spans(options.job, options.node, partial(log_for_node, options.node))
        listeners = [self.extensions.recorded, *([self._spans.take] if self._spans else [])]
        self.events = EventLog(options.log_dir, listeners, options.logs.max_bytes)
        self._compute = ComputePoll()
        self.reporter = AgentReporter(
            options, self.events, self._metrics, self._compute.times, instruments.progress
        )
        modules = preloaded_modules(options.training.checkpoint_dir)
        start_server = partial(
            ForkServer, modules, options.preload, options.launch.import_directory
        )
        logs = worker_logs(options.console, options.log_dir, range(options.nproc))
        standbys = Standbys(options.node_places, options.launch, logs, self._wake_write)
        self._reserve = Reserve(start_server, standbys)
        self._group: WorkerGroup | None = None
        self._prepared: tuple[World, Proposal] | None = None
        """World that a proposal changes which the workers are prepared for, and the proposal."""
        subscriptions = Subscriptions(store, self._observer, membership)
        self._cluster = ClusterObserver(
            store,
            self._observer,
            membership,
            subscriptions,
            self.snapshots,
            CheckpointProbe(options.training.checkpoint_dir, self.wake),
            HostProbe(self.wake, lambda member: is_answering(member, self.access)),
        )
        self._writer = StoreWriter(
            store,
            self._observer,
            membership,
            self._cluster,
            launch_id=options.launch_id or "",
            token_digest=agreed.digest,
        )
        self._recovery = StoreRecovery(
            store, self._observer, membership, self._cluster, agreed, self.reporter.store_recovery
        )
        side = StoreSide(
            cache=self._observer,
            membership=membership,
            subscriptions=subscriptions,
            observer=self._cluster,
            writer=self._writer,
            recovery=self._recovery,
            run=store,
        )
        self._core = AgentCore(options.policy, self, self, side, self.reporter, time.monotonic)
        membership.call_at_lapse(self.wake)
        self.saver = CheckpointSaver(
            self.snapshots,
            options.training.checkpoint_dir,
            options.keep,
            self.wake,
            lease_s=options.policy.lease_ttl_s,
            owner=options.owner,
        )
        self.view: View | None = None

    def prepare(self) -> None:
        """Gets ready to start workers at once; before that this node is of no use to a world."""
        for why in self._reserve.server.wait_until_ready():
            log.warning("--preload: %s: workers import it themselves", why)
        if (tls := self.options.tls) is not None:
            self._reserve.server.prepare(tls.credentials)

    def wake(self) -> None:
        """Wakes the loop at once; callable from any thread and from signal handlers."""
        with suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def leave(self, reason: str, by_s: float | None = None) -> None:
        """Has this node leave at the next boundary; callable from any thread and signal handler.

        Args:
            reason: Becomes part of the world's reason.
            by_s: Time at which the machine is gone, on the monotonic clock; None: it stays.
        """
        self._core.leave(reason, by_s)

    @property
    def notice(self) -> PreemptionNotice | None:
        """Returns why this node is to leave, and by when; None: it is not to leave."""
        return self._core.notice

    @property
    def token(self) -> Secret:
        """Returns the job's token."""
        return self._agreed.secret

    @property
    def access(self) -> AgentAccess:
        """Returns how the job's agents are reached."""
        tls = self.options.tls
        return AgentAccess(self.token, tls.client if tls is not None else None)

    @property
    def worker_group(self) -> WorkerGroup | None:
        """Returns this node's workers of the present generation."""
        return self._group

    def run(self) -> ExitCode:
        """Runs the loop; returns when the job is done or this node has left."""
        self._core.begin()
        try:
            while self._core.exit_code is None:
                self._pulse.turned(self._core.whole_s)
                seen = self._core.turn()
                if seen is not None:
                    self.view, _ = seen
                    self._show(self.view)
                if self._core.exit_code is None:
                    self._sleep(seen)
            return self._core.exit_code
        finally:
            self.close(self._core.exit_code)

    def _show(self, view: View) -> None:
        """Passes on what a turn has seen; nothing that goes wrong here concerns the job."""
        self.reporter.progress(view, self._group)
        self.extensions.turn(view, self.access)
        with contained("the line about the nodes that are waited for"):
            self._log_present_nodes(view)
        with contained("the poll of the workers' own times"):
            self._compute.turn(view, self.access)
        with contained("the processes that stand by"):
            self._reserve.turn(view, self._group, self.options.standby, time.monotonic())

    def _sleep(self, seen: tuple[View, Decision] | None) -> None:
        if seen is not None and (rest_s := self._core.rest_s(seen[0])) > 0.0:
            time.sleep(rest_s)
        pause_s = self._pause_s(*seen) if seen is not None else REST_S
        server = self._reserve.server.fileno()
        if self._wake_read in readable(
            [self._wake_read, *([server] if server >= 0 else [])], pause_s
        ):
            with suppress(BlockingIOError):
                os.read(self._wake_read, 4096)

    def _pause_s(self, view: View, decision: Decision) -> float:
        """Returns the seconds until the next turn, if nothing wakes the loop."""
        group = self._group
        examining = group is not None and group.progress_monitor.examining
        left_s = self._core.due_s(view, decision) - time.monotonic()
        if examining or left_s <= REST_S:
            return BUSY_S if examining or self._is_busy(view, decision) else REST_S
        if group is not None:  # each turn receives steps, and looks for suspended workers
            return REST_S
        ttl_s = self.options.policy.lease_ttl_s
        return min(left_s, LONG_REST_S, LONG_REST_SHARE_OF_TTL * ttl_s)

    def _is_busy(self, view: View, decision: Decision) -> bool:
        training = view.workers.restored and view.round_s is None and not decision.actions
        long_round = view.round_s is not None and time.monotonic() - view.round_s > LONG_ROUND_S
        idle = training or view.world is None or view.outside_s is not None or long_round
        return bool(decision.actions) or not idle

    def _log_present_nodes(self, view: View) -> None:
        if view.done is not None or (view.world is not None and view.round_s is None):
            self.reporter.console.not_waiting()
            return
        with suppress(StoreUnavailable):
            self.reporter.console.waiting(
                lambda: members_of(self._store.read(MEMBERS)), view.control
            )

    def poll(self, now_s: float) -> None:
        """Receives the messages of workers and saves, and kills processes that are past a limit of
        their own."""
        group = self._receive(now_s)
        if group is not None:
            group.kill_unresponsive_scripts(now_s)
            for worker in group.kill_overdue(now_s):
                self.reporter.stuck_at_exit(worker, self.options.launch.exit_timeout_s)
            self.reporter.outlasted(group, now_s)
            for failure in group.poll_stalls(now_s):
                self.reporter.examined(group, failure)
        self._receive_saves()

    def _receive(self, now_s: float) -> WorkerGroup | None:
        """Receives the messages and the exits of workers; returns their group."""
        if (ended := self._reserve.ended()) is None:
            ended = []
            self._replace_server()
        group, standbys = self._group, self._reserve.standbys
        told = standbys.poll(ended, now_s, self._reserve.script_s)
        self.reporter.standing(told, standbys.private_bytes)
        if group is not None:
            heard = group.poll_messages(now_s, ended)
            self.reporter.received(group, heard, now_s)
            for worker, message in heard:
                self.extensions.received(worker.rank, message)
                match message:
                    case Switched(step=step) if self._prepared is not None:
                        self._take_role(world_after(*self._prepared, step))
                    case Captured():
                        self.saver.captured(message)
                    case AbandonSave(generation=generation, step=step):
                        self.saver.abandon(generation, step)
                    case TagStep():
                        self.saver.tag(message)
                    case _:
                        pass
        return group

    def keep_only(self, keep: Set[tuple[int, int]]) -> None:
        """Removes all but these snapshots from memory."""
        self.snapshots.keep_only(keep)

    def saving(self) -> bool:
        """Returns whether a save of this node has not ended."""
        return self.saver.saving

    def unsealed(self) -> bool:
        """Returns whether memory holds snapshots that are not sealed yet."""
        return self.saver.unsealed()

    def save_held(self, held: SaveHeldSnapshot) -> None:
        """Begins to save shards that memory holds."""
        generation, step, size = held.generation, held.step, held.world_size
        self.saver.save_held(ShardName(generation, step, r, size) for r in held.ranks)

    def _receive_saves(self) -> None:
        """Tells the workers what became of their captures."""
        for event in self.saver.events():
            match event:
                case SaveFailed():
                    self.reporter.save_failed(event)
                    continue
                case SnapshotHeld():
                    message: Message = event
                    self.reporter.snapshot_held(event)
                case Tagged():
                    message = event
                    self.reporter.tagged(event)
                case SaveFinished():
                    message = Saved(step=event.step, generation=event.generation, error=event.error)
                    self.reporter.saved(event)
                    if event.error is None:
                        self._cluster.saved(event.step)
            if self._group is not None and self._group.generation == event.generation:
                self._group.broadcast(message)

    def _replace_server(self) -> None:
        """Starts another fork server after the first one died, and its workers with it; where the
        machine has no room for one now, the next turn tries again."""
        if self._group is not None:
            self._group.fail_all("the fork server of this node died")
        try:
            self._reserve.replace_server()
        except OSError as error:
            log.warning("another fork server cannot be started yet: %s", error)

    def retire(self, world: World) -> None:
        """Ends the workers of the older generation, which make way for those of `world`."""
        if world.token_digest not in ("", self._agreed.digest):
            self._adopt_token()
        self._retire_group()
        self._prepared = None

    def start(self, world: World, index: int, now_s: float) -> None:
        """Starts this node's workers of a generation, in the processes that were kept if any.

        Args:
            world: World of the generation.
            index: Index of this node in its order of members.
            now_s: Present time, on the monotonic clock.

        Raises:
            UserError: A node of the world is not in the private network. The caller ends this agent
                by it, and not the job.
        """
        self.saver.begin(snapshot_role(world, index, self._agreed.secret, self.options.tls))
        self.reporter.starting(world, index, now_s)
        self.extensions.started(world, world.ranks(index))
        assigned = assignments(self.options, world, index, self._agreed.secret)
        self._launch(world, assigned, now_s)

    def _launch(self, world: World, assigned: Sequence[Assignment], now_s: float) -> WorkerGroup:
        """Starts workers with these assignments, in the processes that were kept if any."""
        options, first = self.options, assigned[0].rank
        if options.private_network is not None:
            check_members(options.private_network, world.members)
        reusable = self._reserve.take({assignment.local_rank for assignment in assigned})
        self._group = group = WorkerGroup(
            self._reserve.server,
            world.generation,
            wakeup_fd=self._wake_write,
            first_rank=first,
            started_s=now_s,
            console=options.console,
        )
        try:
            with self._store_socket(rank_zero=first == 0) as store:
                group.start(assigned, options.launch, options.log_dir, store, reusable)
        except (ChannelClosed, OSError):
            self._replace_server()
        self.reporter.started(group)
        return group

    def prepare_workers(self, world: World, proposal: Proposal) -> None:
        """Tells the workers to connect a proposed generation beside their training, or starts
        workers that come into it.

        Args:
            world: World that the proposal changes.
            proposal: The proposal, by which this node stays, leaves or comes in.
        """
        me, group, following = self._membership.me, self._group, world_after(world, proposal)
        index, options = proposal.find(me.node, me.incarnation), self.options
        assigned: list[Assignment] = []
        if index is not None:
            self._prepared = (world, proposal)
            assigned = assignments(options, following, index, self._agreed.secret)
        if index is not None and not world.names(me):
            self._retire_group()
            assigned = begin_inside(assigned, world, following)
            self._launch(following, assigned, time.monotonic()).come_in(world, proposal)
        elif group is not None:
            with self._store_socket(rank_zero=index == 0) as store:
                group.prepare(proposal, assigned, store, joins=bool(coming_in(world, proposal)))

    def _store_socket(self, *, rank_zero: bool) -> AbstractContextManager[socket.socket | None]:
        return self._membership.take_store_socket() if rank_zero else nullcontext()

    def enter(self, world: World, now_s: float) -> None:
        """Takes the workers for those of a world that they have entered inside their loops.

        Args:
            world: The world.
            now_s: Present time, on the monotonic clock.
        """
        if self._group is not None:
            self._group.enter(world, now_s)
        self._take_role(world)

    def _take_role(self, world: World) -> None:
        """Takes this node's part in the world that its workers have entered, once."""
        prepared, self._prepared = self._prepared, None
        me = self._membership.me
        index = world.find(me.node, me.incarnation)
        if prepared is not None and index is not None:
            self.saver.begin(snapshot_role(world, index, self._agreed.secret, self.options.tls))
            self.extensions.started(world, world.ranks(index))

    def _adopt_token(self) -> None:
        """Adopts the token that the other nodes use; raises `UserError` if this node was given
        another one.

        This node came to a store that had lost its data, and made a token of its own.
        """
        mode = self._agreed.record.tls
        agreed = agree_on_token(self._store, self._configured_token(), mode)
        self._agreed = agreed
        self._writer.adopt(agreed.digest)
        self._recovery.adopt(agreed)

    def _configured_token(self) -> Secret | None:
        return self._agreed.secret if self._agreed.record.token is None else None

    def _retire_group(self) -> None:
        """Kills the workers of the older generation, and keeps those that are ready for the next.

        This blocks the loop for RETIRE_S at most, and takes in the workers' last messages itself.
        It must: two generations may share neither a GPU, nor memory, nor a port. Workers seldom run
        here, for a node has reported that they stopped before a world names it again, and SIGKILL
        then takes milliseconds. The lease is renewed by a thread of its own meanwhile. A process
        that the kernel cannot end, as in I/O that hangs, is left behind.
        """
        group = self._group
        if group is None:
            return
        group.kill()
        deadline_s = time.monotonic() + RETIRE_S
        while group.view(0.0).running and time.monotonic() < deadline_s:
            readable([self._reserve.server.fileno()], 0.05)
            self._receive(time.monotonic())
        group.progress_monitor.close()
        self.reporter.retired(group)
        self._group = None
        self._reserve.keep(group.take_waiting())

    def _name_document(self, line: str) -> None:
        """Logs which document in etcd cannot be read."""
        log_for_node(self.options.node, f"etcd's {job_prefix(self.options.job)}{line}")

    def stop_workers(self, reason: str) -> None:
        """Stops the workers by their own protocol, without a decision, and waits for their exits.

        They leave what is clean of their state in memory. Where all of it is here, as on the only
        node of a job, it is saved on storage too.
        """
        try:
            self._stop_workers(reason)
            self._save_alone()
        except Exception:
            log.exception("the workers could not be stopped by their own protocol")

    def _stop_workers(self, reason: str) -> None:
        group, policy = self._group, self.options.policy
        if group is None:
            return
        group.stop(reason, time.monotonic())
        self._settle(lambda: group.view(0.0).running > 0, policy.stop_s)
        group.kill(spare_saving=True)
        self._settle(lambda: group.view(0.0).running > 0, policy.save_s)
        self._settle(lambda: self.saving() or self.unsealed(), policy.save_s)

    def _save_alone(self) -> None:
        """Saves the newest snapshot that is whole on this node, if storage has no newer step."""
        whole = [
            held for held in self.snapshots.held() if set(held.ranks) == set(range(held.world_size))
        ]
        if not whole or self.options.training.checkpoint_dir is None:
            return
        newest = max(whole, key=lambda held: (held.generation, held.step))
        if self.view is not None and (self.view.storage_step or 0) >= newest.step:
            return
        size = newest.world_size
        self.save_held(SaveHeldSnapshot(newest.generation, newest.step, size, newest.ranks))
        self._settle(self.saving, self.options.policy.save_s)

    def _settle(self, unsettled: Callable[[], bool], limit_s: float) -> None:
        """Receives what comes of workers and saves until that is settled, within a limit."""
        deadline_s = time.monotonic() + limit_s
        while unsettled() and time.monotonic() < deadline_s:
            self._pulse.turned(time.monotonic())
            self.poll(time.monotonic())
            time.sleep(BUSY_S)

    def _note(self, event: EventName, **fields: Any) -> None:
        self.reporter.note(event, **fields)

    def _tell(self, message: Message) -> None:
        if self._group is not None:
            self._group.broadcast(message)

    def status(self) -> dict[str, Any]:
        """Returns plain values for `/status`, without secrets."""
        of_agent = self.reporter.status(self.view, self.notice is not None)
        return {**of_agent, **self.extensions.status()}

    def job_metrics(self) -> bytes:
        """Returns the metrics of the whole job; nothing where this agent does not lead."""
        return self.reporter.job_metrics(self.view)

    def routes(self) -> dict[str, Route]:
        """Returns what this agent serves besides events and snapshots, by path."""
        routes = agent_routes(self._metrics, self._pulse, self.status, self.job_metrics)
        return {**routes, **self.extensions.routes()}

    def close(self, code: ExitCode | None = None) -> None:
        """Stops the workers, releases the node's name and frees the shared memory."""
        self._pulse.ended()
        # A second Ctrl-C must not leave half of it, nor a late SIGTERM change the exit code.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        with suppress(ElasticZeroError, ChannelClosed):
            self._retire_group()
        self._reserve.close()
        done = self.view.done if self.view is not None else None
        self.extensions.close(done.outcome if done is not None else None)
        self.saver.close(at_once=code is ExitCode.SUPERSEDED, job_ended=done is not None)
        self._membership.close()
        self.reporter.close(code)
        if self._spans is not None:
            self._spans.close()
