"""Builds an agent with its store, registration and HTTP server, runs it, and closes all of them."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from elasticzero.checkpoint.steps.owner import OwnerRecord
from elasticzero.checkpoint.storage.base import within
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import (
    AccessRefused,
    ExitCode,
    StorageError,
    StoreUnavailable,
    UserError,
)
from elasticzero.launcher.agent.agent import Agent
from elasticzero.launcher.agent.config import AgentOptions, on_island
from elasticzero.launcher.agent.console import NAMES_SHOWN, log, log_for_node
from elasticzero.launcher.agent.etcd_hosting import (
    hosted,
    own_address,
    wait_for_lower_ranks,
    wait_for_others,
)
from elasticzero.launcher.agent.extensions.base import ExtensionFactory
from elasticzero.launcher.agent.extensions.island import IslandExtension, IslandInEtcd
from elasticzero.launcher.agent.extensions.island_beginning import begun_as_others
from elasticzero.launcher.agent.node_claim import listen_on_free_port
from elasticzero.launcher.agent.status import Instruments, LoopPulse
from elasticzero.launcher.http.server import AgentServer, TokenlessAccess, listen
from elasticzero.launcher.islands.documents import forget_past_rounds
from elasticzero.launcher.islands.places import Reservation
from elasticzero.launcher.observability import logging_setup
from elasticzero.launcher.observability.console import MUTED
from elasticzero.launcher.observability.job_status import page_address
from elasticzero.launcher.observability.metrics import Metrics
from elasticzero.launcher.observability.output import terminal
from elasticzero.launcher.observability.progress.display import ProgressDisplay
from elasticzero.launcher.options.rendezvous import HostedEtcd
from elasticzero.launcher.options.tls_settings import TlsSettings
from elasticzero.launcher.preemption.watcher import PreemptionWatcher
from elasticzero.launcher.protocol.documents import Done, Member
from elasticzero.launcher.protocol.termination import exit_code_of
from elasticzero.launcher.protocol.view import PreemptionNotice
from elasticzero.launcher.retry import RetryPolicy, retry_call
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.snapshots.directory_claim import SWEEP_S, claim_directory, this_network
from elasticzero.launcher.snapshots.shared_memory import OwnedDirectory
from elasticzero.launcher.store.api import Condition, Entry, Store, job_prefix
from elasticzero.launcher.store.decoding import counts_as_node, document
from elasticzero.launcher.store.etcd.access import Access
from elasticzero.launcher.store.etcd.diagnose import unknown_host
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.etcd.store import EtcdStore
from elasticzero.launcher.store.job_run import RunStore, begin_next_run, stored_run
from elasticzero.launcher.store.job_token import agree_on_token
from elasticzero.launcher.store.membership import (
    Membership,
    bound_socket,
    new_incarnation,
    reachable_address,
)
from elasticzero.launcher.store.watch_cache import DONE, MEMBERS, WORLD
from elasticzero.launcher.tls.credentials import NodeName
from elasticzero.launcher.tls.setup import node_contexts
from elasticzero.launcher.workers.gloo_interface import confined, with_gloo_host
from elasticzero.processes import collect_garbage_less_often
from elasticzero.serialization import RecordError
from elasticzero.text import list_text, shown
from elasticzero.version import __version__, torch_version

STORE_RETRY = RetryPolicy(first_pause_s=2.0, max_pause_s=8.0, growth=1.5)
"""Pauses between tries to reach the store; a thousand nodes may wait for the same store."""
RESTART_REST_S = 0.5
"""Pause between looks at whether the nodes of a job that is over are gone."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Network:
    """Says where this node listens and how others reach it."""

    host: str | None
    http_host: str
    http_port: int | None
    """Port of the HTTP server; None: the default, or the next one that is free."""
    http_names: tuple[str, ...] = ()
    """Names of this node under which clients without the token may reach its HTTP server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordination:
    """Says where and how this node finds the others of its job."""

    endpoints: Sequence[str]
    """Endpoints of etcd; empty: the agent starts an etcd of its own."""
    access: Access
    token: Secret | None
    """Token of the job, if one was given."""
    tls: TlsSettings = field(default_factory=TlsSettings)
    restart: bool
    """True: a job that is done begins again."""
    storage_error: StorageError | None = None
    """Reason for which the checkpoint directory cannot be written now."""
    hosted: HostedEtcd | None = None
    """The etcd at `endpoints`, where a node of the run starts it."""
    node_rank: int | None = None
    """Number of nodes that must be registered before this one registers; None: it registers at
    once."""
    islands: int = 1
    """Number of islands with which their rounds begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launching:
    """Says with what an agent's process begins."""

    claim: OwnedDirectory
    """Claim of the node's name and memory on this machine, which is released when the agent has
    ended."""
    signals: Sequence[signal.Signals] = ()
    """Signals at which this node leaves, besides SIGTERM."""
    lines: Sequence[str] = ()
    """Lines to print first."""
    extensions: Sequence[ExtensionFactory] = ()
    """Make what else watches the agent, and is served by it."""
    await_start: Callable[[Callable[[], bool]], None] = lambda is_leaving: None
    """Waits until the node, which is ready, may register; it is given a function that returns
    whether the node is to leave, and then waits no longer."""


