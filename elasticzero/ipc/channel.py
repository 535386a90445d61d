"""Carries messages between an agent and a worker as lines of JSON over an inherited socket.

The agent polls its sockets several times a second. A worker wakes it earlier, by a pipe, for
messages that must not wait until then. What a script starts inherits a worker's socket, and may
write anything into it: a line that is no message is left out and counted, and no line takes more
memory than MAX_LINE_BYTES.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from elasticzero.errors import ElasticZeroError
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import Logged, Message, Stepped
from elasticzero.serialization import RecordError, decode, encode, parse_json
from elasticzero.text import shortened, with_short_lines

CHANNEL_FD_VARIABLE = "ELASTICZERO_CHANNEL_FD"
"""Environment variable with the descriptor of the worker's end."""
WAKEUP_FD_VARIABLE = "ELASTICZERO_BELL_FD"
"""Environment variable with the descriptor of a pipe that wakes the agent when it is written to."""
LOW_PRIORITY = (Stepped, Logged)
"""Messages that come with every step; they wake the agent only when the socket is nearly full."""
MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line; a longer one is left out."""
MAX_VALUES = 1 << 17
"""Maximum number of values in a line, by its punctuation: each takes up to 240 bytes of memory."""
MAX_DRAIN_BYTES = 1 << 20
"""Number of bytes after which a call of `drain` takes in no more. A socket holds less, and a
process that writes without end does not keep the agent."""
MAX_ERROR_CHARACTERS = 1 << 20
"""Number of characters of an error, and of its traceback, that are sent if the line is too long."""
MAX_ERROR_LINE_CHARACTERS = 1000
"""Number of characters of each line of that traceback, whose last line repeats the error."""
READ_BYTES = 1 << 16
"""Maximum number of bytes of one read."""
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"')
"""A string in JSON."""
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Message.__args__}


class ChannelClosed(ElasticZeroError):
    """The other end of the channel is closed."""


class MessageTooLong(ElasticZeroError):
    """A message is longer than a line of the channel can be."""


class _Lines:
    """Cuts the bytes that arrive into lines of bounded length."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched_bytes = 0
        """Number of bytes at the begin of the buffer in which there is no end of a line."""
        self._skips = False
        """True until the end of a line that is too long."""
        self.left_out = 0
        """Number of lines that were too long."""

    def take(self, data: bytes) -> None:
        self._buffer += data

    def pop(self) -> bytes | None:
        """Returns the next whole line; None: none has arrived."""
        while (end := self._buffer.find(b"\n", self._searched_bytes)) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._searched_bytes = 0
            if not self._skips:
                return line
            self._skips = False
        self._searched_bytes = len(self._buffer)
        if self._skips or len(self._buffer) > MAX_LINE_BYTES:
            self.left_out += not self._skips
            self._skips = True
            self._buffer.clear()
            self._searched_bytes = 0
        return None


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
        self._lines = _Lines()
        self._fds: list[int] = []
        self._refusal: str | None = None
        self._refused = False
        """True once a line was left out."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends a message; raises `ChannelClosed` if the other end is closed, and `MessageTooLong`
        for what no line can hold."""
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
        return bool(_ready([self._socket.fileno()], select.POLLOUT, 0))

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
        while (message := self._next()) is None:
            if not readable([self._socket.fileno()], timeout_s):
                return None
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, READ_BYTES, 1)
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            self._fds += fds
            self._take(data)
        return message

    def drain(self) -> list[Message]:
        """Returns the messages that have arrived whole, without waiting; takes no descriptors.

        Raises `ChannelClosed` once the other end is closed and all its messages were returned.
        """
        messages = self._whole()
        taken_bytes = 0
        try:
            while taken_bytes < MAX_DRAIN_BYTES and readable([self._socket.fileno()], 0):
                try:
                    data = self._socket.recv(READ_BYTES)  # descriptors that came with it are closed
                except OSError as error:
                    raise ChannelClosed(str(error)) from None
                self._take(data)
                taken_bytes += len(data)
                messages += self._whole()
        except ChannelClosed:
            if not messages:
                raise
        return messages

    def take_refusal(self) -> str | None:
        """Returns, once, what is wrong with the first line that was left out."""
        refusal, self._refusal = self._refusal, None
        return refusal

    def close(self) -> None:
        self._socket.close()

    def _take(self, data: bytes) -> None:
        if not data:
            raise ChannelClosed("the other end was closed")
        self._lines.take(data)

    def _whole(self) -> list[Message]:
        """Returns the messages that have arrived whole."""
        messages: list[Message] = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _next(self) -> Message | None:
        """Returns the next message that has arrived whole; leaves out lines that are none."""
        while (line := self._lines.pop()) is not None:
            try:
                return _parse(line)
            except RecordError as error:
                self._refuse(str(error))
        if self._lines.left_out:
            self._refuse(f"it has more than {MAX_LINE_BYTES} bytes")
        return None

    def _refuse(self, reason: str) -> None:
        if not self._refused:
            self._refused, self._refusal = True, reason


def readable(fds: Iterable[int], timeout_s: float | None) -> list[int]:
    """Returns the descriptors that can be read, or whose other end is gone, at once or within the
    time.

    `select.select` refuses descriptors from 1024 on, which a process with many connections has.

    Args:
        fds: The descriptors, which must be open.
        timeout_s: Seconds to wait for one of them; None: no limit.
    """
    return _ready(fds, select.POLLIN, timeout_s)


def _ready(fds: Iterable[int], events: int, timeout_s: float | None) -> list[int]:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, events)
    limit_ms = None if timeout_s is None else math.ceil(timeout_s * 1000)
    return [fd for fd, _ in poller.poll(limit_ms)]


def _line(message: Message) -> bytes:
    line = _encoded(message)
    if len(line) > MAX_LINE_BYTES and isinstance(message, Failed):
        text, trace = message.message, message.traceback
        trace = with_short_lines(trace, MAX_ERROR_LINE_CHARACTERS)[-MAX_ERROR_CHARACTERS:]
        text = shortened(text, MAX_ERROR_CHARACTERS)
        line = _encoded(replace(message, message=text, traceback=trace))
    if len(line) > MAX_LINE_BYTES:
        raise MessageTooLong(
            f"a message {type(message).__name__} between worker and agent has {len(line)} bytes; "
            f"it can have {MAX_LINE_BYTES}"
        )
    return line


def _encoded(message: Message) -> bytes:
    text = json.dumps({"kind": type(message).__name__, **encode(message, complete=True)})
    return f"{text}\n".encode()


def _values(line: bytes) -> int:
    return line.count(b"{") + line.count(b"[") + line.count(b",")


def _parse(line: bytes) -> Message:
    """Returns the message of a line; raises `RecordError` if it is none."""
    if not line.startswith(b"{"):
        raise RecordError("it is no object")
    if _values(line) > MAX_VALUES and _values(_TEXT.sub(b"", line)) > MAX_VALUES:
        raise RecordError(f"it has more than {MAX_VALUES} values")
    value = parse_json(line, "message")
    name = value.pop("kind", None) if isinstance(value, dict) else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise RecordError("it is of no kind that this release has")
    message: Message = decode(kind, value)
    return message
