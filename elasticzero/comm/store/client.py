"""Gives a rank the store of its generation as torch's process groups take one.

A lost server is `DistNetworkError`, and keys that do not come in time are `DistStoreError`, as with
torch's TCPStore.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError

from elasticzero.comm.store.wire import (
    CHALLENGE,
    HEADER,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    RESPONSE,
    Message,
    Operation,
    Outcome,
    Seal,
    Session,
    WireError,
    framed,
    packed,
    size_of,
    unpacked,
)
from elasticzero.comm.tls_stream import TlsStream
from elasticzero.security.certificates import Credentials, contexts_of
from elasticzero.text import list_text
from elasticzero.torch_internals.groups import PythonStore

ANSWER_S = 10.0
"""Time in seconds that an answer may take beyond the limit of what it waits for. A server that is
suspended sends none."""
MAX_LIMIT_MS = 1 << 53
RECEIVE_BYTES = 1 << 18
KEYS_SHOWN = 8


class Unanswered(TimeoutError):
    """Something takes connections at the server's address, and says nothing yet: its process lives
    and is slow, or it is none of ours."""


class Channel:
    """Sends requests to the server and receives their answers, one after another."""

    def __init__(self, sock: socket.socket, session: Session | None = None) -> None:
        """Takes over a connected socket.

        Args:
            sock: The connection.
            session: The keys of the connection; None: it does not leave the process.
        """
        self._plain = sock
        self._sock: socket.socket | TlsStream = sock
        """What messages are sent over: the socket, or what encrypts it."""
        self._requests: Seal | None = None
        self._answers: Seal | None = None
        if session is not None:
            self._requests, self._answers = session.seals()

    def encrypt(self, credentials: Credentials, limit_s: float) -> None:
        """Encrypts the connection, before the first request.

        Args:
            credentials: Certificate of this rank's node, and the authorities that it trusts.
            limit_s: Seconds that it may take.

        Raises:
            OSError: The server has no certificate of the job, or does not answer in time.
        """
        stream = TlsStream(self._plain, contexts_of(credentials).client, server_side=False)
        stream.set_up(time.monotonic() + limit_s)
        self._sock = stream

    def ask(self, request: Message, limit_s: float | None) -> Message:
        """Returns the answer to a request.

        Args:
            request: The request.
            limit_s: Seconds within which the answer must have come; None: no limit.

        Raises:
            OSError: The server is gone, does not answer, or is not the one that has proved itself.
            ValueError: The request is too large; nothing was sent.
        """
        frame = framed(self._requests, packed(request))
        until_s = None if limit_s is None else time.monotonic() + limit_s
        self._limit(until_s)
        self._sock.sendall(frame, socket.MSG_NOSIGNAL)
        size, tag = size_of(receive(self._sock, HEADER.size, until_s))
        payload = receive(self._sock, size, until_s)
        if self._answers is not None:
            self._answers.check(tag, payload)
        return unpacked(payload)

    def _limit(self, until_s: float | None) -> None:
        self._sock.settimeout(None if until_s is None else max(0.001, until_s - time.monotonic()))

    def shut(self) -> None:
        """Ends the connection, and wakes a thread that waits for an answer."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket; no other thread may use it."""
        self._sock.close()


def connect(address: tuple[str, int], rank: int, secret: bytes, limit_s: float) -> Channel:
    """Returns a connection on which both ends have proved that they have the secret.

    Args:
        address: Host and port of the server.
        rank: This process's rank.
        secret: The secret of the generation.
        limit_s: Seconds that it may take.

    Raises:
        Unanswered: It takes the connection, and has not said anything in time.
        OSError: The server is not reached, or has not proved itself.
        ExceptionGroup: Each of several addresses of the host has failed.
    """
    until_s = time.monotonic() + limit_s
    sock = socket.create_connection(address, limit_s, all_errors=True)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        magic, server_nonce = CHALLENGE.unpack(_challenge(sock, until_s))
        if magic != MAGIC:
            raise WireError("another service than the ranks' store listens there")
        nonce = secrets.token_bytes(NONCE_BYTES)
        session = Session.of(secret, server_nonce, nonce, rank)
        sock.sendall(RESPONSE.pack(nonce, rank, session.client_proof), socket.MSG_NOSIGNAL)
        proof = receive(sock, PROOF_BYTES, until_s)
        if not hmac.compare_digest(proof, session.server_proof):
            raise WireError("what listens there has not proved that it is of this generation")
        return Channel(sock, session)
    except BaseException:
        sock.close()
        raise


def _challenge(sock: socket.socket, until_s: float) -> bytes:
    """Returns the first bytes of a server; raises `Unanswered` if none come in time."""
    try:
        return receive(sock, CHALLENGE.size, until_s)
    except TimeoutError:
        raise Unanswered("it takes connections, and does not answer yet") from None


