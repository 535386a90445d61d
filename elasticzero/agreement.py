"""How the ranks of a generation agree on a few numbers: the greatest that any of them gives, by a
tree of TCP connections.

A rank sends one message up and gets one down. Gloo's all_reduce is a ring, 2 (N-1) messages a rank,
and on cores that training fills its threads cost more than all else between two steps
(docs/performance.md). A rank with others below it passes messages on in a thread, so that nobody
waits for one that computes; a rank without needs none.

What breaks a connection (a death, `Groups.shut`) is an error for every rank, at the latest when it
waits for what was agreed.
"""

from __future__ import annotations

import hashlib
import hmac
import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from elasticzero.meeting import Place

ARITY = 16
"""So many ranks are below one at most: 6,400 ranks are four levels."""
WIDTH = 9
"""Numbers in a message."""
LEAST = -(1 << 63)
"""Says nothing: any number is greater."""
HELLO_S = 2.0
"""Who connects and does not say at once who it is, is a stranger."""

_Numbers = tuple[int, ...]
_MESSAGE = struct.Struct(f"!{WIDTH}q")
_HELLO = struct.Struct("!32sI")


def relatives(rank: int, world_size: int) -> tuple[int | None, range]:
    """Who is above this rank in the tree (None: nobody, it is the top), and who below. Pure."""
    above = (rank - 1) // ARITY if rank else None
    first = rank * ARITY + 1
    return above, range(min(first, world_size), min(first + ARITY, world_size))


class Agreement:
    """One rank's part in the tree. Every rank gives and takes equally often, in one thread."""

    def __init__(self, up: socket.socket | None, down: Sequence[socket.socket], timeout_s: float):
        self._up = up
        self._down = tuple(down)
        self._timeout_s = timeout_s
        self._given: queue.SimpleQueue[_Numbers | None] = queue.SimpleQueue()
        self._taken: queue.SimpleQueue[_Numbers | OSError] = queue.SimpleQueue()
        self._open = 0
        """Given, and not received."""
        self._early: deque[_Numbers] = deque()
        """Received before it was asked for."""
        self._thread: threading.Thread | None = None
        if down:
            thread = threading.Thread(target=self._pass_on, name="elasticzero-agree", daemon=True)
            thread.start()
            self._thread = thread
        elif up is not None:
            up.settimeout(timeout_s)

    def give(self, numbers: Sequence[int]) -> None:
        """This rank's numbers, `WIDTH` of them at most; does not wait for other ranks."""
        own = (*numbers, *[LEAST] * (WIDTH - len(numbers)))
        self._open += 1
        if self._thread is not None or self._up is None:
            self._given.put(own)
            return
        try:
            self._up.sendall(_MESSAGE.pack(*own))
        except OSError as error:
            raise _broken(error) from None

    def take(self) -> _Numbers:
        """Of each number the greatest that the ranks gave, of what was given first and is not taken
        yet; waits for all of them.

        Raises `DistNetworkError` when a connection is broken, or a rank gives nothing for too long.
        """
        return self._early.popleft() if self._early else self._next()

    def greatest(self, number: int) -> int:
        """The greatest of the numbers that the ranks give; what they gave before can be taken
        after it."""
        self.give([number])
        while self._open > 1:
            self._early.append(self._next())
        return self._next()[0]

    def _next(self) -> _Numbers:
        self._open -= 1
        if self._thread is not None:
            try:
                found = self._taken.get(timeout=self._timeout_s)
            except queue.Empty:
                found = TimeoutError("timed out")
        elif self._up is None:
            found = self._given.get() or ()
        else:
            try:
                found = _receive(self._up)
            except OSError as error:
                found = error
        if isinstance(found, OSError):
            raise _broken(found)
        return found

    def close(self) -> None:
        """Nothing runs on it any more when this returns."""
        self._given.put(None)
        self._break()
        if self._thread is not None:
            self._thread.join()
        for connection in self._connections():
            connection.close()

    def _pass_on(self) -> None:
        """What comes from below and this rank's own goes up, what comes from above down."""
        try:
            while True:
                below = [_receive(connection) for connection in self._down]
                own = self._given.get()
                if own is None:
                    return
                most: _Numbers = tuple(map(max, own, *below))
                if self._up is not None:
                    self._up.sendall(_MESSAGE.pack(*most))
                    most = _receive(self._up)
                message = _MESSAGE.pack(*most)
                for connection in self._down:
                    connection.sendall(message)
                self._taken.put(most)  # last: this process may end when it has it
        except OSError as error:
            self._break()
            self._taken.put(error)

    def _break(self) -> None:
        for connection in self._connections():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _connections(self) -> Iterable[socket.socket]:
        return self._down if self._up is None else (self._up, *self._down)


