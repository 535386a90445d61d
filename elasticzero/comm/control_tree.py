"""Max-all-reduces a few numbers over the ranks of a generation, by a tree of TCP connections.

A rank sends one message up the tree and receives one. Gloo's all_reduce is a ring, 2 (N-1) messages
a rank; on cores that training keeps busy, its threads cost more than all else between two steps
(benchmarks/results/recovery.md). A rank with others below it relays messages in a thread, so that
no rank waits for one that still computes. A rank with none below needs no thread.

A broken connection (a process died, or `ProcessGroups.shut` was called) is an error on every rank
from then on, at the latest when the rank waits for a result. There is no time limit here: the
agents decide whether a rank is late or hangs, and then have the groups shut.

Two ranks that connect prove to each other that they are these ranks of this generation:
 1. The rank above sends a nonce as soon as it has accepted the connection.
 2. The rank below sends a nonce of its own, its rank, and a proof over both nonces, both ranks and
    the token of the generation.
 3. The rank above sends another proof over the same, and the connection is part of the tree.
A proof that was read on the network is of no use on another connection. Where a rank may be of the
release before, the rank below sends a hash of the generation's token and the secret instead, and
its rank, and nothing else is sent. In a job with TLS the proven connection is encrypted then.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import Literal

import torch.distributed as dist

from elasticzero.comm.barriers import LEAST
from elasticzero.comm.rendezvous import RankInfo
from elasticzero.comm.tls_stream import Stream, TlsStream
from elasticzero.security.certificates import contexts_of
from elasticzero.security.proofs import proof
from elasticzero.torch_internals.groups import PrefixStore, Store

ARITY = 16
"""Maximum number of ranks directly below one rank; 6,400 ranks make four levels."""
WIDTH = 15
"""Count of numbers in a message."""
SHARE = 0.5
"""Share of the time limit for connecting that the tree may take; the process group has the rest."""
UNAUTHENTICATED = -1
MAX_UNAUTHENTICATED = 64
"""Maximum number of unauthenticated connections; the oldest is closed beyond it."""

_Numbers = tuple[int, ...]
_MESSAGE = struct.Struct(f"!{WIDTH}q")
_HELLO = struct.Struct("!32sI")
"""Packs what a rank of the release before sends: its hash, and its rank."""
_NONCE_BYTES = _PROOF_BYTES = 32
_SIGNED_HELLO = struct.Struct(f"!{_NONCE_BYTES}s{_PROOF_BYTES}sI")
"""Packs what the rank below sends: its nonce, its proof, and its rank."""


def relatives(rank: int, world_size: int) -> tuple[int | None, range]:
    """Returns (the rank above this one or None for the root, the ranks below it) in the tree.
    Pure."""
    above = (rank - 1) // ARITY if rank else None
    first = rank * ARITY + 1
    return above, range(min(first, world_size), min(first + ARITY, world_size))


class MaxTree:
    """Connects one rank to the tree. Every rank submits and collects equally often, in one
    thread."""

    def __init__(self, up: Stream | None, down: Sequence[Stream]) -> None:
        self._up = up
        self._down = tuple(down)
        self._submitted: queue.SimpleQueue[_Numbers | None] = queue.SimpleQueue()
        self._received: queue.SimpleQueue[_Numbers | OSError] = queue.SimpleQueue()
        self._outstanding = 0
        """Number of messages that were submitted and whose results were not received."""
        self._collected_early: deque[_Numbers] = deque()
        """Results that were received before they were collected."""
        self._thread: threading.Thread | None = None
        if down:
            thread = threading.Thread(target=self._relay, name="elasticzero-agree", daemon=True)
            thread.start()
            self._thread = thread

    def submit(self, numbers: Sequence[int]) -> None:
        """Submits this rank's numbers, up to `WIDTH` of 64 bits each; does not wait for other
        ranks."""
        padded = (*numbers, *[LEAST] * (WIDTH - len(numbers)))
        message = _MESSAGE.pack(*padded)
        self._outstanding += 1
        if self._thread is not None or self._up is None:
            self._submitted.put(padded)
            return
        try:
            _send(self._up, message)
        except OSError as error:
            raise _broken(error) from None

    def collect(self) -> _Numbers:
        """Waits for all ranks and returns the maximum of each number, for the oldest uncollected
        submission.

        Raises `DistNetworkError` if a connection is broken.
        """
        return self._collected_early.popleft() if self._collected_early else self._next()

    def allreduce_max(self, number: int) -> int:
        """Returns the maximum of the ranks' numbers; earlier submissions can still be collected
        after it."""
        return self.allreduce_maxima([number])[0]

    def allreduce_maxima(self, numbers: Sequence[int]) -> _Numbers:
        """Returns the maximum of each of several numbers, as `allreduce_max` does."""
        self.submit(numbers)
        while self._outstanding > 1:
            self._collected_early.append(self._next())
        return self._next()

    def _next(self) -> _Numbers:
        self._outstanding -= 1
        if self._thread is not None:
            maxima = self._received.get()
            if isinstance(maxima, OSError):
                self._received.put(maxima)  # the error is permanent
                raise _broken(maxima)
            return maxima
        if self._up is None:
            return self._submitted.get() or ()
        try:
            return _receive(self._up)
        except OSError as error:
            raise _broken(error) from None

    def shut(self) -> None:
        """Breaks the connections, in any state; any thread may call it."""
        for connection in self._connections():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connections and joins the thread."""
        self._submitted.put(None)
        self.shut()
        if self._thread is not None:
            self._thread.join()
        for connection in self._connections():
            connection.close()

    def _relay(self) -> None:
        """Sends the maximum of the numbers from this rank and those below up, and the result
        down."""
        try:
            while True:
                below = list(self._from_below())
                numbers = self._submitted.get()
                if numbers is None:
                    raise ConnectionAbortedError("closed")
                most: _Numbers = tuple(map(max, numbers, *below))
                if self._up is not None:
                    _send(self._up, _MESSAGE.pack(*most))
                    most = _receive(self._up)
                message = _MESSAGE.pack(*most)
                for connection in self._down:
                    _send(connection, message)
                # Last, because the process may end as soon as the main thread has it.
                self._received.put(most)
        except Exception as error:  # noqa: BLE001 - the top of a thread: whoever takes has it
            self.shut()
            self._received.put(error if isinstance(error, OSError) else OSError(str(error)))

    def _from_below(self) -> Iterator[_Numbers]:
        """Yields one message of each rank below, in the order of arrival."""
        missing = {connection.fileno(): connection for connection in self._down}
        ready = select.poll()
        for fd in missing:
            ready.register(fd, select.POLLIN)
        while missing:
            for fd, _ in ready.poll():
                ready.unregister(fd)
                yield _receive(missing.pop(fd))

    def _connections(self) -> Iterable[Stream]:
        return self._down if self._up is None else (self._up, *self._down)


