"""Reads a snapshot by byte ranges from an agent's HTTP server."""

from __future__ import annotations

import errno
import http.client
import os
import select
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from elasticzero.checkpoint.storage.base import Views, explain
from elasticzero.checkpoint.storage.signed_requests import RANGE_HEADER, RUN_HEADER, RequestSigner
from elasticzero.errors import StorageError, UserError

_GIVEN_UP = "the server was abandoned"
_REFUSAL_BYTES = 1 << 12
"""Maximum bytes of the text of a refusal; after a longer one the connection is closed."""


class HttpStorage:
    """Reads one step's files from an agent's HTTP server.

    Each thread that reads uses a connection of its own meanwhile.
    """

    def __init__(
        self,
        base_url: str,
        secret: str,
        *,
        timeout_s: float = 10.0,
        run: int | None = None,
        tls: ssl.SSLContext | None = None,
        proofs: bool = True,
    ) -> None:
        """Prepares to read; the first request connects.

        Args:
            base_url: URL of the step, `http://host:port/snapshots/<generation>/<step>`, or with
                https.
            secret: Secret of the job's run.
            timeout_s: Seconds for which the server may be silent.
            run: Number of the job's run that the server must be of; None: of any.
            tls: Context of the connections of an https:// address; None for http://.
            proofs: Whether requests prove the secret; False: they show it, as a server of the
                release before expects.

        Raises:
            UserError: The URL is not such an address.
        """
        parts = urllib.parse.urlsplit(base_url)
        scheme = "http" if tls is None else "https"
        if parts.scheme != scheme or not parts.hostname:
            raise UserError(f"{base_url!r} is not an {scheme}:// address")
        self.where = base_url.rstrip("/")
        self._path = parts.path.rstrip("/")
        self._headers = {} if run is None else {RUN_HEADER: str(run)}
        self._secret, self._proofs = secret, proofs
        self._server = (parts.hostname, parts.port or 80)
        self._tls = tls
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._abandoned = False
        self._busy: set[_CancellableConnection] = set()
        self._idle: list[_CancellableConnection] = []

    def size(self, name: str) -> int:
        with self._connected() as connection:
            response = self._request(connection, "HEAD", name, {})
            response.read()
            if response.status != 200:
                raise self._refusal(connection, name, response)
            length = response.headers.get("Content-Length", "")
            if not length.isdecimal():
                raise StorageError(f"{self.where}/{name}: the server does not say its size")
            return int(length)

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        size = sum(map(len, buffers))
        if not size:
            return 0
        headers = {RANGE_HEADER: f"bytes={start}-{start + size - 1}"}
        with self._connected() as connection:
            response = self._request(connection, "GET", name, headers)
            if response.status == 416:
                connection.close()
                return 0
            if response.status != 206:
                raise self._refusal(connection, name, response)
            try:
                return self._receive(response, start, buffers)
            except (OSError, http.client.HTTPException) as error:
                raise StorageError(f"{self.where}/{name}: {explain(error)}") from error

    def take_over(self, earlier: HttpStorage) -> None:
        """Goes on with the connections of another step's storage, which nobody uses any more.

        They are closed where they lead to another server, have shown another secret or
        certificate, or were abandoned.
        """
        if earlier._peer() == self._peer() and not earlier._abandoned:
            self._idle += earlier._idle
            earlier._idle = []
        earlier.close()

    def _peer(self) -> tuple[object, ...]:
        """Returns what a connection depends on: a renewed certificate has another context."""
        return (self._server, self._secret, self._proofs, self._timeout_s, self._tls)

    def close(self) -> None:
        """Closes the connections; the next read connects again."""
        while self._idle:
            self._idle.pop().close()

    def abandon(self) -> None:
        """Abandons the server for good; any thread may call it.

        Reads in progress raise at once, whatever they wait for, and so does every later one.
        """
        with self._lock:
            self._abandoned = True
            busy = list(self._busy)
        for connection in busy:
            connection.cancel()

    @contextmanager
    def _connected(self) -> Iterator[_CancellableConnection]:
        """Yields a connection for one request, which is kept for the next one after an answer.

        That a file is missing is an answer: a node that waits for a file asks for it again and
        again, and a connection with TLS costs more than the question.
        """
        is_kept = False
        try:
            connection = self._idle.pop()
        except IndexError:
            signer = RequestSigner(self._secret, proofs=self._proofs)
            connection = _CancellableConnection(
                *self._server, self._timeout_s, tls=self._tls, signer=signer
            )
        try:
            with self._lock:
                if self._abandoned:
                    raise StorageError(f"{self.where}: {_GIVEN_UP}")
                self._busy.add(connection)
            yield connection
            is_kept = True
        except FileNotFoundError:
            is_kept = True
            raise
        finally:
            with self._lock:
                self._busy.discard(connection)
            if is_kept:
                self._idle.append(connection)
            else:
                connection.close()

    def _request(
        self,
        connection: _CancellableConnection,
        method: str,
        name: str,
        headers: dict[str, str],
    ) -> http.client.HTTPResponse:
        path = f"{self._path}/{urllib.parse.quote(name, safe='')}"
        for last_try in (connection.sock is None, True):
            try:
                return connection.signer.send(connection, method, path, self._headers | headers)
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
        content_range = response.headers.get("Content-Range", "")
        most = sum(map(len, buffers))
        if length is None or length > most or not content_range.startswith(f"bytes {start}-"):
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

    def _refusal(
        self,
        connection: _CancellableConnection,
        name: str,
        response: http.client.HTTPResponse,
    ) -> Exception:
        """Returns the error that a response stands for.

        Args:
            connection: The connection, which is closed if it cannot be used again.
            name: Name of the file.
            response: The response, whose body is not read yet.
        """
        if response.status == 404:
            with suppress(OSError, http.client.HTTPException):
                response.read(_REFUSAL_BYTES)
            if not response.isclosed():
                connection.close()
            return FileNotFoundError(errno.ENOENT, "no such file", f"{self.where}/{name}")
        return StorageError(
            f"{self.where}/{name}: the server answered {response.status} {response.reason}"
        )