def _receive(connection: socket.socket) -> _Numbers:
    data = connection.recv(_MESSAGE.size, socket.MSG_WAITALL)
    while len(data) < _MESSAGE.size:
        more = connection.recv(_MESSAGE.size - len(data))
        if not more:
            raise ConnectionResetError("the other end was closed")
        data += more
    return _MESSAGE.unpack(data)


def _broken(error: OSError) -> dist.DistNetworkError:
    return dist.DistNetworkError(f"the ranks could not agree: {error}")


def join(place: Place, store: Store) -> Agreement:
    """Connect to the rank above and to those below; all that have met at this store call it.

    Raises `DistNetworkError` when one of them is not reached, or does not come, within
    `place.connect_timeout_s`.
    """
    above, below = relatives(place.rank, place.world_size)
    tree = PrefixStore(f"{place.token}/tree", store)
    with ExitStack() as listening, ExitStack() as connections:
        if below:
            listener = listening.enter_context(_listen(len(below)))
            tree.set(str(place.rank), f"{place.host} {listener.getsockname()[1]}")
        up = None if above is None else _connect(place, above, tree.get(str(above)).decode())
        if up is not None:
            connections.enter_context(up)
        down = _accept(place, listener, set(below), connections) if below else []
        connections.pop_all()  # all are there: they stay open
    return Agreement(up, down, place.collective_timeout_s)


def _listen(backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
        )
    return socket.create_server(("", 0), backlog=backlog)


def _connect(place: Place, above: int, address: str) -> socket.socket:
    host, port = address.split()
    try:
        up = socket.create_connection((host, int(port)), place.connect_timeout_s)
        up.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up.sendall(_HELLO.pack(_proof(place), place.rank))
        up.settimeout(None)
    except OSError as error:
        raise dist.DistNetworkError(f"rank {above} at {host}:{port}: {error}") from None
    return up


def _accept(
    place: Place, listener: socket.socket, missing: set[int], connections: ExitStack
) -> list[socket.socket]:
    """The connections of these ranks; a stranger's is closed."""
    deadline_s = time.monotonic() + place.connect_timeout_s
    down: list[socket.socket] = []
    while missing:
        listener.settimeout(max(0.01, deadline_s - time.monotonic()))
        try:
            connection = listener.accept()[0]
        except OSError as error:
            names = ", ".join(map(str, sorted(missing)))
            raise dist.DistNetworkError(f"rank {names} did not connect: {error}") from None
        rank = _hello(place, connection)
        if rank not in missing:
            connection.close()
            continue
        missing.remove(rank)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        down.append(connections.enter_context(connection))
    return down


def _hello(place: Place, connection: socket.socket) -> int | None:
    """Which rank of this generation has connected; None: a stranger."""
    connection.settimeout(HELLO_S)
    try:
        data = connection.recv(_HELLO.size)
        while 0 < len(data) < _HELLO.size and (more := connection.recv(_HELLO.size - len(data))):
            data += more
        proof, rank = _HELLO.unpack(data)
    except (OSError, struct.error):
        return None
    return int(rank) if hmac.compare_digest(proof, _proof(place)) else None


def _proof(place: Place) -> bytes:
    return hashlib.sha256(f"{place.token} {place.password}".encode()).digest()