def run_agent(  # noqa: PLR0915 - everything is set up and taken down in one order
    options: AgentOptions, coordination: Coordination, network: Network, launching: Launching
) -> ExitCode:
    """Runs this node's agent until the job is done or the node has left.

    Args:
        options: options of the node.
        coordination: where and how it finds the other nodes.
        network: where it listens.
        launching: with what its process begins.
    """
    endpoints = coordination.endpoints
    metrics = Metrics()
    policy, private = options.policy, options.private_network
    pulse = LoopPulse(policy.lease_ttl_s)
    metrics.identify(options.job, options.node, policy.strategy, policy.shard, policy.redundancy)
    for number in (signal.SIGTERM, *launching.signals):
        signal.signal(number, _leave_early)
    log_line = partial(log_for_node, options.node)
    logging_setup.context.node = options.node
    display = ProgressDisplay(options.progress, log_line)
    for line in launching.lines:
        log_line(line)
    with terminal.in_background(), ExitStack() as stack:
        terminal.follow(display.ticker)
        hosts = False
        display.show("starting an etcd")
        if not endpoints:
            etcd = stack.enter_context(EtcdServer())
            endpoints = [etcd.endpoint]
            log_line(f"--etcd is not given: this agent started an etcd at {etcd.endpoint}")
        elif coordination.hosted is not None:
            hosts = stack.enter_context(hosted(coordination.hosted, log_line, private))
        open_store = partial(
            EtcdStore, endpoints, access=coordination.access, observe=metrics.observe_etcd
        )
        shared = open_store(job_prefix(options.job))  # what all nodes of the job share, islands too
        shared.renew_leases_while(pulse.turns)
        stack.callback(shared.close)
        display.show(f"waiting for etcd at {','.join(endpoints)}")
        store, reservation = shared, None
        if options.is_island:
            options, reservation = _at_island(options, shared, endpoints)
            if reservation is not None:
                stack.callback(reservation.close)
            store = open_store(job_prefix(options.job_of_island))
            store.renew_leases_while(pulse.turns)
            stack.callback(store.close)
        ended = _wait_for_store(store, options, endpoints, restart=coordination.restart)
        if ended is not None:
            return ended
        has_begun = _retry_store(partial(_has_begun, store), options)
        if (error := coordination.storage_error) is not None:
            if not has_begun:
                raise error
            log_line(f"{error}; the job has begun, and saves are tried when due")
        run = RunStore(
            store,
            _retry_store(partial(stored_run, store), options),
            lambda line: log_line(f"etcd's {job_prefix(options.job)}{line}"),
        )
        options = replace(options, owner=_owner(options.job, run.number, store, endpoints))
        if coordination.storage_error is None and not has_begun:
            display.show("waiting for the checkpoint directory")
            _claim_checkpoints(options, endpoints, coordination.access)
        agree = partial(agree_on_token, node_token=coordination.token, tls=coordination.tls.mode)
        record = None
        if options.is_island:  # all islands have one token
            job_run = RunStore(shared, _retry_store(partial(stored_run, shared), options), log_line)
            record = _retry_store(partial(agree, job_run), options).record
            if coordination.restart:
                _retry_store(partial(forget_past_rounds, shared), options)
        agreed = _retry_store(partial(agree, run, shared=record), options)
        if hosts and coordination.hosted is not None:
            stack.callback(wait_for_others, store)
            host = network.host or own_address(coordination.hosted)
        else:
            host = network.host or reachable_address(endpoints[0])
        names = (host, *network.http_names)
        options, host = _at_host(options, host)
        tls = node_contexts(
            agreed.record.tls,
            NodeName(job=options.job, run=run.number, node=options.node),
            agreed.secret,
            (host, *names),
            coordination.tls.files,
        )
        options = replace(options, tls=tls)
        listening = listen_on_free_port(
            network.http_port, partial(listen, network.http_host), log_line
        )
        stack.enter_context(listening)
        bind = partial(bound_socket, host)
        store_socket = bind()
        me = Member(
            node=options.node,
            incarnation=new_incarnation(),
            host=host,
            http_port=listening.getsockname()[1],
            store_port=store_socket.getsockname()[1],
            nproc=options.nproc,
            zone=options.zone or "",
            run=run.number,
            release=__version__,
            torch=torch_version(),
        )
        ttl_s = int(options.policy.lease_ttl_s)
        membership = Membership(run, me, ttl_s, store_socket, bind=bind)
        instruments = Instruments(metrics=metrics, pulse=pulse, progress=display)
        extensions = [*launching.extensions]
        in_etcd = IslandInEtcd(
            job=shared, island=store, reservation=reservation, membership=membership
        )
        if options.is_island:
            islands = coordination.islands
            extensions.append(partial(IslandExtension, in_etcd=in_etcd, me=me, islands=islands))
        agent = Agent(options, run, membership, instruments, agreed, extensions)
        stack.enter_context(
            AgentServer(
                listening,
                routes=agent.routes(),
                snapshots=agent.snapshots,
                events=agent.events.newest,
                token=lambda: agent.token,
                files=agent.extensions.files(),
                tokenless=TokenlessAccess(open_status=options.open_status, names=names),
                run=run.number,
                tls=tls,
            )
        )
        scheme = agent.access.scheme
        agent.reporter.note("serving", port=me.http_port, host=host, scheme=scheme)
        for number in (signal.SIGTERM, *launching.signals):
            signal.signal(number, partial(_terminate, agent))
        try:
            stack.enter_context(PreemptionWatcher(options.preemption, agent.leave, log_line))
            stack.callback(launching.claim.release)
            display.show("loading torch for the workers")
            agent.prepare()
            launching.await_start(lambda: agent.notice is not None)
            display.show("waiting for this node's registration in etcd")
            if coordination.node_rank:
                wait_for_lower_ranks(store, coordination.node_rank, options.policy.join_timeout_s)
            collect_garbage_less_often()
            with ExitStack() as turn:
                if options.is_island:
                    display.show("looking for the state of other islands")
                    retry = partial(_retry_store, options=options)
                    turn.enter_context(begun_as_others(in_etcd, membership, agent, retry))
                leaving = _join(membership, agent)
        except BaseException:
            agent.close()
            raise
        if leaving is not None:
            agent.reporter.exits(f"{leaving.reason}: leaving before the job knew of this node")
            agent.close(ExitCode.LEFT)
            return ExitCode.LEFT
        agent.reporter.registered(me.incarnation, me.run)
        muted = MUTED if options.console.silent else ""
        log_line(
            f"this node is registered for job {options.job}; its logs are in "
            f"{options.log_dir}{muted}"
        )
        page = f"the status page of the job is at {page_address(me, scheme=scheme)}"
        if not options.open_status:
            where = shlex.join(["--job", options.job, "--etcd", ",".join(map(str, endpoints))])
            page += f" (elasticzero status --url {where} prints it with the token)"
        log_line(page)
        return agent.run()