def _send(connection: Stream, message: bytes) -> None:
    """Sends a message; a closed connection is an error, whatever the script does with SIGPIPE."""
    connection.sendall(message, socket.MSG_NOSIGNAL)


def _receive(connection: Stream) -> _Numbers:
    return _MESSAGE.unpack(_read(connection, _MESSAGE.size))


def _read_until(connection: socket.socket, size: int, deadline_s: float) -> bytes:
    """Returns the next bytes of a connection.

    Args:
        connection: The connection.
        size: Number of bytes.
        deadline_s: End of the wait, by the monotonic clock.

    Raises:
        OSError: The connection is broken, or the bytes did not come in time.
    """
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        data += _read_part(connection, size - len(data))
    return data


def _read(connection: Stream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += _read_part(connection, size - len(data))
    return data


def _read_part(connection: Stream, size: int) -> bytes:
    part = connection.recv(size)
    if not part:
        raise ConnectionResetError("the other end was closed")
    return part


def _broken(error: OSError) -> dist.DistNetworkError:
    return dist.DistNetworkError(f"the ranks could not agree: {error}")


def join(info: RankInfo, store: Store) -> MaxTree:
    """Connects to the rank above and to those below; every rank at the rendezvous calls it.

    Args:
        info: This rank's place, and the time limit, of which a share counts here.
        store: The store of the rendezvous, where ranks leave their addresses.

    Returns:
        The connected tree.

    Raises:
        DistNetworkError: A rank is not reached, or does not connect, within half of
            `info.connect_timeout_s`.
    """
    above, below = relatives(info.rank, info.world_size)
    limit_s = info.connect_timeout_s * SHARE
    tree = PrefixStore(f"{info.token}/tree", store)
    with ExitStack() as listening, ExitStack() as connections:
        if below:
            listener = listening.enter_context(_listen(info.host, len(below) + MAX_UNAUTHENTICATED))
            tree.set(str(info.rank), f"{info.host} {listener.getsockname()[1]}")
        up = None
        if above is not None:
            up = _connect(info, above, tree.get(str(above)).decode(), limit_s)
            connections.callback(up.close)
        down: list[Stream] = []
        if below:
            for connection in _accept(info, listener, set(below), limit_s):
                connections.callback(connection.close)
                down.append(connection)
        connections.pop_all()  # the connections stay open
    return MaxTree(up, down)


def _listen(host: str, backlog: int) -> socket.socket:
    """Returns a socket that listens at `host` alone, if that is an address of this machine; at
    every address, if it is a name or an address that a router translates."""
    with suppress(OSError, ValueError):
        version = ipaddress.ip_address(host).version
        family = socket.AF_INET6 if version == 6 else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=backlog)
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
        return socket.create_server(("", 0), backlog=backlog)
    except OSError as error:
        raise _broken(error) from None


