"""Defines what the ranks' store and its clients send each other, and how each proves who it is.

Both ends have the generation's secret from their agents. A connection begins with three messages of
fixed size: the server's nonce, the client's nonce, rank and proof, and the server's proof. Each
proof is an HMAC of both nonces, so none can be used twice. All that follows is sealed: its HMAC
covers the number of the message on its connection, under a key that only these two ends have.
In a job with TLS all of that is encrypted besides, by what reads and writes the sockets.

It touches no socket and no clock.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"EZS1"
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_PAYLOAD_BYTES = 256 << 20
"""Maximum size of a message."""
MAX_VALUES_BYTES = 16 << 20
"""Size of an answer beyond which it holds no further value; the client asks for the rest."""

CHALLENGE = struct.Struct(f"!4s{NONCE_BYTES}s")
"""The server's first message: `MAGIC` and its nonce."""
RESPONSE = struct.Struct(f"!{NONCE_BYTES}sI{PROOF_BYTES}s")
"""The client's: its nonce, its rank and its proof."""
HEADER = struct.Struct(f"!I{PROOF_BYTES}s")
"""What each later message begins with: the size of its payload, and the seal."""
_BODY = struct.Struct("!BqI")
_LENGTH = struct.Struct("!I")


class Operation(IntEnum):
    """What a client asks for."""

    SET = 1
    GET = 2
    WAIT = 3
    CHECK = 4
    ADD = 5
    COMPARE_SET = 6
    DELETE = 7
    APPEND = 8
    COUNT = 9


class Outcome(IntEnum):
    """How a request has ended."""

    DONE = 0
    TIMED_OUT = 1
    REFUSED = 2


class WireError(ConnectionError):
    """The other end has sent what no end of this generation's store sends."""


@dataclass(frozen=True, slots=True)
class Message:
    """A request or an answer."""

    code: int
    """An `Operation` or an `Outcome`."""
    number: int = 0
    """Request: a time limit in milliseconds, or what is added. Answer: a count, a sum or a truth.
    It has 64 bits."""
    parts: tuple[bytes, ...] = ()
    """Keys and values."""


def packed(message: Message) -> bytes:
    """Returns the payload that carries a message; raises `ValueError` for a number of more than 64
    bits, or a part that is too large."""
    try:
        pieces = [_BODY.pack(message.code, message.number, len(message.parts))]
        for part in message.parts:
            pieces += _LENGTH.pack(len(part)), part
    except struct.error as error:
        raise ValueError(f"the ranks' store takes no such number or value: {error}") from None
    return b"".join(pieces)


def unpacked(payload: bytes) -> Message:
    """Returns the message of a payload; raises `WireError` if it carries none."""
    try:
        code, number, count = _BODY.unpack_from(payload)
        parts = tuple(_parts(payload, count))
    except struct.error as error:
        raise WireError(f"a message is cut off: {error}") from None
    return Message(code, number, parts)


def _parts(payload: bytes, count: int) -> Iterator[bytes]:
    start = _BODY.size
    for _ in range(count):
        (size,) = _LENGTH.unpack_from(payload, start)
        start += _LENGTH.size + size
        yield payload[start - size : start]
    if start != len(payload):
        raise WireError("a message has another size than its parts")


class Seal:
    """Seals the messages of one direction of a connection, or opens them, in their order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next_tag(self, payload: bytes) -> bytes:
        """Returns the tag of this payload as the next message."""
        self._count += 1
        return _hmac(self._key, self._count.to_bytes(8, "big") + payload)

    def check(self, tag: bytes, payload: bytes) -> None:
        """Raises `WireError` unless the tag is that of this payload as the next message."""
        if not hmac.compare_digest(tag, self.next_tag(payload)):
            raise WireError("a message was not sealed by the other end")


def framed(seal: Seal | None, payload: bytes) -> bytes:
    """Returns what is sent for a payload.

    Args:
        seal: The seal of the direction; None: the connection does not leave the process.
        payload: The payload.

    Raises:
        ValueError: The payload is larger than any message.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"a message of {len(payload)} bytes is larger than the ranks' store takes "
            f"({MAX_PAYLOAD_BYTES} bytes)"
        )
    tag = seal.next_tag(payload) if seal is not None else b""
    return HEADER.pack(len(payload), tag) + payload


def size_of(header: bytes) -> tuple[int, bytes]:
    """Returns the size of a payload and its tag; raises `WireError` for a size that none has."""
    size, tag = HEADER.unpack(header)
    if size > MAX_PAYLOAD_BYTES:
        raise WireError(f"a message of {size} bytes is larger than any of the ranks' store")
    return size, tag


@dataclass(frozen=True, slots=True)
class Session:
    """The keys of one connection, which follow from the secret, both nonces and the rank."""

    key: bytes

    @classmethod
    def of(cls, secret: bytes, server_nonce: bytes, client_nonce: bytes, rank: int) -> Session:
        """Returns the keys.

        Args:
            secret: The generation's secret.
            server_nonce: The server's random bytes.
            client_nonce: The client's.
            rank: The client's rank.
        """
        return cls(_hmac(secret, MAGIC + server_nonce + client_nonce + _LENGTH.pack(rank)))

    @property
    def client_proof(self) -> bytes:
        """Returns what only a client of this generation can send on this connection."""
        return _hmac(self.key, b"client")

    @property
    def server_proof(self) -> bytes:
        """Returns what only the server of this generation can send on this connection."""
        return _hmac(self.key, b"server")

    def seals(self) -> tuple[Seal, Seal]:
        """Returns the seals of the client's messages and of the server's."""
        return Seal(_hmac(self.key, b"requests")), Seal(_hmac(self.key, b"answers"))


def generation_secret(token: str, password: str) -> bytes:
    """Returns the secret that the processes of one generation share.

    Args:
        token: The token of the generation, which those may know who read etcd or storage.
        password: The token of the job.
    """
    key = hashlib.sha256(password.encode()).digest()
    return _hmac(key, b"the ranks' store of " + token.encode())


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")
