"""Accepts an agent's HTTP connections, and reads the heads of their requests, in one thread.

Clients without the job's token can cost an agent only what is limited here. No thread of their own
waits for their bytes, and few threads respond to them at a time. A request that shows the token, or
proves it, gets a thread at once, however many others wait. Over TLS a client may show a certificate
of the job in place of both.

 RE1  The reception's thread owns every connection: it alone registers, drops and counts them. A
      connection is in one state: it *waits* for a head, is *queued*, or is *answered* by a thread.
 RE2  A head has at most `HEAD_BYTES`, and is whole `HEAD_TIMEOUT_S` after its first byte. TLS is
      set up within as much, counted from the connection on.
 RE3  Of requests without the token, `MAX_ANSWERED` are answered at a time. A queued one takes the
      place of one that takes longer than `SLOW_S`, and that of an address with fewer goes first.
 RE4  The thread that answers a request gives the connection back when it is done, in any case.
      Until then the reception closes no descriptor of it; it only shuts the connection.
 RE5  Where the process can open no more descriptors, an unauthenticated connection is closed.
 RE6  A request for a nonce is answered by the reception itself, at once. So a client that has the
      secret waits for no thread before it can prove that.
 RE7  No connection is closed for another one within `GRACE_S`, unless its request is there. So a
      client with the token has that long to send it, however fast others connect.
"""

from __future__ import annotations

import errno
import logging
import queue
import re
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus

from elasticzero.launcher.http import limits
from elasticzero.launcher.http.authentication import Authenticator, Verdict
from elasticzero.launcher.http.limits import Connections, RefusalLog, max_connections
from elasticzero.launcher.protocol.documents import UNSTATED
from elasticzero.launcher.tls.contexts import TlsContexts
from elasticzero.launcher.tls.credentials import node_name_in

log = logging.getLogger(__name__)

