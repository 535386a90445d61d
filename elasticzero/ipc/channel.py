"""Carries messages between an agent and a worker as lines of JSON over an inherited socket.

The agent polls its sockets several times a second. A worker wakes it earlier, by a pipe, for
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
"""Environment variable with the descriptor of the worker's end."""
WAKEUP_FD_VARIABLE = "ELASTICZERO_BELL_FD"
"""Environment variable with the descriptor of a pipe that wakes the agent when it is written to."""
LOW_PRIORITY = (Stepped, Logged)
"""Messages that come with every step; they wake the agent only when the socket is nearly full."""
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Message.__args__}


class ChannelClosed(ElasticZeroError):
    """The other end of the channel is closed."""


class Channel:
    """Sends and receives on one end of the socket.

    Any thread may call `send`, and one thread calls `receive`.
    """

    def __init__(self, sock: socket.socket, wakeup_fd: int | None = None) -> None:
        """Takes the socket, and `wakeup_fd`, which wakes the other end if that does not wait on the
        socket."""
        self._socket = sock
        self._wakeup_fd = wakeup_fd
        self._send_lock = threading.Lock()
        self._buffer = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends a message; raises `ChannelClosed` if the other end is closed."""
        try:
            line = _line(message)  # outside of the lock: a collection may send a message as well
            with self._send_lock:
                self._socket.sendall(line)
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if self._wakeup_fd is not None and not (
            isinstance(message, LOW_PRIORITY) and self._has_room()
        ):
            with suppress(OSError):  # full: a wake-up is pending; closed: the socket reports it
                os.write(self._wakeup_fd, b"x")

    def _has_room(self) -> bool:
        """Returns whether the socket takes more; the kernel says so while few bytes are unread."""
        return bool(select.select([], [self._socket], [], 0)[1])

    def send_with_fd(self, message: Message, fd: int | None, timeout_s: float) -> None:
        """Sends a message with a file descriptor.

        Args:
            message: The message.
            fd: The file descriptor; None: there is none.
            timeout_s: Seconds to wait for room.

        Raises:
            ChannelClosed: There was no room in time, or the other end is closed.
        """
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
        """Returns the oldest descriptor that has arrived and was not taken yet; the caller owns
        it."""
        return self._fds.pop(0) if self._fds else None

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Returns the next message, or None after `timeout_s`; raises `ChannelClosed` at the
        end."""
        while (end := self._buffer.find(b"\n")) < 0:
            if not select.select([self._socket], [], [], timeout_s)[0]:
                return None
            self._fill()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return _parse(line)

    def drain(self) -> list[Message]:
        """Returns every message that has arrived whole, without waiting.

        Raises `ChannelClosed` once the other end is closed and all its messages were returned.
        """
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
    text = json.dumps({"kind": type(message).__name__, **encode(message, complete=True)})
    return f"{text}\n".encode()


def _parse(line: bytes) -> Message:
    value = json.loads(line)
    kind = _KINDS[value.pop("kind")]
    message: Message = decode(kind, value)
    return message
