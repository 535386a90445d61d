"""Sends plain requests to a cloud's metadata server: no proxy, no redirect, short timeouts.

A metadata server is this machine's own, behind a fixed address that is routed nowhere. Its answers
are checked before they are used; an unexpected one is a `MetadataError`, which is worth a retry.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from elasticzero.errors import RetryError, UserError, one_line

CONNECT_S = 2.0
"""Seconds to connect; a metadata server is one hop away."""
ANSWER_S = 5.0
MOST_BYTES = 1 << 20


class MetadataError(RetryError):
    """Says that the metadata server did not answer, or not as it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataResponse:
    """Holds an answer of a metadata server."""

    url: str
    status: int
    headers: Mapping[str, str]
    """Headers, with their names in small letters."""
    text: str
    at_s: float
    """Time at which it came (monotonic clock of this process)."""
    clock_s: float
    """Unix time at which it came by the server's clock, or by this machine's where the server does
    not say."""

    def expect(self, status: int) -> MetadataResponse:
        """Returns this answer; raises `MetadataError` if its status is another."""
        if self.status != status:
            raise MetadataError(f"{self.url} answered with status {self.status}: {self.text:.80}")
        return self

    def json(self) -> dict[str, Any]:
        """Returns the object that the text encodes; raises `MetadataError` for anything else."""
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise MetadataError(f"{self.url} answered with what is no JSON object: {self.text:.80}")
        return value


class MetadataServer:
    """Sends requests to one server, one at a time; `close` from any thread ends the one that
    waits."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if parts.scheme != "http" or not host:
            raise UserError(
                f"{url!r} is no address of a metadata server: http://HOST[:PORT] is expected"
            )
        self.url = url.rstrip("/")
        self._host, self._port, self._path = host, port or 80, parts.path.rstrip("/")
        self._socket: socket.socket | None = None
        self._closed = False

    def get(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        timeout_s: float = ANSWER_S,
    ) -> MetadataResponse:
        """Sends one request.

        Args:
            path: What is requested.
            headers: Headers of the request.
            method: Method of the request.
            timeout_s: Maximum seconds for which the server may be silent.

        Raises:
            MetadataError: No whole answer comes in time.
        """
        url = f"{self.url}{path}"
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s)
            self._socket = connection.sock
            if self._closed:
                raise MetadataError(f"{url} gets no more requests")
            connection.request(method, f"{self._path}{path}", headers=dict(headers))
            response = connection.getresponse()
            data = response.read(MOST_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise MetadataError(f"{url} did not answer: {one_line(error)}") from None
        finally:
            self._socket = None
            connection.close()
        return MetadataResponse(
            url=url,
            status=response.status,
            headers={name.lower(): value for name, value in response.getheaders()},
            text=data.decode(errors="replace"),
            at_s=time.monotonic(),
            clock_s=_clock_s(response.getheader("Date")),
        )

    def close(self) -> None:
        """Refuses all requests from now on; one that waits for its answer fails at once."""
        self._closed = True
        waiting = self._socket
        if waiting is not None:
            with suppress(OSError):
                waiting.shutdown(socket.SHUT_RDWR)


def _clock_s(date: str | None) -> float:
    if date is not None:
        with suppress(ValueError, TypeError):
            return parsedate_to_datetime(date).timestamp()
    return time.time()
