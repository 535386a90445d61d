"""Serves an agent's metrics, health, status, status page and events, and the bytes of snapshots.

Metrics, health and the page, which holds nothing of the job, are open: scrapes, probes and browsers
expect that. All else needs the job's token, except the status where `open_status` is set. Only GET
and HEAD are allowed. A client without the token gets a short time for each request. Its connection
is the first to be closed when there are too many, and the log has one line a minute for all such
clients.
"""

from __future__ import annotations

import errno
import hmac
import io
import json
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO, Protocol, cast

from elasticzero.errors import OperatorError
from elasticzero.launcher.http.agent_client import JOB, OWN_JOB, SCALARS, STATUS
from elasticzero.launcher.http.limits import Connections, HeadTimeoutReader, RefusalLog
from elasticzero.launcher.http.requests import RequestRefused, byte_range, snapshot_file
from elasticzero.launcher.observability.event_log import LogPart
from elasticzero.launcher.observability.metrics import CONTENT_TYPE, Metrics
from elasticzero.launcher.secrets import Secret
from elasticzero.ops.dashboard.page import SAFE_HEADERS, status_page

log = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 30.0
"""Seconds without traffic after which a connection is closed."""

EVENTS_BYTES = 16 << 20
"""Bytes of events that are sent if a request does not say how many."""
LEFT_OUT_HEADER = "ElasticZero-Left-Out-Bytes"
"""Header of `/events`: bytes of older events that are not sent."""
_MOST = re.compile(r"\?most=(\d{1,12})\Z")
_AFTER = re.compile(r"\?after=(\d{1,12})\Z")


class SnapshotSource(Protocol):
    """Opens the files of snapshots for the server."""

    def open_file(self, generation: int, step: int, name: str) -> BinaryIO:
        """Opens a real file for reading; raises `FileNotFoundError` if there is none."""


class JobStatus(Protocol):
    """Returns the status of the whole job, for the paths `JOB` and `OWN_JOB`."""

    def __call__(self, *, pass_on: bool) -> Mapping[str, Any]: ...


class PortTaken(OperatorError):
    """Reports that another process listens at the port."""