def _at_host(options: AgentOptions, host: str) -> tuple[AgentOptions, str]:
    """Returns the options with workers that listen where other nodes reach this one, and the
    address that the others are to take.

    Raises `UserError` if that is not in the private network: the one place where a node is refused
    for it before it registers.
    """
    if options.private_network is None:
        return replace(options, launch=with_gloo_host(options.launch, host)), host
    launch, address = confined(options.launch, host, options.private_network)
    return replace(options, launch=launch), address


def _at_island(
    options: AgentOptions, shared: Store, endpoints: Sequence[str]
) -> tuple[AgentOptions, Reservation | None]:
    """Returns the options of a node that is of an island, and the reservation of its place there;
    None: it needs none.

    Args:
        options: Options of the node.
        shared: The part of etcd that all islands of the job share.
        endpoints: Endpoints of etcd, for messages.
    """
    policy, reserved = options.policy, None
    if options.island is None and policy.max_nodes > 1:
        take = partial(Reservation, shared, options.node, policy.max_nodes, int(policy.lease_ttl_s))
        reserved = _first_answer(take, options, endpoints)
        log_for_node(options.node, f"this node is of {reserved.island}")
    island = reserved.island if reserved else options.island or options.node
    return on_island(options, island), reserved


def _retry_store(
    call: Callable[[], T],
    options: AgentOptions,
    on_failure: Callable[[int, BaseException], None] | None = None,
) -> T:
    """Returns what `call` returns, repeated until --join-timeout while the store does not answer.

    Args:
        call: Requests something from the store.
        options: Options of the node, of which --join-timeout counts.
        on_failure: Called before each pause, with the number of failures so far and the last error.

    Raises:
        AccessRefused: Raised at once, for another try would be refused too.
        StoreUnavailable: The store did not answer in time.
    """
    return retry_call(
        call,
        replace(STORE_RETRY, timeout_s=options.policy.join_timeout_s),
        retryable=lambda error: (
            isinstance(error, StoreUnavailable) and not isinstance(error, AccessRefused)
        ),
        on_failure=on_failure,
    )


