"""Limits what unauthenticated clients can do to an agent's HTTP server.

They get a short time for each request, few connections, and few lines in the log.
"""

from __future__ import annotations

import io
import logging
import socket
import threading
import time
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 10.0
"""Seconds after a request's first byte within which its head must be complete."""
MAX_CONNECTIONS = 256
"""Maximum number of open connections; the oldest unauthenticated one is closed beyond it."""
LOG_INTERVAL_S = 60.0
"""Least number of seconds between two lines on refused requests."""


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


class Connections:
    """Holds the open connections, oldest first, and which of them are authenticated."""

    def __init__(self) -> None:
        self._authenticated: dict[socket.socket, bool] = {}
        self._lock = threading.Lock()

    def add(self, connection: socket.socket) -> socket.socket | None:
        """Adds a connection; returns the one that is closed for it, which may be itself."""
        closed = None
        with self._lock:
            if len(self._authenticated) >= MAX_CONNECTIONS:
                others = (other for other, shown in self._authenticated.items() if not shown)
                closed = next(others, connection)
                self._authenticated.pop(closed, None)
            if closed is not connection:
                self._authenticated[connection] = False
        if closed is not None:
            _shut(closed)
        return closed

    def mark_authenticated(self, connection: socket.socket) -> None:
        """Records that a connection has shown the token."""
        with self._lock:
            if connection in self._authenticated:
                self._authenticated[connection] = True

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._authenticated.pop(connection, None)

    def end(self) -> None:
        """Closes all connections."""
        with self._lock:
            connections = list(self._authenticated)
        for connection in connections:
            _shut(connection)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class HeadTimeoutReader(io.RawIOBase):
    """Reads what a client sends, which may pause between requests but not within a head."""

    def __init__(self, connection: socket.socket, idle_s: float) -> None:
        self._connection = connection
        self._idle_s = idle_s
        self.began_s: float | None = None
        """Time at which the first byte of the present request came."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._idle_s
        if self.began_s is not None:
            left_s = min(left_s, self.began_s + HEAD_TIMEOUT_S - time.monotonic())
        if left_s <= 0:
            raise TimeoutError("the head of the request was not whole in time")
        self._connection.settimeout(left_s)
        try:
            count = self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(self._idle_s)
        if self.began_s is None:
            self.began_s = time.monotonic()
        return count
