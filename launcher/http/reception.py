"""Accepts an agent's HTTP connections, and reads the heads of their requests, in one thread.

Clients without the job's token can cost an agent only what is limited here. No thread of their own
waits for their bytes, and few threads respond to them at a time. A request that shows the token
gets a thread at once, however many others wait.

 RE1  The reception's thread owns every connection: it alone registers, drops and counts them. A
      connection is in one state: it *waits* for a head, is *queued*, or is *answered* by a thread.
 RE2  A head has at most `HEAD_BYTES`, and is whole `HEAD_TIMEOUT_S` after its first byte.
 RE3  Of requests without the token, `MAX_ANSWERED` are answered at a time. A queued one takes the
      place of one that takes longer than `SLOW_S`, and that of an address with fewer goes first.
 RE4  The thread that answers a request gives the connection back when it is done, in any case.
      Until then the reception closes no descriptor of it; it only shuts the connection.
 RE5  Where the process can open no more descriptors, an unauthenticated connection is closed.
"""

from __future__ import annotations

import errno
import logging
import queue
import re
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus

from elasticzero.launcher.http import limits
from elasticzero.launcher.http.limits import Connections, RefusalLog, max_connections

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
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_OUT_OF_MEANS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class HeadTooLong(Exception):
    """Reports that a request's head is longer than `HEAD_BYTES`."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class Client:
    """Holds one connection, and what has come of the head of its next request."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.address = address.removeprefix(limits.MAPPED)
        self.has_token = False
        self._data = bytearray()
        self._last_s = time.monotonic()
        self._began_s: float | None = None

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
            OSError: The connection is closed.
        """
        try:
            part = self.connection.recv(limits.HEAD_BYTES + 1 - len(self._data))
        except (BlockingIOError, InterruptedError):
            return None
        if not part:
            raise ConnectionResetError("the client has closed the connection")
        self._last_s = time.monotonic()
        self._data += part
        return self.take_head()

    def take_head(self) -> bytes | None:
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

    def refuse(self, status: HTTPStatus, headers: Mapping[str, str]) -> None:
        """Sends a response that has no more than a status, as far as that needs no waiting.

        Args:
            status: Status of the response.
            headers: Its headers, besides those that every response has.
        """
        text = f"{status.phrase}\n"
        lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
        values = {**headers, "Content-Type": "text/plain", "Content-Length": str(len(text))}
        lines += [f"{name}: {value}" for name, value in values.items()]
        response = "\r\n".join([*lines, "Connection: close", "", text])
        with suppress(OSError):
            self.connection.send(response.encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            self.connection.shutdown(socket.SHUT_WR)
            discarded = 0
            while discarded < DISCARDED_BYTES:
                if not (part := self.connection.recv(1 << 16, socket.MSG_DONTWAIT)):
                    break
                discarded += len(part)

    def shut(self) -> None:
        """Ends the connection; its descriptor stays."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class Reception:
    """Accepts connections until it is closed, and has their requests answered."""

    def __init__(
        self,
        listening: socket.socket,
        *,
        answer: Callable[[Client, bytes], bool],
        has_token: Callable[[bytes], bool],
        headers: Mapping[str, str],
        refusals: RefusalLog,
    ) -> None:
        """Begins to accept.

        Args:
            listening: A listening socket, which is closed in the end.
            answer: Answers the request with this head on the connection, in a thread of its own.
                It returns whether the connection is kept for another request.
            has_token: Returns whether a head shows the job's token.
            headers: Headers of the responses that the reception itself sends.
            refusals: Log of refused requests.
        """
        listening.setblocking(False)
        self._listening = listening
        self._answer, self._has_token = answer, has_token
        self._headers, self._refusals = headers, refusals
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
        busy = len(self._connections) or self._paused_until_s
        for key, _ in self._ready.select(SWEEP_S if busy else None):
            if key.fileobj is self._listening:
                self._accept()
            elif key.fileobj is self._wake_reader:
                with suppress(BlockingIOError):
                    self._wake_reader.recv(4096)
            elif key.data in self._waiting:  # it may have been dropped since
                self._receive(key.data)
        self._take_returned()
        self._answer_queued()
        now_s = time.monotonic()
        if now_s >= self._swept_s + SWEEP_S:
            self._swept_s = now_s
            self._sweep(now_s)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_MEANS:
                    self._make_room()
                    return
                continue  # the client has gone again
            client = Client(connection, str(address[0]))
            closed = self._connections.add(client)
            if closed is not client:
                self._waiting.add(client)
                self._ready.register(connection, selectors.EVENT_READ, client)
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
        self._ready.unregister(self._listening)
        self._paused_until_s = time.monotonic() + PAUSE_S

    def _receive(self, client: Client) -> None:
        try:
            head = client.receive()
        except HeadTooLong as error:
            self._refuse(client, error.status)
        except OSError:
            self._drop(client)
        else:
            if head is not None:
                self._take_request(client, head)

    def _refuse(self, client: Client, status: HTTPStatus) -> None:
        if not client.has_token:
            self._refusals.add(client.address, f"{status.value}, {status.phrase}")
        client.refuse(status, self._headers)
        self._drop(client)

    def _take_request(self, client: Client, head: bytes) -> None:
        """Has a request answered: at once if it shows the token, in its turn otherwise."""
        self._stop_waiting(client)
        if self._has_token(head):
            client.authenticate()
            self._connections.authenticate(client)
            self._start(client, head)
        else:
            self._queued[client] = head
            self._answer_queued()

    def _answer_queued(self) -> None:
        """Starts to answer queued requests (RE3)."""
        while self._queued:
            strangers = {c: began_s for c, began_s in self._answered.items() if not c.has_token}
            counts = Counter(client.address for client in strangers)
            if len(strangers) >= MAX_ANSWERED:
                self._end_slowest(strangers, counts)
                return
            turn = min(self._queued, key=lambda client: counts[client.address])
            self._start(turn, self._queued.pop(turn))

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

    def _start(self, client: Client, head: bytes) -> None:
        self._answered[client] = time.monotonic()
        thread = threading.Thread(
            target=self._serve, args=(client, head), name="http request", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the process can have no more threads
            del self._answered[client]
            self._drop(client)

    def _serve(self, client: Client, head: bytes) -> None:
        is_kept = False
        try:
            is_kept = self._answer(client, head)
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
        self._waiting.add(client)
        self._ready.register(client.connection, selectors.EVENT_READ, client)
        try:
            head = client.take_head()
        except HeadTooLong as error:
            self._refuse(client, error.status)
        else:
            if head is not None:
                self._take_request(client, head)

    def _close_returned(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._returned.get_nowait()[0].connection.close()

    def _sweep(self, now_s: float) -> None:
        """Closes connections whose time is over, and accepts again after a pause."""
        for client in self._connections:
            if client in self._answered:
                late_s = self._answered[client] + limits.ANSWER_TIMEOUT_S
                if not client.has_token and now_s >= late_s:
                    client.shut()
            elif now_s >= client.deadline_s:
                if client.has_begun:
                    self._refusals.add(client.address, "its head was not whole in time")
                self._drop(client)
        if self._paused_until_s and now_s >= self._paused_until_s:
            self._paused_until_s = 0.0
            self._ready.register(self._listening, selectors.EVENT_READ)

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
