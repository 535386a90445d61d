"""Serves the ranks' store in a thread of rank 0's process, to the ranks of its generation alone.

Rules:
 SE1  A connection that has not proved who it is gets nothing but a nonce. It is closed at the first
      wrong byte, and after `PROOF_S`.
 SE2  Of such connections there are at most as many as there are ranks, and `MAX_STRANGERS` more,
      and never more than a share of the files that the process may open. Beyond that the oldest is
      closed; a rank that meets this connects again.
 SE3  A connection has one request at a time. One that sends more, or a message with a wrong seal,
      is closed.
 SE4  A rank has arrived once it has made a request. When all have, nothing listens any more: the
      port is closed for the rest of the generation, and connections without proof end.
 SE5  When the thread ends, for whatever reason, all connections end, and with them all waits.
 SE6  In a job with TLS a connection is encrypted once both ends have proved themselves: no stranger
      costs a handshake.
"""

from __future__ import annotations

import hmac
import logging
import math
import resource
import secrets
import selectors
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from elasticzero.comm.store.table import Answer, Table
from elasticzero.comm.store.wire import (
    CHALLENGE,
    HEADER,
    MAGIC,
    NONCE_BYTES,
    RESPONSE,
    Seal,
    Session,
    WireError,
    framed,
    packed,
    size_of,
    unpacked,
)
from elasticzero.comm.tls_stream import TlsPipe
from elasticzero.security.certificates import Credentials, contexts_of

log = logging.getLogger(__name__)

PROOF_S = 10.0
"""Time in seconds within which a connection must have proved that it is a rank's."""
MAX_STRANGERS = 64
"""Number of connections without proof that are kept beside one for each rank."""
SHARE_OF_FILES = 0.25
"""Share of the process' open files that connections without proof may take."""
BACKLOG = 4096
ACCEPTED_AT_ONCE = 16
"""Maximum number of connections that are accepted before others are served again."""
FULL_PAUSE_S = 0.1
"""Time in seconds for which no connection is accepted where the process can open no file."""
RECEIVE_BYTES = 1 << 18
LOCAL = 0
"""Rank of the process that serves, which reaches its store without a proof."""


@dataclass(slots=True, eq=False)
class _Connection:
    """One connection, and how far it has come."""

    number: int
    sock: socket.socket
    until_s: float
    """Time at which it is closed without a proof; infinity once it has proved who it is."""
    nonce: bytes = b""
    rank: int = -1
    """The rank that it has proved to be; -1: it has proved nothing."""
    requests: Seal | None = None
    answers: Seal | None = None
    """The seals; None: this connection needs none, for it does not leave the process."""
    tls: TlsPipe | None = None
    """What encrypts it, once it has proved who it is; None: nothing does."""
    received: bytearray = field(default_factory=bytearray)
    """What has come of a message, decrypted."""
    unsent: bytearray = field(default_factory=bytearray)
    """What the socket has not taken yet, encrypted."""
    asks: bool = False
    """True from a request until all of its answer has been sent."""

    @property
    def proved(self) -> bool:
        return self.rank >= 0

    def put(self, data: bytes) -> None:
        """Leaves data to be sent."""
        self.unsent += data if self.tls is None else self.tls.encrypt(data)