def _connect(info: RankInfo, above: int, address: str, limit_s: float) -> Stream:
    host, port = address.split()
    deadline_s = time.monotonic() + limit_s
    try:
        with ExitStack() as opened:
            up = opened.enter_context(socket.create_connection((host, int(port)), limit_s))
            up.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _introduce(info, above, up, deadline_s)
            up.settimeout(None)
            stream = _secured(info, up, deadline_s, server_side=False)
            opened.pop_all()  # the connection stays open
    except OSError as error:
        raise dist.DistNetworkError(
            f"rank {above} is not reached at {host}:{port}: {error}; if {host} is not its node, "
            "give that one --host"
        ) from None
    return stream


def _secured(
    info: RankInfo, connection: socket.socket, deadline_s: float, *, server_side: bool
) -> Stream:
    """Returns the connection to a rank that has proven itself, encrypted in a job with TLS.

    Args:
        info: This rank's place, and its certificate.
        connection: The connection, which has no time limit.
        deadline_s: Time by which TLS must be set up, by the monotonic clock.
        server_side: Whether the other rank has connected to this one.

    Raises:
        OSError: The other rank has no certificate of the job, or did not answer in time.
    """
    if info.tls is None or not info.proofs:
        return connection
    contexts = contexts_of(info.tls)
    context = contexts.server if server_side else contexts.client
    stream = TlsStream(connection, context, server_side=server_side)
    stream.set_up(deadline_s)
    return stream


def _introduce(info: RankInfo, above: int, up: socket.socket, deadline_s: float) -> None:
    """Proves to the rank above which rank this is, and has it prove the same.

    Args:
        info: This rank's place.
        above: The rank above.
        up: The new connection to it.
        deadline_s: Time by which that must be done, by the monotonic clock.

    Raises:
        OSError: The other end is not the rank above, or the connection is broken.
    """
    if not info.proofs:
        _send(up, _HELLO.pack(_digest(info), info.rank))
        return
    nonces = (_read_until(up, _NONCE_BYTES, deadline_s), secrets.token_bytes(_NONCE_BYTES))
    proven = _proof(info, "below", (info.rank, above), nonces)
    _send(up, _SIGNED_HELLO.pack(nonces[1], proven, info.rank))
    expected = _proof(info, "above", (info.rank, above), nonces)
    if not hmac.compare_digest(_read_until(up, _PROOF_BYTES, deadline_s), expected):
        raise ConnectionAbortedError("the process there does not prove that it is this rank")


def _accept(
    info: RankInfo, listener: socket.socket, missing: set[int], limit_s: float
) -> Iterator[Stream]:
    """Yields the connection of each of these ranks once it has authenticated itself.

    Any other connection is closed, and one that sends nothing delays no rank.

    Args:
        info: This rank's place, and the password by which connections prove that they belong.
        listener: The socket at which the ranks below connect.
        missing: The ranks that are waited for; a rank is removed once it has connected.
        limit_s: Seconds within which all of them must have connected.

    Raises:
        DistNetworkError: A rank did not connect in time, or TLS with it could not be set up.
    """
    deadline_s = time.monotonic() + limit_s
    with closing(_Handshake(listener, info)) as handshake:
        while missing:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                names = ", ".join(map(str, sorted(missing)))
                raise dist.DistNetworkError(f"rank {names} did not connect in {limit_s:g} s")
            for rank, connection in handshake.poll(left_s):
                if rank not in missing:
                    connection.close()
                    continue
                missing.remove(rank)
                connection.setblocking(True)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    yield _secured(info, connection, deadline_s, server_side=True)
                except OSError as error:
                    connection.close()
                    raise dist.DistNetworkError(f"no TLS with rank {rank}: {error}") from None


