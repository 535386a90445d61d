"""Carries messages between an agent and a worker: lines of JSON over an inherited socket.

The agent looks at its sockets several times a second. A worker wakes it earlier, by a pipe, for
messages that must not wait until then.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
from contextlib import suppress
from typing import Any

from elasticzero.errors import ElasticZeroError
from elasticzero.ipc.messages import Logged, Message, Stepped
from elasticzero.serialization import decode, encode

CHANNEL_FD_VARIABLE = "ELASTICZERO_CHANNEL_FD"
"""Environment variable that names the descriptor of the worker's end."""
WAKEUP_FD_VARIABLE = "ELASTICZERO_BELL_FD"
"""The same for the end of a pipe that wakes the agent when something is written."""
LOW_PRIORITY = (Stepped, Logged)
"""Messages that come with every step; they wake the agent only when the socket is nearly full."""
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Message.__args__}


class ChannelClosed(ElasticZeroError):
    """The other end of the channel is closed."""


class Channel:
    """One end of the socket; `send` may be called from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket, wakeup_fd: int | None = None) -> None:
        """wakeup_fd: wakes the other end, which does not wait for this socket."""
        self._socket = sock
        self._wakeup_fd = wakeup_fd
        self._send_lock = threading.Lock()
        self._buffer = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Raises `ChannelClosed` when nobody reads any more."""
        try:
            with self._send_lock:
                self._socket.sendall(_line(message))
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if self._wakeup_fd is not None and not (
            isinstance(message, LOW_PRIORITY) and self._has_room()
        ):
            with suppress(OSError):  # full: it rings already; closed: the socket tells
                os.write(self._wakeup_fd, b"x")

    def _has_room(self) -> bool:
        """Whether the socket takes more: the kernel says so while little is unread."""
        return bool(select.select([], [self._socket], [], 0)[1])

    def send_with_fd(self, message: Message, fd: int | None, timeout_s: float) -> None:
        """Send a message with a file descriptor, and wait up to `timeout_s` for room; raises
        `ChannelClosed` where there is none in time."""
        line, blocking = _line(message), self._socket.gettimeout()
        try:
            with self._send_lock:
                self._socket.settimeout(timeout_s)
                sent = socket.send_fds(self._socket, [line], [fd]) if fd is not None else 0
                self._socket.sendall(line[sent:])
                self._socket.settimeout(blocking)
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def take_fd(self) -> int | None:
        """The oldest descriptor that has come with messages and was not taken yet; it is the
        caller's from now on."""
        return self._fds.pop(0) if self._fds else None

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message, or None when `timeout_s` passed; raises `ChannelClosed` at the end."""
        while (end := self._buffer.find(b"\n")) < 0:
            if not select.select([self._socket], [], [], timeout_s)[0]:
                return None
            self._fill()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return _parse(line)

    def drain(self) -> list[Message]:
        """Every message that has arrived whole; does not wait. Raises `ChannelClosed` when the
        other end is gone and all it said was given."""
        try:
            while select.select([self._socket], [], [], 0)[0]:
                self._fill()
        except ChannelClosed:
            if b"\n" not in self._buffer:
                raise
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        return [_parse(line) for line in lines]

    def close(self) -> None:
        self._socket.close()

    def _fill(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 1)
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if not data:
            raise ChannelClosed("the other end was closed")
        self._fds += fds
        self._buffer += data


def _line(message: Message) -> bytes:
    text = json.dumps({"kind": type(message).__name__, **encode(message)})
    return f"{text}\n".encode()


def _parse(line: bytes) -> Message:
    value = json.loads(line)
    kind = _KINDS[value.pop("kind")]
    message: Message = decode(kind, value)
    return message