class StoreServer:
    """Serves a table to the ranks of one generation until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        world_size: int,
        secret: bytes,
        tls: Credentials | None = None,
    ) -> None:
        """Begins to listen, and to serve.

        Args:
            listener: A bound socket, which the server closes.
            world_size: Number of ranks.
            secret: The secret of the generation.
            tls: Certificate with which connections are encrypted; None: they are not.

        Raises:
            OSError: Another process listens on the port.
        """
        self._tls: ssl.SSLContext | None = contexts_of(tls).server if tls is not None else None
        self._others = set(range(world_size)) - {LOCAL}
        if self._others:
            listener.listen(BACKLOG)
        listener.setblocking(False)
        self._secret = secret
        self._table = Table()
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        """All connections by number, the oldest first."""
        self._strangers: dict[int, _Connection] = {}
        """Those that have proved nothing, the oldest first."""
        self._arrived: set[int] = set()
        self._numbers = 0
        self._full_until_s = 0.0
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listener: socket.socket | None = listener
        self._limit = most_strangers(world_size)
        if self._others:
            self._selector.register(listener, selectors.EVENT_READ)
        else:
            self._stop_listening()
        self.local = self._connect_locally()
        """The end of a connection for this process, which needs no proof."""
        self._thread = threading.Thread(target=self._run, name="elasticzero-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections and the thread; any thread may call it, and again."""
        self._closed = True
        with suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()

    def _connect_locally(self) -> socket.socket:
        inner, outer = socket.socketpair()
        inner.setblocking(False)
        self._add(inner, math.inf).rank = LOCAL
        return outer

    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn()
        except Exception:
            log.exception("the ranks' store has failed, and its connections end")
        finally:
            self._end()

    def _turn(self) -> None:
        """Serves what has come, and ends what is late."""
        for key, events in self._selector.select(self._pause_s(time.monotonic())):
            if key.fileobj is self._listener:
                self._accept()
            elif (connection := key.data) is not None:
                self._serve(connection, events)
        now_s = time.monotonic()
        self._deliver(self._table.expire(now_s))
        while (oldest := self._oldest_stranger()) is not None and oldest.until_s <= now_s:
            self._drop(oldest)
        if self._full_until_s and self._full_until_s <= now_s and self._listener is not None:
            self._full_until_s = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _pause_s(self, now_s: float) -> float | None:
        """Returns the seconds until something is due; None: nothing is."""
        oldest = self._oldest_stranger()
        due_s = min(
            self._table.next_limit_s,
            self._full_until_s or math.inf,
            oldest.until_s if oldest is not None else math.inf,
        )
        return None if due_s == math.inf else max(0.0, due_s - now_s)

    def _oldest_stranger(self) -> _Connection | None:
        return next(iter(self._strangers.values()), None)

    def _accept(self) -> None:
        """Accepts some of the connections that have come: see SE2."""
        for _ in range(ACCEPTED_AT_ONCE):
            if self._listener is None:
                return
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # the client has closed it again
            except OSError:
                self._make_room()
                return
            if len(self._strangers) >= self._limit and (oldest := self._oldest_stranger()):
                self._drop(oldest)
            self._challenge(sock)

    def _make_room(self) -> None:
        """Closes a connection without proof, or waits where there is none: the process can open no
        file."""
        if (oldest := self._oldest_stranger()) is not None:
            self._drop(oldest)
        elif self._listener is not None:
            self._selector.unregister(self._listener)
            self._full_until_s = time.monotonic() + FULL_PAUSE_S

    def _challenge(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        connection = self._add(sock, time.monotonic() + PROOF_S)
        self._strangers[connection.number] = connection
        connection.nonce = secrets.token_bytes(NONCE_BYTES)
        connection.put(CHALLENGE.pack(MAGIC, connection.nonce))
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._send(connection)
        except OSError:
            self._drop(connection)

    def _add(self, sock: socket.socket, until_s: float) -> _Connection:
        self._numbers += 1
        connection = _Connection(self._numbers, sock, until_s)
        self._connections[connection.number] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        return connection

    def _serve(self, connection: _Connection, events: int) -> None:
        """Sends and receives what is possible; ends the connection where anything is wrong."""
        if connection.number not in self._connections:
            return  # it was closed in this turn
        try:
            if events & selectors.EVENT_WRITE:
                self._send(connection)
            if events & selectors.EVENT_READ:
                self._receive(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)

    def _receive(self, connection: _Connection) -> None:
        """Takes what a connection has sent; raises `OSError` where it ends or breaks SE1 or SE3."""
        size = RECEIVE_BYTES if connection.proved else RESPONSE.size - len(connection.received)
        data = connection.sock.recv(size)
        if not data:
            raise ConnectionResetError("the other end was closed")
        if connection.asks:
            raise WireError("a request came before the answer of the one before it")
        connection.received += self._decrypt(connection, data)
        if connection.proved:
            self._read_request(connection)
        elif len(connection.received) == RESPONSE.size:
            self._check_proof(connection)

    def _decrypt(self, connection: _Connection, data: bytes) -> bytes:
        """Returns what a connection has sent, and sends what the handshake of TLS has to answer, or
        why there is none."""
        if connection.tls is None:
            return data
        try:
            return connection.tls.decrypt(data)
        finally:
            connection.unsent += connection.tls.encrypt()
            self._send(connection)

    def _check_proof(self, connection: _Connection) -> None:
        nonce, rank, proof = RESPONSE.unpack(connection.received)
        session = Session.of(self._secret, connection.nonce, nonce, rank)
        if not hmac.compare_digest(proof, session.client_proof) or rank not in self._others:
            raise WireError("a connection has not proved that it is a rank of this generation")
        connection.received.clear()
        connection.rank, connection.until_s = rank, math.inf
        connection.requests, connection.answers = session.seals()
        del self._strangers[connection.number]
        connection.put(session.server_proof)
        if self._tls is not None:
            connection.tls = TlsPipe(self._tls)  # SE6
        self._send(connection)

    def _read_request(self, connection: _Connection) -> None:
        received = connection.received
        if len(received) < HEADER.size:
            return
        size, tag = size_of(bytes(received[: HEADER.size]))
        if len(received) < HEADER.size + size:
            return
        payload = bytes(received[HEADER.size :])
        if len(payload) != size:
            raise WireError("a request came before the answer of the one before it")
        if connection.requests is not None:
            connection.requests.check(tag, payload)
        received.clear()
        connection.asks = True
        self._arrive(connection.rank)
        request = unpacked(payload)
        self._deliver(self._table.ask(connection.number, request, time.monotonic()))

    def _arrive(self, rank: int) -> None:
        """Notes that a rank uses the store; see SE4."""
        if rank in self._arrived:
            return
        self._arrived.add(rank)
        if self._others <= self._arrived:
            self._stop_listening()

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        self._full_until_s = 0.0
        if listener is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(listener)
            with suppress(OSError):  # also for processes that have inherited it
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for stranger in [*self._strangers.values()]:
            self._drop(stranger)

    def _deliver(self, answers: list[Answer]) -> None:
        for number, message in answers:
            connection = self._connections.get(number)
            if connection is None:
                continue
            try:
                connection.put(framed(connection.answers, packed(message)))
                self._send(connection)
            except (OSError, ValueError):  # it has ended, or the answer is larger than any
                self._drop(connection)

    def _send(self, connection: _Connection) -> None:
        """Sends what the socket takes, and waits for room for the rest."""
        while connection.unsent:
            try:
                count = connection.sock.send(connection.unsent, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            del connection.unsent[:count]
        connection.asks = connection.asks and self._awaits_answer(connection)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.sock, events, connection)

    def _awaits_answer(self, connection: _Connection) -> bool:
        """Returns whether a request waits, or its answer has not been sent whole."""
        return bool(connection.unsent) or self._table.waits(connection.number)

    def _drop(self, connection: _Connection) -> None:
        """Ends a connection, with what it waits for."""
        self._connections.pop(connection.number, None)
        self._strangers.pop(connection.number, None)
        self._table.forget(connection.number)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        with suppress(OSError):  # also for processes that have inherited it
            connection.sock.shutdown(socket.SHUT_RDWR)
        connection.sock.close()

    def _end(self) -> None:
        """Closes everything: see SE5."""
        self._stop_listening()
        for connection in [*self._connections.values()]:
            self._drop(connection)
        self._selector.close()
        self._woken.close()
        self._wake.close()


def most_strangers(world_size: int) -> int:
    """Returns the number of connections without proof that are kept: see SE2."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = world_size + MAX_STRANGERS
    return (
        most if files == resource.RLIM_INFINITY else max(1, min(most, int(files * SHARE_OF_FILES)))
    )
