"""Signs requests to agents: a request proves that its process has the secret, and does not show it.

The first request of a connection asks for a nonce. The server answers it at once, with status 401
and a nonce in the header `WWW-Authenticate`. From then on each request has a proof in its header
`Authorization`. The proof covers the method, the target, the headers that change the answer, the
nonce, and a count that rises with each request. Where a nonce is too old, or the server has begun
anew, the server answers with another nonce, and the request is sent once more. Requests have no
body, and agents refuse one, so that no digest of a body is part of the proof.

A request never falls back to the secret itself, whatever a server answers. Only a process that
knows from etcd that an agent is of the release before sends it the token, as that release does.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticzero.security.proofs import proof

RUN_HEADER = "ElasticZero-Run"
"""Header of a request: number of the requesting process's run of the job. An agent of another run
refuses it."""
RANGE_HEADER = "Range"
SCHEME = "ElasticZero"
"""Name of this scheme in the headers `Authorization` and `WWW-Authenticate`."""
_CREDENTIALS = re.compile(
    r"nonce=([0-9a-f]{64}), count=([1-9][0-9]{0,14}), proof=([0-9a-f]{64})", re.ASCII
)
_CHALLENGE = re.compile(rf"{SCHEME} nonce=([0-9a-f]{{64}})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRequest:
    """Holds all of a request that its proof covers."""

    method: str
    target: str
    """Path and query, as they are sent."""
    byte_range: str = ""
    """Value of the header `Range`; empty: there is none."""
    run: str = ""
    """Value of the header `ElasticZero-Run`; empty: there is none."""

    def prove(self, secret: str, nonce: str, count: int) -> str:
        """Returns the proof of this request, in hexadecimal.

        Args:
            secret: Secret of the job's run.
            nonce: Nonce of the server.
            count: Number of the request among those with this nonce, from 1.
        """
        covered = (self.method, self.target, self.byte_range, self.run)
        return proof(secret, "request", *covered, nonce, str(count)).hex()


@dataclass(frozen=True, slots=True)
class Credentials:
    """Holds what a signed request has in its header `Authorization`."""

    nonce: str
    count: int
    proof: str = field(repr=False)

    def header(self) -> str:
        """Returns the value of the header."""
        return f"{SCHEME} nonce={self.nonce}, count={self.count}, proof={self.proof}"


def credentials_in(text: str) -> Credentials | None:
    """Returns the credentials that follow the name of the scheme; None: there are none."""
    match = _CREDENTIALS.fullmatch(text)
    return None if match is None else Credentials(match[1], int(match[2]), match[3])


def challenge(nonce: str) -> str:
    """Returns the value of `WWW-Authenticate` by which a server hands out a nonce."""
    return f"{SCHEME} nonce={nonce}"


class RequestSigner:
    """Sends the requests of one connection, one at a time, and signs them."""

    def __init__(self, secret: str, *, proofs: bool = True) -> None:
        """Begins without a nonce.

        Args:
            secret: Secret of the job's run.
            proofs: Whether requests prove the secret; False: they show it, as an agent of the
                release before expects.
        """
        self._secret = secret
        self._proofs = proofs
        self._nonce: str | None = None
        self._count = 0

    def send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: Mapping[str, str],
    ) -> http.client.HTTPResponse:
        """Sends a request, and returns the response, whose body is not read yet.

        Args:
            connection: Connection to the agent; it connects on demand.
            method: GET or HEAD.
            target: Path and query.
            headers: Headers of the request besides `Authorization`.

        Raises:
            OSError: The connection is broken.
            HTTPException: The server does not answer as HTTP has it.
        """
        request = SignedRequest(
            method=method,
            target=target,
            byte_range=headers.get(RANGE_HEADER, ""),
            run=headers.get(RUN_HEADER, ""),
        )
        asks = self._proofs and self._nonce is None
        exchange = self._exchange_again if asks else self._exchange
        response = exchange(connection, request, headers)
        if (nonce := self._nonce_in(response)) is None:
            return response
        self._nonce, self._count = nonce, 0
        if response.read(1):
            connection.close()
        return self._exchange_again(connection, request, headers)

    def _exchange_again(
        self,
        connection: http.client.HTTPConnection,
        request: SignedRequest,
        headers: Mapping[str, str],
    ) -> http.client.HTTPResponse:
        """Does the same as `_exchange`, and once more if the connection is lost.

        Until the proof it is a stranger's, of which a server closes some where it has too many.

        Args:
            connection: Connection to the agent; it connects on demand.
            request: What the proof covers.
            headers: Headers of the request besides `Authorization`.
        """
        try:
            return self._exchange(connection, request, headers)
        except ConnectionError:
            connection.close()
            return self._exchange(connection, request, headers)

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        request: SignedRequest,
        headers: Mapping[str, str],
    ) -> http.client.HTTPResponse:
        """Sends the request once, and returns the response.

        Args:
            connection: Connection to the agent; it connects on demand.
            request: What the proof covers.
            headers: Headers of the request besides `Authorization`.
        """
        authorization = {"Authorization": self._authorization(request)}
        connection.request(request.method, request.target, headers={**headers, **authorization})
        return connection.getresponse()

    def _authorization(self, request: SignedRequest) -> str:
        if not self._proofs:
            return f"Bearer {self._secret}"
        if self._nonce is None:
            return SCHEME
        self._count += 1
        proven = request.prove(self._secret, self._nonce, self._count)
        return Credentials(self._nonce, self._count, proven).header()

    def _nonce_in(self, response: http.client.HTTPResponse) -> str | None:
        """Returns the nonce that a response hands out; None: it hands out none."""
        if response.status != http.HTTPStatus.UNAUTHORIZED or not self._proofs:
            return None
        match = _CHALLENGE.fullmatch(response.headers.get("WWW-Authenticate", ""))
        return None if match is None else match[1]