class _CancellableConnection(http.client.HTTPConnection):
    """Connects so that another thread can cancel it at any moment, also during the set-up."""

    def __init__(
        self,
        host: str,
        port: int,
        timeout_s: float,
        *,
        tls: ssl.SSLContext | None,
        signer: RequestSigner,
    ) -> None:
        """Connects on demand.

        Args:
            host: Name or address of the server.
            port: Its port.
            timeout_s: Seconds for which the server may be silent.
            tls: Context of the connection; None: it is without TLS.
            signer: Signs the requests of this connection.
        """
        super().__init__(host, port, timeout=timeout_s)
        self.signer = signer
        self._timeout_s = timeout_s
        self._tls = tls
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._end: socket.socket | None = None
        """A descriptor for `cancel` alone. The connection's own may be closed at any moment, and
        its number may then belong to another file."""

    def cancel(self) -> None:
        """Makes every wait for this connection, and every later connect, fail at once."""
        with self._lock:
            self._is_cancelled = True
            if self._end is not None:
                with suppress(OSError):
                    self._end.shutdown(socket.SHUT_RDWR)

    def connect(self) -> None:
        lost: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(
            self.host, self.port, type=socket.SOCK_STREAM
        ):
            sock = socket.socket(family, kind, protocol)
            try:
                self._dial(sock, address)
                self.sock = sock if self._tls is None else self._tls.wrap_socket(sock)
                return
            except OSError as error:
                sock.close()
                lost = error
        assert lost is not None  # a name without an address raises an error of its own
        raise lost

    def _dial(self, sock: socket.socket, address: Any) -> None:
        """Connects the socket; `cancel` can end that from the first wait on."""
        sock.setblocking(False)
        with self._lock:
            if self._is_cancelled:
                raise ConnectionAbortedError(errno.ECONNABORTED, _GIVEN_UP)
            self._drop_end()
            self._end = sock.dup()
            code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            poll = select.poll()  # select fails beyond 1024 open files, which training may have
            poll.register(sock, select.POLLOUT)
            if not poll.poll(1000 * self._timeout_s):
                raise TimeoutError("timed out")
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        sock.settimeout(self._timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        super().close()
        with self._lock:
            self._drop_end()

    def _drop_end(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None