def _is_deserted(store: Store, options: AgentOptions, over: Condition) -> bool:
    """Waits a TTL for the nodes of a job that is over to be gone.

    Args:
        store: The job's part of etcd.
        options: Options of the node, of which the TTL of leases counts.
        over: Condition that holds as long as the end is the one that was read.

    Returns:
        False if another node has begun the job again meanwhile, else True.

    Raises:
        UserError: There still are nodes.
    """
    deadline_s = time.monotonic() + options.policy.lease_ttl_s + RESTART_REST_S
    while nodes := [e.key for e in store.read(MEMBERS).entries.values() if counts_as_node(e)]:
        done = store.read(DONE).entries.get(DONE)
        if done is None or done.mod_revision != over.mod_revision:
            return False
        if time.monotonic() > deadline_s:
            names = list_text((name.removeprefix(MEMBERS) for name in nodes), NAMES_SHOWN)
            raise UserError(
                f"job {options.job!r} still has nodes ({names}); --restart needs them gone first"
            )
        time.sleep(RESTART_REST_S)
    return True


def _join(membership: Membership, agent: Agent) -> PreemptionNotice | None:
    """Registers the node; returns the notice instead if the node is to leave before that."""

    def register() -> PreemptionNotice | None:
        if agent.notice is None:
            membership.join(partial(log_for_node, agent.options.node))
            return None
        return agent.notice

    return _retry_store(register, agent.options)


def _has_begun(store: Store) -> bool:
    """Returns whether the job has a world: then unwritable storage is no mistake of this node's
    user, and the job has claimed its checkpoint directory."""
    return WORLD in store.read(WORLD).entries


def _owner(job: str, run: int, store: EtcdStore, endpoints: Sequence[str]) -> OwnerRecord:
    """Returns what names a job in its checkpoint directory.

    Args:
        job: Name of the job.
        run: Number of its run.
        store: The job's part of etcd, which has answered.
        endpoints: Endpoints of etcd.
    """
    return OwnerRecord(
        job=job,
        run=run,
        cluster=store.cluster,
        etcd=tuple(endpoints),
        network=this_network(),
    )


def _claim_checkpoints(options: AgentOptions, endpoints: Sequence[str], access: Access) -> None:
    """Claims the checkpoint directory, if there is one; raises `UserError` if another job lives
    there.

    Args:
        options: Options of the node.
        endpoints: Endpoints of etcd, where the nodes of other jobs may be registered too.
        access: How etcd is reached.
    """
    if (url := options.training.checkpoint_dir) is None or options.owner is None:
        return

    def has_nodes(job: str) -> bool:
        try:
            with EtcdStore(endpoints, job_prefix(job), access=access) as store:
                return bool(store.read(MEMBERS, limit=1).entries)
        except StoreUnavailable:
            return True  # nothing is known of them

    # etcd may let a lease of nodes that are gone live on for a while, as for `Membership.join`.
    owner, limit_s = options.owner, 2 * options.policy.lease_ttl_s + 1.0
    log_line, place = partial(log_for_node, options.node), open_directory(url)
    within(
        SWEEP_S + limit_s,
        place.where,
        lambda: claim_directory(place, owner, has_nodes, log_line, limit_s),
    )


