"""Encrypts the connections between ranks: those of the control tree, and of the ranks' store.

`TlsStream` is an end that waits for the other one. `TlsPipe` touches no socket: it is for a thread
that serves many connections, and waits for none. Neither is an `ssl.SSLSocket`, for what the
control tree needs of a connection:
 - `poll` on its descriptor must tell of each message. So the socket is read record by record: TLS
   never holds a message of which the descriptor does not tell.
 - A closed connection is an error, whatever the script does with SIGPIPE, so that each call of the
   kernel says MSG_NOSIGNAL.
 - Any thread may shut it, at any moment, and nothing is sent unencrypted then.
"""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress
from typing import Protocol

MOST_READ_BYTES = 1 << 18
_HEADER_BYTES = 5
"""Bytes of a record's header; the last two are the length of what follows (RFC 8446, section
5.1)."""


class Stream(Protocol):
    """Describes a connection between two ranks, which may be a socket."""

    def sendall(self, data: bytes, flags: int = 0, /) -> None: ...

    def recv(self, size: int, /) -> bytes: ...

    def fileno(self) -> int: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class TlsStream:
    """Is one end of an encrypted connection, for one thread at a time besides `shutdown`."""

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, *, server_side: bool
    ) -> None:
        """Sends nothing before `set_up`.

        Args:
            connection: The connection, which is closed with this end.
            context: Context of the connection.
            server_side: Whether the other end is the one that begins.
        """
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)

    def set_up(self, deadline_s: float) -> None:
        """Makes the handshake.

        Args:
            deadline_s: Time by which that must be done, by the monotonic clock.

        Raises:
            OSError: The other end has no certificate of the job, or did not answer in time.
        """
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._connection.settimeout(max(0.001, deadline_s - time.monotonic()))
                self._read_record()
            except ssl.SSLError:
                with suppress(OSError):
                    self._flush()  # the other end learns why
                raise
        self._flush()
        self._connection.settimeout(None)

    def sendall(self, data: bytes, flags: int = 0, /) -> None:
        """Sends a message: one of at most 16 KiB as one record, a larger one as several."""
        self._tls.write(data)
        self._flush()

    def recv(self, size: int, /) -> bytes:
        """Waits for bytes, and returns at most `size` of them; none: the other end was closed."""
        while True:
            try:
                return self._tls.read(size)
            except ssl.SSLWantReadError:
                self._read_record()

    def settimeout(self, limit_s: float | None, /) -> None:
        """Limits how long each wait for the other end may take, in seconds; None: no limit. The
        connection is of no use once a wait has taken longer."""
        self._connection.settimeout(limit_s)

    def fileno(self) -> int:
        """Returns the descriptor that is readable once a message has begun to come."""
        return self._connection.fileno()

    def shutdown(self, how: int, /) -> None:
        """Ends the connection; any thread may call it."""
        self._connection.shutdown(how)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def _flush(self) -> None:
        if data := self._outgoing.read():
            self._connection.sendall(data, socket.MSG_NOSIGNAL)

    def _read_record(self) -> None:
        header = self._read_exactly(_HEADER_BYTES)
        size = int.from_bytes(header[-2:], "big")
        self._incoming.write(header + self._read_exactly(size))

    def _read_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._connection.recv(size - len(data))
            if not part:
                raise ConnectionResetError("the other end was closed")
            data += part
        return data


class TlsPipe:
    """Encrypts what a connection sends, and decrypts what it receives; the other end begins."""

    def __init__(self, context: ssl.SSLContext) -> None:
        """Begins as the end to which the other one has connected."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._is_set_up = False

    def decrypt(self, data: bytes) -> bytes:
        """Returns what these bytes of the other end say; empty: they are a part of the handshake,
        or of a record.

        Raises `OSError` where they are none of the job's; what `encrypt` returns then says why.
        """
        self._incoming.write(data)
        parts = []
        with suppress(ssl.SSLWantReadError):
            if not self._is_set_up:
                self._tls.do_handshake()
                self._is_set_up = True
            while part := self._tls.read(MOST_READ_BYTES):
                parts.append(part)
            raise ConnectionResetError("the other end has ended TLS")
        return b"".join(parts)

    def encrypt(self, data: bytes = b"") -> bytes:
        """Returns what is to be sent for this data, after what the handshake has left to send."""
        if data:
            self._tls.write(data)
        return self._outgoing.read()