@dataclass(frozen=True, slots=True)
class _Stranger:
    """Holds a connection that has not authenticated itself yet."""

    connection: socket.socket
    nonce: bytes
    """Nonce that was sent to it."""
    data: bytearray = field(default_factory=bytearray)
    """Received part of its hello."""


class _Handshake:
    """Holds the connections that have not authenticated themselves as a rank of this generation."""

    def __init__(self, listener: socket.socket, info: RankInfo) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._info = info
        self._hello_bytes = _SIGNED_HELLO.size if info.proofs else _HELLO.size
        self._unknown: dict[int, _Stranger] = {}
        """The connections by descriptor, in the order of arrival."""
        self._ready = select.poll()
        self._ready.register(listener, select.POLLIN)

    def poll(self, limit_s: float) -> Iterator[tuple[int, socket.socket]]:
        """Returns the connections with a complete hello, each with its rank or UNAUTHENTICATED."""
        for fd, _ in self._ready.poll(limit_s * 1000):
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._unknown and (rank := self._hello(self._unknown[fd])) is not None:
                yield rank, self._forget(fd)

    def _accept(self) -> None:
        if len(self._unknown) >= MAX_UNAUTHENTICATED:
            self._forget(next(iter(self._unknown))).close()
        with suppress(OSError):  # the client has closed it again
            connection = self._listener.accept()[0]
            connection.setblocking(False)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            self._unknown[connection.fileno()] = _Stranger(connection, nonce)
            self._ready.register(connection, select.POLLIN)
            if self._info.proofs:
                connection.send(nonce, socket.MSG_NOSIGNAL)

    def _forget(self, fd: int) -> socket.socket:
        self._ready.unregister(fd)
        return self._unknown.pop(fd).connection

    def _hello(self, stranger: _Stranger) -> int | None:
        """Returns the rank in a hello, UNAUTHENTICATED, or None if the hello is incomplete."""
        data = stranger.data
        try:
            part = stranger.connection.recv(self._hello_bytes - len(data))
        except BlockingIOError:
            return None
        except OSError:
            return UNAUTHENTICATED
        data += part
        if not part:
            return UNAUTHENTICATED
        if len(data) < self._hello_bytes:
            return None
        return self._check_proof(stranger) if self._info.proofs else self._check_digest(stranger)

    def _check_proof(self, stranger: _Stranger) -> int:
        """Returns the rank that a whole hello proves, or UNAUTHENTICATED; answers the rank with the
        proof of this one."""
        nonce, shown, rank = _SIGNED_HELLO.unpack(stranger.data)
        ranks, nonces = (rank, self._info.rank), (stranger.nonce, nonce)
        if not hmac.compare_digest(shown, _proof(self._info, "below", ranks, nonces)):
            return UNAUTHENTICATED
        with suppress(OSError):
            answer = _proof(self._info, "above", ranks, nonces)
            stranger.connection.send(answer, socket.MSG_NOSIGNAL)
            return int(rank)
        return UNAUTHENTICATED

    def _check_digest(self, stranger: _Stranger) -> int:
        """Returns the rank in a whole hello as the release before sends it, or UNAUTHENTICATED."""
        digest, rank = _HELLO.unpack(stranger.data)
        is_right = hmac.compare_digest(digest, _digest(self._info))
        return int(rank) if is_right else UNAUTHENTICATED

    def close(self) -> None:
        for stranger in self._unknown.values():
            stranger.connection.close()


def _proof(
    info: RankInfo,
    place: Literal["above", "below"],
    ranks: tuple[int, int],
    nonces: tuple[bytes, bytes],
) -> bytes:
    """Returns the proof of one of the two ranks of a connection.

    Args:
        info: Place of a rank in the generation, and the secret of the run.
        place: Which of the two ranks proves itself.
        ranks: The rank below and the rank above.
        nonces: The nonces of the rank above and of the rank below.
    """
    below, above = map(str, ranks)
    return proof(info.password, f"tree, {place}", info.token, below, above, *nonces)


def _digest(info: RankInfo) -> bytes:
    """Returns the hash by which a rank of the release before shows that it belongs to the
    generation."""
    return hashlib.sha256(f"{info.token} {info.password}".encode()).digest()
