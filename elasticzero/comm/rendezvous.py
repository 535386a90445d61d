"""Waits for all ranks of a generation at rank 0's store before their process group is set up.

The store is ours, and takes those alone who prove that they belong to the generation; or it is
torch's, while nodes of the release before are in the world, which know no other.

Scripts do not start equally fast: one node imports from a cold disk, and another node's process was
kept from the generation before. The ranks that have come wait for the rest for
`RankInfo.start_timeout_s`. The time to set the process group up counts from when all have come.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from typing import TypeVar

from torch.distributed import DistNetworkError, DistStoreError

from elasticzero.comm.store import client
from elasticzero.comm.store.client import RankStore
from elasticzero.comm.store.server import StoreServer
from elasticzero.comm.store.wire import generation_secret
from elasticzero.errors import RetryError
from elasticzero.ipc.assignment import Assignment
from elasticzero.security.certificates import Credentials
from elasticzero.text import list_text
from elasticzero.torch_internals.groups import PrefixStore, TorchStore

log = logging.getLogger(__name__)

RETRY_S, RETRY_MAX_S = 0.02, 0.5
POLL_MAX_S = 0.2
PROBE_S = 2.0
"""Time limit of one try to reach rank 0's host, in seconds."""
REPORT_AFTER_S = 10.0
"""Time in seconds after which a waiting rank reports the ranks that it waits for."""
RANKS_SHOWN = 16
REACHING = "reaching rank 0's store"

T = TypeVar("T")
ClosableStore = RankStore | TorchStore
Allow = Callable[[float, str], None]
"""Sets the time limit, in seconds, of the next step, which it is told, in place of the limit before
it. torch's store can block far past its own timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Holds this process's rank in its world, and the addresses at which the ranks meet."""

    rank: int
    world_size: int
    local_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 0
    store_fd: int | None = None
    """On rank 0, an inherited socket bound to `master_port`, not yet listening."""
    token: str = ""
    """Token of the generation."""
    password: str = field(default="", repr=False)
    """Secret of the job's run, by which a process proves that it belongs to it."""
    proofs: bool = True
    """True if ranks prove to each other that they have it; False: some may be of the release
    before, which do so by a hash."""
    tls: Credentials | None = field(default=None, repr=False)
    """Certificate with which the store and the control tree are encrypted; None: they are not."""
    host: str = "127.0.0.1"
    """Address at which other ranks reach this one."""
    connect_timeout_s: float = 30.0
    """Time limit in seconds for work that needs no other rank's script: reaching rank 0's host, and
    setting up the process group of ranks that have registered."""
    start_timeout_s: float = 300.0
    """Time limit in seconds for every rank's script to register, counted from this rank's call."""
    collective_timeout_s: float = 600.0

    @classmethod
    def from_assignment(cls, assignment: Assignment) -> RankInfo:
        """Returns what an agent's assignment says about its worker's rank and addresses."""
        shared = {f.name: getattr(assignment, f.name) for f in fields(cls)}
        return cls(**{**shared, "local_rank": assignment.node_place.visible_local_rank})


def rendezvous(
    info: RankInfo,
    allow: Allow = lambda limit_s, doing: None,
    reached: Callable[[ClosableStore], None] = lambda store: None,
) -> ClosableStore:
    """Connects to rank 0's store, and returns it once every rank has registered there.

    A peer that goes away later is an error of torch's own.

    Args:
        info: This rank's place, the addresses at which ranks meet, and the time limits.
        allow: Sets the time limit of the step that follows; by default nothing limits it.
        reached: Is called with the store before this waits for other ranks. Another thread that
            closes it then ends the wait.

    Raises:
        RetryError: Rank 0's host is not reached within `info.connect_timeout_s`, or a rank has not
            come within `info.start_timeout_s`.
    """
    deadline_s = time.monotonic() + info.start_timeout_s
    store = _store(info, allow, deadline_s)
    try:
        reached(store)
        left_s = max(0.0, deadline_s - time.monotonic())
        allow(left_s + info.connect_timeout_s, "waiting for the other ranks")
        arrivals = PrefixStore(f"{info.token}/here", store)
        arrivals.set(str(info.rank), "1")
        if arrivals.add("count", 1) == info.world_size:
            arrivals.set("all", "1")
        elif info.rank == 0:
            _poll_for_all(info, arrivals, deadline_s)
        else:
            _wait_for_all(info, arrivals, deadline_s)
        allow(info.connect_timeout_s, "connecting the process group of ranks that have all come")
    except BaseException:
        store.close()
        raise
    return store