MAX_ANSWERED = 4
"""Maximum number of requests without the token that are answered at a time."""
SLOW_S = 1.0
"""Seconds after which a request that is being answered makes room for one that is queued."""
ACCEPTED_AT_ONCE = 128
"""Maximum number of connections that are accepted before others are looked at again."""
SWEEP_S = 0.05
"""Seconds between two looks at the deadlines of connections."""
PAUSE_S = 0.1
"""Seconds for which no connection is accepted after the process had no descriptor for one."""
DISCARDED_BYTES = 1 << 18
"""Maximum bytes of a refused request that are read, so that its client gets the response."""
HANDSHAKE = b"\x16"
"""First byte of every connection over TLS (RFC 8446, section 5.1)."""
NOT_TLS = "this server speaks HTTPS"
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_OUT_OF_MEANS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class HeadTooLong(Exception):
    """Reports that a request's head is longer than `HEAD_BYTES`."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class NotTls(Exception):
    """Reports that a client speaks something else than TLS."""


class Client:
    """Holds one connection, and what has come of the head of its next request."""

    def __init__(
        self, connection: socket.socket, address: str, tls: ssl.SSLContext | None = None
    ) -> None:
        """Begins to wait for the first request.

        Args:
            connection: The connection, which `Client` takes over.
            address: IP address of the client.
            tls: Context in which TLS is set up first; None: there is no TLS.

        Raises:
            OSError: The connection is closed.
        """
        connection.setblocking(False)
        self.connection = connection
        self.address = address.removeprefix(limits.MAPPED)
        self.has_token = False
        """True if the connection has shown the job's token, or a certificate of the job."""
        self.has_certificate = False
        self.run = UNSTATED
        """Run of the job that the client's certificate states."""
        self._data = bytearray()
        self.accepted_s = self._last_s = time.monotonic()
        self._began_s: float | None = None
        self._tls: ssl.SSLSocket | None = None
        self._is_set_up, self._speaks_tls = tls is None, False
        if tls is not None:
            self._began_s = self._last_s
            self._tls = self.connection = tls.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )

    @property
    def is_encrypted(self) -> bool:
        return self._tls is not None

    def authenticate(self) -> None:
        """Records that the connection has shown the job's token."""
        self.has_token = True

    @property
    def has_begun(self) -> bool:
        """Returns whether a part of a head has come."""
        return self._began_s is not None

    @property
    def deadline_s(self) -> float:
        """Returns the time at which the connection is closed if nothing more comes."""
        idle_s = self._last_s + limits.IDLE_TIMEOUT_S
        return (
            idle_s if self._began_s is None else min(idle_s, self._began_s + limits.HEAD_TIMEOUT_S)
        )

    def receive(self) -> bytes | None:
        """Reads what has come; returns the next request's head once it is whole.

        Raises:
            HeadTooLong: The head is too long.
            NotTls: The client speaks something else than TLS.
            OSError: The connection is closed.
        """
        if not self._is_set_up and not self._set_up():
            return None
        while (head := self._take_head()) is None:
            try:
                part = self.connection.recv(limits.HEAD_BYTES + 1 - len(self._data))
            except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return None
            if not part:
                raise ConnectionResetError("the client has closed the connection")
            self._last_s = time.monotonic()
            self._data += part
        return head

    def _set_up(self) -> bool:
        """Goes on with the handshake of TLS; returns whether it is done.

        What the server sends in it finds room in an empty socket; where it does not, the connection
        ends at its deadline.
        """
        assert self._tls is not None
        try:
            if not self._speaks_tls:  # a method of the class below reads what is not encrypted
                if socket.socket.recv(self._tls, 1, socket.MSG_PEEK) not in (HANDSHAKE, b""):
                    raise NotTls
                self._speaks_tls = True
            self._tls.do_handshake()
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        certificate = self._tls.getpeercert()
        if certificate:
            name = node_name_in(certificate)
            self.run = UNSTATED if name is None else name.run
            self.has_certificate = True
        self._is_set_up, self._began_s, self._last_s = True, None, time.monotonic()
        return True

    def _take_head(self) -> bytes | None:
        """Returns the next request's head if it is whole; what follows it stays.

        Raises:
            HeadTooLong: The head is too long.
        """
        end = _END_OF_HEAD.search(self._data)
        if end is not None:
            head = bytes(self._data[: end.end()])
            del self._data[: end.end()]
            self._began_s = None
            return head
        if len(self._data) > limits.HEAD_BYTES:
            in_first_line = b"\n" not in self._data
            raise HeadTooLong(
                HTTPStatus.REQUEST_URI_TOO_LONG
                if in_first_line
                else HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            )
        if self._data and self._began_s is None:
            self._began_s = time.monotonic()
        return None

    def resume(self) -> None:
        """Begins to wait for the next request."""
        self.connection.setblocking(False)
        self._last_s = time.monotonic()

    def refuse(self, status: HTTPStatus, why: str, headers: Mapping[str, str]) -> None:
        """Sends a response that has no more than a status, as far as that needs no waiting.

        Args:
            status: Status of the response.
            why: Text of the response.
            headers: Its headers, besides those that every response has.
        """
        values = {**headers, "Content-Type": "text/plain", "Connection": "close"}
        plain = socket.socket  # its methods read and write what is not encrypted
        with suppress(OSError):
            self._send(_response(status, values, f"{why}\n"))
            plain.shutdown(self.connection, socket.SHUT_WR)
            discarded = 0
            while discarded < DISCARDED_BYTES:
                if not (part := plain.recv(self.connection, 1 << 16, socket.MSG_DONTWAIT)):
                    break
                discarded += len(part)

    def challenge(self, headers: Mapping[str, str]) -> bool:
        """Hands out a nonce, and waits for the next request; returns False where that fails.

        It fails where the kernel has no room for the response. It also fails where the client has
        sent more without waiting: the reception must not answer many requests in one turn.

        Args:
            headers: Headers of the response.
        """
        response = _response(HTTPStatus.UNAUTHORIZED, headers, "")
        with suppress(OSError):
            return not self._data and self._send(response) == len(response)
        return False

    def _send(self, response: bytes) -> int:
        """Sends what the kernel takes of a response at once; returns the number of bytes."""
        if self._tls is not None and self._is_set_up:
            return self._tls.send(response)
        return socket.socket.send(self.connection, response, _AT_ONCE)

    def shut(self) -> None:
        """Ends the connection; its descriptor stays.

        So does its state of TLS, for another thread may be about to write: that of `ssl` drops it.
        """
        with suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)


def _response(status: HTTPStatus, headers: Mapping[str, str], text: str) -> bytes:
    """Returns a whole response.

    Args:
        status: Its status.
        headers: Its headers, besides its length.
        text: Its body.
    """
    lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
    values = {**headers, "Content-Length": str(len(text))}
    lines += [f"{name}: {value}" for name, value in values.items()]
    return "\r\n".join([*lines, "", text]).encode()