def receive(sock: socket.socket | TlsStream, size: int, until_s: float | None) -> bytes:
    """Returns so many bytes.

    Args:
        sock: A connection.
        size: The number of bytes.
        until_s: The end of the wait, by the monotonic clock; None: there is no end.

    Raises:
        OSError: The connection has ended, or the time is over.
    """
    data = bytearray()
    while len(data) < size:
        if until_s is not None:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no answer has come in time")
            sock.settimeout(left_s)
        part = sock.recv(min(RECEIVE_BYTES, size - len(data)))
        if not part:
            raise ConnectionResetError("the other end was closed")
        data += part
    return bytes(data)


class RankStore(PythonStore):
    """The store of a generation, as one rank has it. All methods may be called by any thread; one
    that waits for a key keeps those of other threads waiting, as with TCPStore."""

    def __init__(
        self, channel: Channel, timeout_s: float, on_close: Callable[[], None] = lambda: None
    ) -> None:
        """Takes over a connection.

        Args:
            channel: The connection to the server.
            timeout_s: Seconds after which a wait ends by default; 0: never.
            on_close: Is called by `close`; on rank 0 it closes the server.
        """
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._channel = channel
        self._on_close = on_close
        self._lock = threading.Lock()
        self._broken = ""
        """Why the connection cannot be used any more; empty: it can."""

    def close(self) -> None:
        """Ends the connection, and on rank 0 the server; any thread may call it, and again."""
        self._channel.shut()
        with self._lock:
            self._broken = self._broken or "it is closed"
            self._channel.close()
        self._on_close()

    # What torch calls

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Operation.SET, [key.encode(), _bytes(value)])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_ms = _milliseconds(self.default_timeout if timeout is None else timeout)
        self._ask(Operation.WAIT, [key.encode() for key in keys], limit_ms)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(Operation.CHECK, [key.encode() for key in keys]).number)

    def add(self, key: str, value: int) -> int:
        return self._ask(Operation.ADD, [key.encode()], value).number

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        parts = [key.encode(), _bytes(expected_value), _bytes(desired_value)]
        return self._ask(Operation.COMPARE_SET, parts).parts[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(Operation.DELETE, [key.encode()]).number)

    def num_keys(self) -> int:
        return self._ask(Operation.COUNT, []).number

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(Operation.APPEND, [key.encode(), _bytes(value)])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        limit_ms = _milliseconds(self.default_timeout)
        left = [key.encode() for key in keys]
        values: list[bytes] = []
        while left:
            answer = self._ask(Operation.GET, left, limit_ms)
            values += answer.parts
            left = left[len(answer.parts) :]
        return values

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def _ask(self, operation: Operation, parts: Sequence[bytes], number: int = 0) -> Message:
        """Returns the answer to a request, which has ended well.

        Args:
            operation: What is asked for.
            parts: Keys and values.
            number: A time limit in milliseconds, or what is added.

        Raises:
            DistStoreError: The keys have not come in time, or the store refuses the request.
            DistNetworkError: The server is lost.
        """
        waits = operation in (Operation.GET, Operation.WAIT)
        limit_ms = number if waits else _milliseconds(self.default_timeout)
        limit_s = limit_ms / 1000 + ANSWER_S if limit_ms else None
        answer = self._exchange(Message(operation, number, tuple(parts)), limit_s)
        if answer.code == Outcome.TIMED_OUT:
            keys = list_text((key.decode(errors="replace") for key in answer.parts), KEYS_SHOWN)
            raise DistStoreError(f"wait timeout after {limit_ms}ms, keys: {keys}")
        if answer.code != Outcome.DONE:
            reason = b" ".join(answer.parts).decode(errors="replace")
            raise DistStoreError(f"the ranks' store refuses a request: {reason}")
        return answer

    def _exchange(self, request: Message, limit_s: float | None) -> Message:
        """Returns the answer to a request. After any error but that of a request that is too large
        the connection cannot be used, for an answer may still come."""
        with self._lock:
            if self._broken:
                raise _lost(self._broken)
            try:
                return self._channel.ask(request, limit_s)
            except OSError as error:
                self._break(str(error))
                raise _lost(str(error)) from None
            except ValueError as error:
                raise DistStoreError(str(error)) from None
            except BaseException:  # a signal's handler has raised
                self._break("a request was interrupted")
                raise

    def _break(self, reason: str) -> None:
        self._broken = reason
        self._channel.shut()


def _lost(reason: str) -> DistNetworkError:
    return DistNetworkError(f"the store of rank 0 is lost: {reason}")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _milliseconds(limit: timedelta) -> int:
    """Returns a limit in whole milliseconds; 0, which is none, only for a limit of 0."""
    exact = limit / timedelta(milliseconds=1)
    return min(MAX_LIMIT_MS, max(1, int(exact))) if exact else 0
