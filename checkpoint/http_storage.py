"""A snapshot behind an agent's HTTP server, read by byte ranges."""

from __future__ import annotations

import errno
import http.client
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from elasticzero.checkpoint.storage import Views, explain
from elasticzero.errors import StorageError, UserError


class HttpStorage:
    """One step's files behind an agent's HTTP server; read only. Each thread that reads has a
    connection to itself meanwhile."""

    def __init__(self, base_url: str, token: str, *, timeout_s: float = 10.0) -> None:
        """`base_url`: the address of the step, `http://host:port/snapshots/<generation>/<step>`."""
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme != "http" or not parts.hostname:
            raise UserError(f"{base_url!r} is not an http:// address")
        self.where = base_url.rstrip("/")
        self._path = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._server = (parts.hostname, parts.port or 80)
        self._timeout_s = timeout_s
        self._idle: list[http.client.HTTPConnection] = []

    def size(self, name: str) -> int:
        with self._connected() as connection:
            response = self._request(connection, "HEAD", name, {})
            response.read()
            if response.status != 200:
                raise self._refusal(name, response)
            length = response.headers.get("Content-Length", "")
            if not length.isdecimal():
                raise StorageError(f"{self.where}/{name}: the server does not say its size")
            return int(length)

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        size = sum(map(len, buffers))
        if not size:
            return 0
        headers = {"Range": f"bytes={start}-{start + size - 1}"}
        with self._connected() as connection:
            response = self._request(connection, "GET", name, headers)
            if response.status == 416:
                connection.close()
                return 0
            if response.status != 206:
                raise self._refusal(name, response)
            try:
                return self._receive(response, start, buffers)
            except (OSError, http.client.HTTPException) as error:
                raise StorageError(f"{self.where}/{name}: {explain(error)}") from error

    def close(self) -> None:
        """Hang up; the next read connects again."""
        while self._idle:
            self._idle.pop().close()

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        """A connection for one request; kept for the next if all goes well."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = http.client.HTTPConnection(*self._server, timeout=self._timeout_s)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)

    def _request(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        name: str,
        headers: dict[str, str],
    ) -> http.client.HTTPResponse:
        path = f"{self._path}/{urllib.parse.quote(name, safe='')}"
        for last_try in (connection.sock is None, True):
            try:
                connection.request(method, path, headers=self._headers | headers)
                return connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if last_try:
                    raise StorageError(f"{self.where}/{name}: {explain(error)}") from error
        raise AssertionError("unreachable")

    @staticmethod
    def _receive(
        response: http.client.HTTPResponse, start: int, buffers: Sequence[memoryview]
    ) -> int:
        length = response.length
        given = response.headers.get("Content-Range", "")
        most = sum(map(len, buffers))
        if length is None or length > most or not given.startswith(f"bytes {start}-"):
            raise http.client.HTTPException("the answer is not the range that was asked for")
        done = 0
        for view in Views(buffers).take(length):
            filled = 0
            while filled < len(view):
                count = response.readinto(view[filled:])
                if not count:
                    raise http.client.HTTPException(f"the answer broke off after {done} bytes")
                filled += count
                done += count
        return done

    def _refusal(self, name: str, response: http.client.HTTPResponse) -> Exception:
        if response.status == 404:
            return FileNotFoundError(errno.ENOENT, "no such file", f"{self.where}/{name}")
        return StorageError(
            f"{self.where}/{name}: the server answered {response.status} {response.reason}"
        )