class Reception:
    """Accepts connections until it is closed, and has their requests answered."""

    def __init__(
        self,
        listening: socket.socket,
        *,
        answer: Callable[[Client, bytes, Verdict], bool],
        authenticator: Authenticator,
        headers: Mapping[str, str],
        refusals: RefusalLog,
        tls: TlsContexts | None = None,
    ) -> None:
        """Begins to accept.

        Args:
            listening: A listening socket, which is closed in the end.
            answer: Answers the request with this head on the connection, in a thread of its own.
                It returns whether the connection is kept for another request.
            authenticator: Judges each head once, and hands out nonces.
            headers: Headers of the responses that the reception itself sends.
            refusals: Log of refused requests.
            tls: Contexts of the connections; None: they are not encrypted.
        """
        listening.setblocking(False)
        self._listening = listening
        self._answer, self._authenticator = answer, authenticator
        self._headers, self._refusals, self._tls = headers, refusals, tls
        self._connections: Connections[Client] = Connections(max_connections())
        self._waiting: set[Client] = set()
        self._queued: dict[Client, bytes] = {}
        self._answered: dict[Client, float] = {}
        """The connections whose requests threads answer, with the time at which that began."""
        self._returned: queue.SimpleQueue[tuple[Client, bool]] = queue.SimpleQueue()
        self._is_closing, self._has_ended = threading.Event(), threading.Event()
        self._swept_s, self._paused_until_s = 0.0, 0.0
        self._wake_reader, self._waker = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._waker.setblocking(False)
        self._ready = selectors.DefaultSelector()
        self._ready.register(listening, selectors.EVENT_READ)
        self._ready.register(self._wake_reader, selectors.EVENT_READ)
        port = listening.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name=f"http {port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and ends all connections."""
        self._is_closing.set()
        self._wake()
        self._thread.join(2.0)

    def _run(self) -> None:
        try:
            while not self._is_closing.is_set():
                try:
                    self._turn()
                except Exception:  # an error of one request must not end the service
                    log.exception("a request could not be received")
                    time.sleep(SWEEP_S)
        finally:
            self._end()

    def _end(self) -> None:
        self._ready.close()
        for sock in (self._listening, self._wake_reader):
            sock.close()
        for client in self._connections:
            client.shut()
            if client not in self._answered:
                client.connection.close()
        self._has_ended.set()
        self._close_returned()
        self._waker.close()

    def _turn(self) -> None:
        """Handles what is ready, or due, once."""
        for key, _ in self._ready.select(self._longest_wait_s()):
            if key.fileobj is self._listening:
                self._accept()
            elif key.fileobj is self._wake_reader:
                with suppress(BlockingIOError):
                    self._wake_reader.recv(4096)
            elif key.data in self._waiting:  # it may have been dropped since
                self._receive(key.data)
        self._take_returned()
        self._answer_queued()
        self._accept_again()
        now_s = time.monotonic()
        if now_s >= self._swept_s + SWEEP_S:
            self._swept_s = now_s
            self._sweep(now_s)

    def _longest_wait_s(self) -> float | None:
        """Returns for how long nothing is due; None: nothing is before something is ready."""
        if self._paused_until_s:
            return min(SWEEP_S, max(0.0, self._paused_until_s - time.monotonic()))
        return SWEEP_S if len(self._connections) else None

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if (until_s := self._full_until_s()) > time.monotonic():
                self._pause(until_s)
                return
            try:
                connection, address = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_MEANS:
                    self._make_room()
                    return
                continue  # the client has gone again
            try:
                tls = self._tls.server() if self._tls is not None else None
                client = Client(connection, str(address[0]), tls)
            except OSError:
                connection.close()
                continue
            closed = self._connections.add(client)
            if closed is not client:
                self._waiting.add(client)
                self._ready.register(client.connection, selectors.EVENT_READ, client)
            if closed is not None:
                self._refusals.add(closed.address, "there are too many connections")
                self._drop(closed)
            if client in self._waiting:
                self._receive(client)  # a request comes with the connection, as a rule

    def _make_room(self) -> None:
        """Closes a connection where the process has no descriptor for another one (RE5)."""
        if (closed := self._connections.oldest_stranger()) is not None:
            self._refusals.add(closed.address, "this process cannot open more descriptors")
            self._drop(closed)
        self._pause(time.monotonic() + PAUSE_S)

    def _full_until_s(self) -> float:
        """Returns the time from which on a connection may be closed for another one (RE7)."""
        if not self._connections.is_full:
            return 0.0
        oldest = self._connections.oldest_stranger()
        if oldest is None or oldest not in self._waiting:
            return 0.0
        return oldest.accepted_s + limits.GRACE_S

    def _pause(self, until_s: float) -> None:
        """Accepts no connection until then."""
        self._ready.unregister(self._listening)
        self._paused_until_s = until_s

    def _accept_again(self) -> None:
        if self._paused_until_s and time.monotonic() >= self._paused_until_s:
            self._paused_until_s = 0.0
            self._ready.register(self._listening, selectors.EVENT_READ)

    def _receive(self, client: Client) -> None:
        try:
            head = client.receive()
        except HeadTooLong as error:
            self._refuse(client, error.status)
        except NotTls:
            self._refuse(client, HTTPStatus.BAD_REQUEST, NOT_TLS)
        except OSError as error:
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                self._refusals.add(client.address, f"no TLS with it: {error.reason}")
            self._drop(client)
        else:
            if client.has_certificate and not client.has_token:
                self._authenticate(client)
            if head is not None:
                self._take_request(client, head)

    def _authenticate(self, client: Client) -> None:
        client.authenticate()
        self._connections.authenticate(client)

    def _refuse(self, client: Client, status: HTTPStatus, why: str = "") -> None:
        why = why or status.phrase
        if not client.has_token:
            self._refusals.add(client.address, f"{status.value}, {why}")
        client.refuse(status, why, self._headers)
        self._drop(client)

    def _take_request(self, client: Client, head: bytes) -> None:
        """Has a request answered: at once if its client has the secret, in its turn otherwise."""
        verdict = self._authenticator.judge(head)
        is_trusted = client.has_certificate or verdict.is_holder
        if verdict.is_challenged and not is_trusted:
            self._hand_out_nonce(client, verdict)
            return
        self._stop_waiting(client)
        if is_trusted:
            self._authenticate(client)
            self._start(client, head, verdict)
        else:
            self._queued[client] = head
            self._connections.note_request(client, has_asked=True)
            self._answer_queued()

    def _hand_out_nonce(self, client: Client, verdict: Verdict) -> None:
        """Answers a request that lacks a nonce, or whose proof is not right (RE6)."""
        if verdict is Verdict.REFUSED:
            self._refusals.add(client.address, "its proof is wrong, or was used before")
        nonce = {"WWW-Authenticate": self._authenticator.challenge()}
        if not client.challenge({**self._headers, **nonce}):
            self._drop(client)

    def _answer_queued(self) -> None:
        """Starts to answer queued requests (RE3)."""
        while self._queued:
            strangers = {c: began_s for c, began_s in self._answered.items() if not c.has_token}
            counts = Counter(client.address for client in strangers)
            if len(strangers) >= MAX_ANSWERED:
                self._end_slowest(strangers, counts)
                return
            turn = min(self._queued, key=lambda client: counts[client.address])
            self._start(turn, self._queued.pop(turn), Verdict.STRANGER)

    def _end_slowest(self, strangers: Mapping[Client, float], counts: Counter[str]) -> None:
        """Shuts the connection that is answered for longest, if that is too long.

        Args:
            strangers: Connections without the token that are answered, and since when.
            counts: Number of these by address; one of the address with most of them is shut.
        """
        most = max(counts.values())
        slow = [c for c in strangers if counts[c.address] == most]
        slowest = min(slow, key=lambda client: strangers[client])
        if time.monotonic() - strangers[slowest] > SLOW_S:
            slowest.shut()

    def _start(self, client: Client, head: bytes, verdict: Verdict) -> None:
        self._answered[client] = time.monotonic()
        thread = threading.Thread(
            target=self._serve, args=(client, head, verdict), name="http request", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the process can have no more threads
            del self._answered[client]
            self._drop(client)

    def _serve(self, client: Client, head: bytes, verdict: Verdict) -> None:
        is_kept = False
        try:
            is_kept = self._answer(client, head, verdict)
        except Exception:  # the client left, or was slow: that is no error of this agent
            log.debug("connection from %s ended by an error", client.address, exc_info=True)
        finally:
            self._returned.put((client, is_kept))
            self._wake()
            if self._has_ended.is_set():
                self._close_returned()

    def _take_returned(self) -> None:
        """Waits for the next request on connections whose requests are answered (RE4)."""
        with suppress(queue.Empty):
            while True:
                client, is_kept = self._returned.get_nowait()
                del self._answered[client]
                if is_kept and client in self._connections:
                    self._wait_for_next(client)
                else:
                    self._drop(client)

    def _wait_for_next(self, client: Client) -> None:
        client.resume()
        self._connections.note_request(client, has_asked=False)
        self._waiting.add(client)
        self._ready.register(client.connection, selectors.EVENT_READ, client)
        self._receive(client)  # TLS may have read the next request, of which no descriptor tells

    def _close_returned(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._returned.get_nowait()[0].connection.close()

    def _sweep(self, now_s: float) -> None:
        """Closes connections whose time is over."""
        for client in self._connections:
            if client in self._answered:
                late_s = self._answered[client] + limits.ANSWER_TIMEOUT_S
                if not client.has_token and now_s >= late_s:
                    client.shut()
            elif now_s >= client.deadline_s:
                if client.has_begun:
                    self._refusals.add(client.address, "its head was not whole in time")
                self._drop(client)

    def _stop_waiting(self, client: Client) -> None:
        if client in self._waiting:
            self._waiting.remove(client)
            self._ready.unregister(client.connection)

    def _drop(self, client: Client) -> None:
        """Closes a connection, or has the thread that answers its request do no more."""
        self._connections.remove(client)
        if client in self._answered:
            client.shut()
            return
        self._stop_waiting(client)
        self._queued.pop(client, None)
        client.shut()
        client.connection.close()

    def _wake(self) -> None:
        with suppress(OSError):
            self._waker.send(b"\0")
