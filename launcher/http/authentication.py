"""Decides what a request shows of the job's secret: a proof, the token itself, or nothing.

A node of this release proves the secret of its run (`storage.signed_requests`). Browsers with the
status page, people, and nodes of the release before show the job's token.

Rules:
 AU1 A proof counts once. It is of a nonce of this process that is not older than `NONCE_S`, and has
     a higher count than every proof of this nonce before it.
 AU2 A nonce takes no memory until a right proof has come with it. So clients without the secret can
     make this process forget nothing, however many nonces they ask for.
 AU3 At most `MAX_NONCES` are remembered. Beyond that the oldest are forgotten, and every nonce that
     was handed out before them counts as too old. Their holders are handed new ones.
 AU4 Ages are counted by this process's own clock alone; clients need none.
 AU5 A head of which two programs could read two requests proves nothing: each line is a header's.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections.abc import Callable
from enum import Enum, auto

from elasticzero.checkpoint.storage.signed_requests import (
    RANGE_HEADER,
    RUN_HEADER,
    SCHEME,
    Credentials,
    SignedRequest,
    challenge,
    credentials_in,
)
from elasticzero.launcher.secrets import Secret
from elasticzero.security.proofs import run_secret

NONCE_S = 60.0
"""Seconds for which a nonce is accepted; a request with an older one is answered with a new one."""
MAX_NONCES = 4096
"""Maximum number of nonces of which the highest count is remembered."""
_ISSUED_BYTES, _RANDOM_BYTES, _MAC_BYTES = 8, 8, 16
_BEARER = re.compile(rb"\nauthorization:[ \t]*bearer[ \t]+([^\r\n]*)", re.IGNORECASE)
_SIGNED = re.compile(
    rb"\nauthorization:[ \t]*%b(?![^ \t\r\n])([^\r\n]*)" % SCHEME.encode(), re.IGNORECASE
)
_HEAD = re.compile(rb"([A-Z]{1,16}) ([!-~]+) HTTP/1\.[01]\r?\n(?:[!-9;-~]+:[^\r\n]*\r?\n)*\r?\n")
_COVERED = tuple(
    re.compile(rb"\n%b:([^\r\n]*)" % name.encode(), re.IGNORECASE)
    for name in (RANGE_HEADER, RUN_HEADER)
)


class Verdict(Enum):
    """Says what a request shows of the job's secret."""

    STRANGER = auto()
    """Nothing, or a wrong token."""
    ASKS = auto()
    """It asks for a nonce, or its nonce is too old."""
    REFUSED = auto()
    """Its proof is wrong, or was used before."""
    TOKEN = auto()
    """The job's token."""
    PROOF = auto()
    """A proof of the secret of this run."""

    @property
    def is_holder(self) -> bool:
        """Returns whether the client has the secret."""
        return self in (Verdict.TOKEN, Verdict.PROOF)

    @property
    def is_challenged(self) -> bool:
        """Returns whether the client gets a nonce as its answer."""
        return self in (Verdict.ASKS, Verdict.REFUSED)


class Nonces:
    """Hands out nonces, and accepts each count of each of them once; for use by one thread.

    A nonce holds the time at which it was handed out, and a MAC under a key of this process.
    """

    def __init__(self, clock: Callable[[], float], most: int = MAX_NONCES) -> None:
        """Begins with none.

        Args:
            clock: Returns the time in seconds; it never goes back.
            most: Maximum number of nonces that are remembered.
        """
        self._clock = clock
        self._began_s = clock()
        self._most = most
        self._key = secrets.token_bytes(32)
        self._counts: dict[str, int] = {}
        """Highest count that was accepted, by nonce."""
        self._floor_us = -1
        """Nonces that were handed out up to this time count as too old (AU3)."""

    def __len__(self) -> int:
        return len(self._counts)

    def issue(self) -> str:
        """Returns a new nonce."""
        body = self._now_us().to_bytes(_ISSUED_BYTES) + secrets.token_bytes(_RANDOM_BYTES)
        return (body + self._mac(body)).hex()

    def is_current(self, nonce: str) -> bool:
        """Returns whether this process has handed out a nonce, and not too long ago."""
        data = bytes.fromhex(nonce)
        body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            return False
        issued_us = _issued_us(nonce)
        return issued_us > self._floor_us and self._now_us() - issued_us <= NONCE_S * 1e6

    def accept(self, nonce: str, count: int) -> bool:
        """Records the use of a current nonce with a right proof; returns False if it is no new
        one."""
        if count <= self._counts.get(nonce, 0):
            return False
        self._counts[nonce] = count
        if len(self._counts) > self._most:
            self._forget_oldest()
        return True

    def _forget_oldest(self) -> None:
        """Forgets half of the nonces, all of which count as too old from now on."""
        by_age = sorted(self._counts, key=_issued_us)
        forgotten = by_age[: len(by_age) // 2]
        self._floor_us = _issued_us(forgotten[-1])
        for nonce in forgotten:
            del self._counts[nonce]

    def _now_us(self) -> int:
        return int((self._clock() - self._began_s) * 1e6)

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")[:_MAC_BYTES]


def _issued_us(nonce: str) -> int:
    """Returns when a nonce was handed out, in microseconds since its process began to."""
    return int(nonce[: 2 * _ISSUED_BYTES], 16)


class Authenticator:
    """Judges the heads of requests; for use by one thread."""

    def __init__(
        self,
        token: Callable[[], Secret],
        run: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins with no nonce handed out.

        Args:
            token: Returns the job's token.
            run: Number of the agent's run of the job.
            clock: Returns the time in seconds; it never goes back.
        """
        self._token = token
        self._run = run
        self.nonces = Nonces(clock)

    def judge(self, head: bytes) -> Verdict:
        """Returns what a head shows of the job's secret. The same proof counts once."""
        if (bearer := _BEARER.search(head)) is not None:
            is_token = hmac.compare_digest(bearer[1].strip(), self._token().reveal.encode())
            return Verdict.TOKEN if is_token else Verdict.STRANGER
        if (signed := _SIGNED.search(head)) is None:
            return Verdict.STRANGER
        credentials = credentials_in(signed[1].decode("latin-1").strip(" \t"))
        if credentials is None or not self.nonces.is_current(credentials.nonce):
            return Verdict.ASKS
        return Verdict.PROOF if self._is_proven(head, credentials) else Verdict.REFUSED

    def challenge(self) -> str:
        """Returns the value of `WWW-Authenticate` that hands out a new nonce."""
        return challenge(self.nonces.issue())

    def _is_proven(self, head: bytes, credentials: Credentials) -> bool:
        request = request_in(head)
        if request is None:
            return False
        secret = run_secret(self._token().reveal, self._run)
        expected = request.prove(secret, credentials.nonce, credentials.count)
        if not hmac.compare_digest(credentials.proof, expected):
            return False
        return self.nonces.accept(credentials.nonce, credentials.count)


def request_in(head: bytes) -> SignedRequest | None:
    """Returns what a proof covers of a request; None: the head can be read in two ways (AU5)."""
    match = _HEAD.fullmatch(head)
    values = [pattern.findall(head) for pattern in _COVERED]
    if match is None or any(len(of_header) > 1 for of_header in values):
        return None
    byte_range, run = (b"".join(of_header).strip().decode("latin-1") for of_header in values)
    return SignedRequest(
        method=match[1].decode(), target=match[2].decode(), byte_range=byte_range, run=run
    )