def _leave_early(*_: object) -> None:
    raise SystemExit(int(ExitCode.LEFT))


def _terminate(agent: Agent, number: int, frame: object) -> None:
    """Handles SIGTERM, or a signal that announces it: SIGKILL is expected when the grace is
    over.

    Args:
        agent: Agent of this node.
        number: Number of the signal.
        frame: Frame that the signal interrupted; not used.
    """
    grace_s, name = agent.options.grace_s, signal.Signals(number).name
    agent.leave(f"{name} ({grace_s:g} s of grace)", time.monotonic() + grace_s)


def _read_end(done: Entry, options: AgentOptions, *, restart: bool) -> Done | None:
    """Returns how the job has ended; None: that cannot be read, and the job begins again.

    Args:
        done: What the store holds at `done`.
        options: Options of the node.
        restart: Whether --restart was given.

    Raises:
        UserError: It cannot be read, and --restart was not given.
    """
    try:
        return document(Done, done.value)
    except RecordError as error:
        if restart:
            return None
        key = f"{job_prefix(options.job)}{DONE}"
        raise UserError(
            f"job {options.job!r} may be over: {key} in etcd cannot be read "
            f"({shown(str(error)):.200}), and no agent starts. If the job is not over, delete the "
            "key; --restart runs the job again, from its newest checkpoint"
        ) from None


def _first_answer(call: Callable[[], T], options: AgentOptions, endpoints: Sequence[str]) -> T:
    """Returns what the first request to etcd gives, repeated until --join-timeout.

    Args:
        call: Requests something from the store.
        options: Options of the node, of which --join-timeout counts.
        endpoints: Endpoints of etcd, for messages.

    Raises:
        AccessRefused: etcd refuses this node.
        StoreUnavailable: etcd did not answer in time.
    """
    names, timeout_s = ",".join(endpoints), options.policy.join_timeout_s
    deadline_s = time.monotonic() + timeout_s

    def report(failures: int, _: BaseException) -> None:
        if failures == 1:
            left_s = max(0.0, deadline_s - time.monotonic())
            why = unknown_host(endpoints)
            text = f"etcd at {names} does not answer; trying for {left_s:.0f} s more{why}"
            log_for_node(options.node, text)

    try:
        return _retry_store(call, options, report)
    except AccessRefused:
        raise
    except StoreUnavailable:
        raise StoreUnavailable(
            f"etcd at {names} did not answer within {timeout_s:g} s (--join-timeout)"
            f"{unknown_host(endpoints)}; check the "
            "address, and that etcd runs"
        ) from None


def _wait_for_store(
    store: Store, options: AgentOptions, endpoints: Sequence[str], *, restart: bool
) -> ExitCode | None:
    """Waits until etcd answers, and checks that the job is not over.

    Args:
        store: The job's part of etcd.
        options: Options of the node.
        endpoints: Endpoints of etcd, for messages.
        restart: Whether --restart was given, so that a job that is over runs again.

    Returns:
        The exit code if the launch that this node belongs to has ended (E7); None: the job goes on.

    Raises:
        StoreUnavailable: etcd did not answer within --join-timeout.
        UserError: The job is over, and may not run again.
    """
    done = _first_answer(lambda: store.read(DONE).entries.get(DONE), options, endpoints)
    if done is None:
        return None
    over = _read_end(done, options, restart=restart)
    if over is not None and over.launch_id and over.launch_id == options.launch_id:
        log_for_node(options.node, f"this node came after the end of the job: {over.reason}")
        return exit_code_of(over)
    if over is not None and not restart:
        how = {"stopped": "was stopped", "failed": "has failed", "finished": "is already done"}
        ended = how.get(over.outcome, "is over")
        raise UserError(
            f"job {options.job!r} {ended} ({over.reason}); add --restart to run it "
            "again, from its newest checkpoint, or take another --job"
        )
    same = Condition(key=DONE, mod_revision=done.mod_revision)
    if not _is_deserted(store, options, same):
        return _wait_for_store(store, options, endpoints, restart=restart)
    _retry_store(partial(begin_next_run, store, same), options)
    text = f"job {options.job}: was done, runs again from the newest checkpoint"
    log.info("%s", text, extra={"bare": True})
    return None
