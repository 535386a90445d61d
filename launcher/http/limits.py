"""Limits what unauthenticated clients can do to an agent's HTTP server.

They get small heads, a short time for each request, few connections, and few lines in the log. A
page of another site gets nothing, though a browser inside the network has fetched it.
"""

from __future__ import annotations

import ipaddress
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

HEAD_BYTES = 16 << 10
"""Maximum bytes of a request's head; a connection that sends more is closed."""
HEAD_TIMEOUT_S = 10.0
"""Seconds after a request's first byte within which its head must be complete."""
IDLE_TIMEOUT_S = 30.0
"""Seconds without traffic after which a connection is closed."""
ANSWER_TIMEOUT_S = 30.0
"""Seconds within which a client without the token must have taken a whole response."""
MAX_CONNECTIONS = 256
"""Maximum number of open connections; an unauthenticated one is closed beyond it."""
GRACE_S = 0.02
"""Seconds that each connection has for its request before it may be closed for another one. Until
then further connections wait in the kernel."""
DESCRIPTORS_SHARE = 4
"""The connections take at most one in so many of the descriptors that this process may open."""
MIN_CONNECTIONS = 8
"""Maximum number of open connections where the process may open hardly any descriptors."""
LOG_INTERVAL_S = 60.0
"""Least number of seconds between two lines on refused requests."""
MAPPED = "::ffff:"
"""Beginning of an IPv4 address as a socket for both families has it."""
PRIVATE_ENDS = (".localhost", ".local", ".internal", ".home.arpa", ".svc")
"""Ends of names that the public DNS gives to nobody, so that no other site can have them."""
RESOLVER = Path("/etc/resolv.conf")


class RefusalLog:
    """Logs refused requests, at most one line for each `LOG_INTERVAL_S`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged_s = -LOG_INTERVAL_S
        self._unlogged = 0

    def add(self, peer: str, why: str) -> None:
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._logged_s < LOG_INTERVAL_S:
                self._unlogged += 1
                return
            unlogged = f"; {self._unlogged} more since the last such line" if self._unlogged else ""
            self._logged_s, self._unlogged = now_s, 0
        log.warning("refused an HTTP request of %s: %s%s", peer, why, unlogged)


def max_connections() -> int:
    """Returns the maximum number of open connections for this process's limit of descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(MIN_CONNECTIONS, limit // DESCRIPTORS_SHARE))


class Peer(Protocol):
    """Describes the other end of a connection."""

    address: str
    """IP address of the client."""


P = TypeVar("P", bound=Peer)


class Connections(Generic[P]):
    """Holds the open connections, oldest first, and chooses the one that is closed for a new one.

    That is an unauthenticated connection of the address that has most of them. So a flood from one
    address closes no connection of another one. Of that address's connections it is the oldest of
    those whose request is there, or of those whose request is not, whichever are more. So a flood
    of requests closes no connection whose request is still to come, and might show the token; and
    many silent connections close none that has sent its request.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[P, None] = {}
        self._strangers: dict[str, tuple[dict[P, None], dict[P, None]]] = {}
        """The unauthenticated connections by address, oldest first: those whose request is there,
        and those whose request is still to come."""

    def __iter__(self) -> Iterator[P]:
        return iter(list(self._open))

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_full(self) -> bool:
        """Returns whether a connection must be closed for the next one."""
        return len(self._open) >= self._most

    def __contains__(self, peer: object) -> bool:
        return peer in self._open

    def add(self, peer: P) -> P | None:
        """Adds a connection without the token; returns the one to close for it, which is removed
        and may be itself."""
        self._open[peer] = None
        self._add_stranger(peer, has_asked=False)
        if len(self._open) <= self._most:
            return None
        closed = self.oldest_stranger() or peer
        self.remove(closed)
        return closed

    def authenticate(self, peer: P) -> None:
        """Records that a connection has shown the token, and is not closed for others."""
        self._forget_stranger(peer)

    def note_request(self, peer: P, *, has_asked: bool) -> None:
        """Records whether a connection has sent a whole request that is not answered yet. Of an
        authenticated one that does not matter."""
        if any(peer in group for group in self._strangers.get(peer.address, ())):
            self._forget_stranger(peer)
            self._add_stranger(peer, has_asked=has_asked)

    def oldest_stranger(self) -> P | None:
        """Returns the unauthenticated connection to close first; None: all are authenticated."""
        if not self._strangers:
            return None
        groups = self._strangers.values()
        asked, silent = max(groups, key=lambda two: len(two[0]) + len(two[1]))
        return next(iter(asked if len(asked) >= len(silent) else silent))

    def remove(self, peer: P) -> None:
        self._open.pop(peer, None)
        self._forget_stranger(peer)

    def _add_stranger(self, peer: P, *, has_asked: bool) -> None:
        asked, silent = self._strangers.setdefault(peer.address, ({}, {}))
        (asked if has_asked else silent)[peer] = None

    def _forget_stranger(self, peer: P) -> None:
        groups = self._strangers.get(peer.address, ({}, {}))
        for group in groups:
            group.pop(peer, None)
        if not any(groups):
            self._strangers.pop(peer.address, None)


class HostNames:
    """Decides whether a request's `Host` is this server, or the name of another site.

    A page of another site reaches this server where that site's name is made to lead here (DNS
    rebinding). The browser then names that site as the host. An address, or a name that nobody
    outside can have in the DNS, is no such name.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Creates the set of names.

        Args:
            names: Names of this server, besides this machine's own.
        """
        self._names = {_lower(name) for name in (*names, socket.gethostname())}
        self._ends = (*PRIVATE_ENDS, *(f".{domain}" for domain in _search_domains()))

    def allow(self, host: str) -> bool:
        """Returns whether the value of a `Host` header is this server's."""
        name = _lower(_without_port(host.strip()))
        with suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return "." not in name or name in self._names or name.endswith(self._ends)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0]


def _lower(name: str) -> str:
    return name.lower().rstrip(".")


def _search_domains() -> list[str]:
    """Returns the domains in which this machine completes names; those of one label are left
    out."""
    domains: list[str] = []
    with suppress(OSError):
        for line in RESOLVER.read_text(errors="replace").splitlines():
            word, *names = line.split() or [""]
            if word in ("search", "domain"):
                domains += [_lower(name).lstrip(".") for name in names]
    return [domain for domain in domains if "." in domain]
