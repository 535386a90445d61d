"""Runs the etcd that one node starts for all nodes of a run, as in torchrun's c10d and static
rendezvous."""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from elasticzero.errors import OperatorError, StoreUnavailable
from elasticzero.launcher.addresses import (
    EVERYWHERE,
    OUTSIDE,
    bound_socket,
    is_local,
    is_loopback,
    loopback,
    source_address,
)
from elasticzero.launcher.options.private_network import PrivateNetwork
from elasticzero.launcher.options.rendezvous import HostedEtcd
from elasticzero.launcher.store.api import Store
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.membership import reachable_address
from elasticzero.launcher.store.watch_cache import MEMBERS, WORLD, members_of
from elasticzero.launcher.workers.gloo_interface import has_address

LINGER_S = 30.0
"""Maximum seconds for which the node that runs the etcd waits for the others to read that the job
is over."""
LOOK_EVERY_S = 0.1


@contextmanager
def hosted(
    etcd: HostedEtcd, log_line: Callable[[str], None], network: PrivateNetwork | None = None
) -> Iterator[bool]:
    """Runs the etcd where this node is the one to start it; yields whether it does.

    Args:
        etcd: The etcd, and which node starts it.
        log_line: Prints a line for the user.
        network: Network outside of which it may not listen; None: it may anywhere.

    Raises:
        OperatorError: This node was told to start it and cannot.
        UserError: It would listen outside of the network.
    """
    address = listening_address(etcd.host)
    if etcd.starts_here and address is None:
        address = EVERYWHERE  # the name leads here by way of a service's address
    if address is None or etcd.starts_here is False:
        log_line(f"waiting for the etcd at {etcd.endpoint}, which that host starts")
        yield False
        return
    if _port_in_use(address, etcd.port):
        if etcd.starts_here:
            raise OperatorError(
                f"port {etcd.port} of {address} is taken, but this node is to start an etcd there: "
                "end the process that has it, or choose another port on all nodes"
            )
        yield from _use_existing(etcd, log_line)
        return
    if network is not None and not has_address(network, address):
        everywhere = "every address" if address == EVERYWHERE else address
        raise network.refusal(
            f"the etcd that this node starts for all would listen at {everywhere}",
            "name an address in it by --rdzv-endpoint or --master-addr, on every node",
        )
    with ExitStack() as stack:
        try:
            stack.enter_context(EtcdServer(address=address, port=etcd.port))
        except OperatorError:
            if etcd.starts_here or not _port_in_use(address, etcd.port):
                raise
            yield from _use_existing(etcd, log_line)  # which was a moment faster
            return
        log_line(
            f"this node started the job's etcd at {etcd.endpoint}: losing this host loses "
            "coordination; --etcd HOST:PORT names an etcd that outlives nodes"
        )
        yield True


def _use_existing(etcd: HostedEtcd, log_line: Callable[[str], None]) -> Iterator[bool]:
    log_line(
        f"port {etcd.port} of this machine is taken, probably by the job's etcd, which "
        "this node uses"
    )
    yield False


def listening_address(host: str) -> str | None:
    """Returns this machine's address that `host` means; None: it is another machine's, or
    unknown."""
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return host if is_local(host) else None
    if host == "localhost":
        return loopback()
    if host in (socket.gethostname(), socket.getfqdn()):
        return EVERYWHERE  # its own name may lead to a loopback address on this machine alone
    with suppress(OSError):
        places = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        for address in sorted((str(place[4][0]) for place in places), key=lambda a: ":" in a):
            if is_local(address):
                return EVERYWHERE if is_loopback(address) else address
    return None


def own_address(etcd: HostedEtcd) -> str:
    """Returns the address at which the other nodes reach this one, which starts the etcd."""
    near = reachable_address(etcd.endpoint)
    if etcd.host == "localhost" or is_loopback(etcd.host) or not is_loopback(near):
        return near
    return next(filter(None, map(source_address, OUTSIDE)), near)


def wait_for_others(store: Store) -> None:
    """Returns when no node is registered any more, or after LINGER_S.

    The nodes must read from this etcd that the job is over.
    """
    deadline_s = time.monotonic() + LINGER_S
    with suppress(StoreUnavailable):
        while members_of(store.read(MEMBERS)) and time.monotonic() < deadline_s:
            time.sleep(LOOK_EVERY_S)


def wait_for_lower_ranks(store: Store, node_rank: int, timeout_s: float) -> None:
    """Returns when `node_rank` nodes are registered, or the job has begun.

    Ranks follow the order in which nodes register, and with --node-rank they are to follow the
    numbers.

    Args:
        store: The job's part of etcd.
        node_rank: Number of this node from 0 on, and so the number of nodes before it.
        timeout_s: Maximum seconds to wait.

    Raises:
        OperatorError: The other nodes did not come in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with suppress(StoreUnavailable):
            count = len(members_of(store.read(MEMBERS)))
            if count >= node_rank or WORLD in store.read(WORLD).entries:
                return
        time.sleep(LOOK_EVERY_S)
    raise OperatorError(
        f"--node-rank {node_rank}: fewer than {node_rank} nodes with lower ranks came within "
        f"{timeout_s:g} s (--join-timeout)"
    )


def _port_in_use(address: str, port: int) -> bool:
    try:
        with bound_socket(address, port) as probe:
            probe.listen(1)
        return False
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return True
        raise OperatorError(
            f"no etcd can listen on port {port} of {address}: {error.strerror}; choose another"
        ) from None