class AgentServer:
    """Serves HTTP from daemon threads until it is closed; `port` is the port that it got."""

    def __init__(  # noqa: PLR0913 - one keyword for each thing that is served
        self,
        host: str,
        port: int,
        *,
        metrics: Metrics,
        status: Callable[[], dict[str, Any]],
        job: JobStatus,
        healthy: Callable[[], tuple[bool, str]],
        snapshots: SnapshotSource,
        events: Callable[[int], LogPart],
        token: Secret,
        job_metrics: Callable[[], bytes] = bytes,
        scalars: Callable[[int], Mapping[str, Any]] = lambda after: {},
        open_status: bool = False,
    ) -> None:
        """Begins to serve.

        events: returns a log's newest part of at most so many bytes; raises `FileNotFoundError` if
        there is no log. scalars: returns what workers have logged after an entry. open_status:
        the status needs no token.
        """
        self.metrics = metrics
        self.job_metrics = job_metrics
        self.status = status
        self.job = job
        self.healthy = healthy
        self.snapshots = snapshots
        self.events = events
        self.scalars = scalars
        self.token = token
        self.open_status = open_status
        self.refusals = RefusalLog()
        try:
            self._server = _Server(host, port, self)
        except OSError as error:
            kind = PortTaken if error.errno == errno.EADDRINUSE else OperatorError
            raise kind(
                f"the agent cannot serve HTTP at {host or '*'}:{port}: {error.strerror or error}; "
                "give another --http-port (0: any free one) or --http-host"
            ) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name=f"http {self.port}",
            daemon=True,
        )
        self._thread.start()

    def use_token(self, token: Secret) -> None:
        """Requires this token from now on."""
        self.token = token

    def close(self) -> None:
        """Stops listening and ends all connections."""
        self._server.shutdown()
        self._thread.join(2.0)
        self._server.server_close()
        self._server.connections.end()

    def __enter__(self) -> AgentServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, agent: AgentServer) -> None:
        family, address = _listen_address(host, port)
        self.address_family = family
        self.agent = agent
        self.connections = Connections()
        super().__init__(cast("tuple[str, int]", address), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        closed = self.connections.add(request)
        refused = closed is request
        if closed is not None:
            self.agent.refusals.add(client_address[0], "there are too many connections")
        if refused:
            super().shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs an error of a connection at the level of debugging: the peer left, or was slow."""
        log.debug("connection from %s ended by an error", client_address, exc_info=True)


def _listen_address(host: str, port: int) -> tuple[int, Any]:
    """Returns address family and address of `host`; empty means every address, also of IPv6."""
    if not host and socket.has_dualstack_ipv6():
        return socket.AF_INET6, ("::", port)
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return family, address


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # without it, errors are answered without a status line
    server_version = "ElasticZero"
    sys_version = ""
    timeout = IDLE_TIMEOUT_S

    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rfile.close()
        self._incoming = HeadTimeoutReader(self.connection, self.timeout or IDLE_TIMEOUT_S)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        self._incoming.began_s = None
        self._shows_token = False
        super().handle_one_request()

    def do_GET(self) -> None:
        self._respond(body=True)

    def do_HEAD(self) -> None:
        self._respond(body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Drops what the base class logs of each request."""

    def log_error(self, format: str, *args: Any) -> None:
        """Drops what the base class logs of a client that was too slow."""
        if self._incoming.began_s is not None:
            self._log_refusal("its head was not whole in time")

    def _log_refusal(self, why: str) -> None:
        """Logs a refused request, unless it has shown the token: then the response suffices."""
        if not self._shows_token:
            self.server.agent.refusals.add(self.client_address[0], why)

    def _respond(self, *, body: bool) -> None:
        agent = self.server.agent
        path = self.path.partition("?")[0]
        try:
            self._refuse_body()
            if path == "/metrics":
                self._send(HTTPStatus.OK, agent.metrics.text(), CONTENT_TYPE, body=body)
            elif path == "/metrics/job":
                self._send(HTTPStatus.OK, agent.job_metrics(), CONTENT_TYPE, body=body)
            elif path == "/healthz":
                well, why = agent.healthy()
                status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
                self._send(status, f"{why}\n".encode(), body=body)
            elif path == "/":
                page, headers = status_page()
                kind = "text/html; charset=utf-8"
                self._send(HTTPStatus.OK, page, kind, headers=headers, body=body)
            elif path in (STATUS, JOB, OWN_JOB):
                if not agent.open_status:
                    self._check_token()
                found = agent.status() if path == STATUS else agent.job(pass_on=path == JOB)
                text = json.dumps(found, indent=2 if path == STATUS else None).encode() + b"\n"
                self._send(HTTPStatus.OK, text, "application/json", body=body)
            elif path == SCALARS:
                self._check_token()
                asked = _AFTER.search(self.path)
                found = agent.scalars(int(asked[1]) if asked else 0)
                self._send(HTTPStatus.OK, json.dumps(found).encode(), "application/json", body=body)
            elif path == "/events":
                self._check_token()
                self._send_events(body=body)
            elif path.startswith("/snapshots/"):
                self._check_token()
                self._send_snapshot(path, body=body)
            else:
                raise RequestRefused(
                    HTTPStatus.NOT_FOUND,
                    "this server has /, /metrics, /healthz, /status, /job and /events",
                )
        except RequestRefused as refusal:
            self._log_refusal(f"{refusal.status.value}, {refusal}")
            text = f"{refusal}\n".encode()
            self._send(refusal.status, text, headers=refusal.headers, body=body)
        except OSError:
            raise
        except Exception:
            log.exception("%s %s could not be answered", self.command, path)
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "see the agent's log")

    def end_headers(self) -> None:
        for name, value in SAFE_HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers a request that the base class cannot read, and other methods."""
        status = HTTPStatus(code)
        headers = {"Connection": "close"}
        if status is HTTPStatus.NOT_IMPLEMENTED:
            status, message = HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are served"
            headers["Allow"] = "GET, HEAD"
        self.close_connection = True
        self._log_refusal(f"{status.value}, {status.phrase}")
        text = f"{message or status.phrase}\n".encode("utf-8", "replace")
        self._send(status, text, headers=headers, body=self.command != "HEAD")

    def _refuse_body(self) -> None:
        """Refuses a request with a body and closes its connection, because no body is read."""
        if self.headers.get("Transfer-Encoding") or self.headers.get("Content-Length", "0") != "0":
            self.close_connection = True
            raise RequestRefused(HTTPStatus.BAD_REQUEST, "a request here has no body")

    def _check_token(self) -> None:
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        wanted = self.server.agent.token.reveal.encode()
        matches = hmac.compare_digest(given.strip().encode("latin-1", "replace"), wanted)
        if scheme.lower() != "bearer" or not matches:
            raise RequestRefused(
                HTTPStatus.UNAUTHORIZED, "this needs the job's token", WWW_Authenticate="Bearer"
            )
        self._shows_token = True
        self.server.connections.mark_authenticated(self.connection)

    def _send_events(self, *, body: bool) -> None:
        """Sends the newest part of the event log: of at most so many bytes as `?most=` says."""
        asked = _MOST.search(self.path)
        try:
            part = self.server.agent.events(int(asked[1]) if asked else EVENTS_BYTES)
        except FileNotFoundError:
            raise RequestRefused(HTTPStatus.NOT_FOUND, "there is no event log yet") from None
        with part.file:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/x-ndjson")
            self.send_header("Content-Length", str(len(part.head) + part.stop - part.start))
            self.send_header(LEFT_OUT_HEADER, str(part.left_out_bytes))
            self.end_headers()
            if body:
                self.wfile.write(part.head)
                self._send_file(part.file, part.start, part.stop)

    def _send_snapshot(self, path: str, *, body: bool) -> None:
        generation, step, name = snapshot_file(path)
        try:
            file = self.server.agent.snapshots.open_file(generation, step, name)
        except FileNotFoundError:
            raise RequestRefused(
                HTTPStatus.NOT_FOUND, f"no file {name} of that snapshot here"
            ) from None
        except OSError as error:
            why = f"file {name} cannot be opened: {error.strerror}"
            raise RequestRefused(HTTPStatus.INTERNAL_SERVER_ERROR, why) from None
        with file:
            size = os.fstat(file.fileno()).st_size
            ranged = self.headers.get("Range")
            start, stop = (0, size) if ranged is None else byte_range(ranged, size)
            self.send_response(HTTPStatus.OK if ranged is None else HTTPStatus.PARTIAL_CONTENT)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(stop - start))
            if ranged is not None:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
            self.end_headers()
            if body:
                self._send_file(file, start, stop)

    def _send_file(self, file: BinaryIO, start: int, stop: int) -> None:
        self.wfile.flush()
        sent = 0
        if stop > start:
            sent = self.connection.sendfile(file, start, stop - start)
        if sent < stop - start:  # the file has become shorter: the client must not wait for more
            self.close_connection = True

    def _send(
        self,
        status: HTTPStatus,
        content: bytes,
        kind: str = "text/plain; charset=utf-8",
        *,
        headers: dict[str, str] | None = None,
        body: bool,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)