def _store(info: RankInfo, allow: Allow, deadline_s: float) -> ClosableStore:
    """Returns the store, on rank 0 once it listens and on others once they have reached it.

    Args:
        info: This rank's place.
        allow: Sets the time limit of the step that follows.
        deadline_s: The end of the wait for rank 0's script, by the monotonic clock.

    Raises:
        RetryError: Rank 0's host is not reached in time.
        DistNetworkError: Rank 0 cannot listen.
    """
    if info.store_fd is not None:
        allow(info.start_timeout_s, "opening rank 0's store")  # so long the others wait for it
        return _server(info) if info.proofs else _torch_server(info)
    allow(info.start_timeout_s + info.connect_timeout_s, REACHING)
    if not info.proofs:
        _try_until_reached(info, deadline_s, partial(_probe, info))
        allow(info.connect_timeout_s, REACHING)
        return _torch_client(info)
    channel = _try_until_reached(info, deadline_s, partial(_connect, info))
    if info.tls is not None:
        _encrypt(info, channel, info.tls)
    return RankStore(channel, info.connect_timeout_s)


def _encrypt(info: RankInfo, channel: client.Channel, tls: Credentials) -> None:
    """Encrypts the connection to rank 0, which has proved itself by then.

    It is not tried again, for that would cost rank 0 another handshake: where many ranks come at
    once, each waits for those before it.

    Args:
        info: This rank's place, and the time limit.
        channel: The connection, which is closed where this fails.
        tls: Certificate of this rank's node.

    Raises:
        RetryError: Rank 0 shows no certificate of the job, is lost, or is late.
    """
    with ExitStack() as opened:
        opened.callback(channel.close)
        try:
            channel.encrypt(tls, info.connect_timeout_s)
        except OSError as error:
            place = f"rank 0 at {info.master_address}:{info.master_port}"
            raise RetryError(f"no TLS with {place}: {error}") from None
        opened.pop_all()  # the connection stays open


def _torch_client(info: RankInfo) -> TorchStore:
    timeout = timedelta(seconds=info.connect_timeout_s)
    address, port, size = info.master_address, info.master_port, info.world_size
    return TorchStore(address, port, size, timeout=timeout, wait_for_workers=False)


def _torch_server(info: RankInfo) -> TorchStore:
    return TorchStore(
        info.master_address,
        info.master_port,
        info.world_size,
        is_master=True,
        timeout=timedelta(seconds=info.connect_timeout_s),
        wait_for_workers=False,
        master_listen_fd=info.store_fd,
        use_libuv=True,
    )


def _server(info: RankInfo) -> RankStore:
    """Returns the store of rank 0, which closes its server."""
    secret = generation_secret(info.token, info.password)
    listener = socket.socket(fileno=info.store_fd)
    try:
        server = StoreServer(listener, info.world_size, secret, info.tls)
    except OSError as error:
        listener.close()
        raise DistNetworkError(f"rank 0 cannot listen at its port: {error}") from None
    return RankStore(client.Channel(server.local), info.connect_timeout_s, server.close)


def _try_until_reached(info: RankInfo, deadline_s: float, reach: Callable[[float], T]) -> T:
    """Returns what `reach` returns, once rank 0's store listens.

    A host that refuses the connection runs, and rank 0's script may still be starting. A store that
    takes the connection and does not answer is in a process that lives, and has no time yet.

    Args:
        info: This rank's place, and the time limits.
        deadline_s: The end of the wait for rank 0's script, by the monotonic clock.
        reach: Tries once, within so many seconds for each address; raises `OSError` if that fails.

    Raises:
        RetryError: Rank 0 is not reached in time.
    """
    host, port = info.master_address, info.master_port
    began_s = seen_s = time.monotonic()
    reported = False
    while True:
        left_s = seen_s + info.connect_timeout_s - time.monotonic()
        try:
            return reach(max(0.05, min(PROBE_S, left_s)))
        except (OSError, ExceptionGroup) as error:
            problem = _of_any_address(error)
        now_s = time.monotonic()
        if isinstance(problem, (ConnectionRefusedError, client.Unanswered)):
            seen_s = now_s
        waited_s = now_s - began_s
        pause_s = max(RETRY_S, min(RETRY_MAX_S, waited_s / 10))
        if now_s + pause_s >= min(seen_s + info.connect_timeout_s, deadline_s):
            raise RetryError(f"rank 0 at {host}:{port} was not reached in time: {problem}")
        if waited_s >= REPORT_AFTER_S and not reported:
            reported = True
            log.info(
                f"rank 0 at {host}:{port} was not reached for {waited_s:.0f} s ({problem}); its "
                f"script may still be starting; if {host} is not its node, give that one --host"
            )
        time.sleep(pause_s)


def _connect(info: RankInfo, limit_s: float) -> client.Channel:
    secret = generation_secret(info.token, info.password)
    address = info.master_address, info.master_port
    return client.connect(address, info.rank, secret, limit_s)


def _probe(info: RankInfo, limit_s: float) -> None:
    """Connects once, and closes the connection: a dead or silent host would block torch's store."""
    address = info.master_address, info.master_port
    socket.create_connection(address, limit_s, all_errors=True).close()


def _of_any_address(error: OSError | ExceptionGroup) -> Exception:
    """Returns the error of a host's only address; where several addresses fail, one that shows
    that the host runs counts."""
    if not isinstance(error, ExceptionGroup):
        return error
    runs = (client.Unanswered, ConnectionRefusedError)
    return min(error.exceptions, key=lambda e: not isinstance(e, runs))


def _wait_for_all(info: RankInfo, arrivals: PrefixStore, deadline_s: float) -> None:
    """Waits for the other ranks with one call, because torch prints a warning for each wait that
    times out.

    Args:
        info: This rank's place, for the message.
        arrivals: The keys of the ranks that have come.
        deadline_s: The end of the wait, by the monotonic clock.

    Raises:
        RetryError: A rank has not come by then.
    """
    try:
        left_s = max(0.01, deadline_s - time.monotonic())
        arrivals.wait(["all"], timedelta(seconds=left_s))
    except DistStoreError:
        raise RetryError(
            f"only {arrivals.add('count', 0)} of {info.world_size} ranks called elasticzero.run() "
            f"within {info.start_timeout_s:g} s; the log of rank 0 names the others"
        ) from None


def _poll_for_all(info: RankInfo, arrivals: PrefixStore, deadline_s: float) -> None:
    """Waits for the other ranks on rank 0, which polls its own store and names the missing
    ranks.

    Args:
        info: This rank's place, for the message.
        arrivals: The keys of the ranks that have come.
        deadline_s: The end of the wait, by the monotonic clock.

    Raises:
        RetryError: A rank has not come by then; the message names all such ranks.
    """
    began_s = time.monotonic()
    report_after_s, reported = REPORT_AFTER_S, ""
    while not arrivals.check(["all"]):
        now_s = time.monotonic()
        waited_s = now_s - began_s
        if now_s >= deadline_s or waited_s >= report_after_s:
            report_after_s *= 2
            missing = [r for r in range(info.world_size) if not arrivals.check([str(r)])]
            names = list_text(missing, RANKS_SHOWN)
            if now_s >= deadline_s:
                limit = f"{info.start_timeout_s:g} s"
                raise RetryError(f"rank {names} did not call elasticzero.run() within {limit}")
            if missing and names != reported:
                reported = names
                log.info("waiting for rank %s to call elasticzero.run() (%.0f s)", names, waited_s)
        time.sleep(max(0.001, min(POLL_MAX_S, waited_s / 20)))
