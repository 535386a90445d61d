"""Serves an agent's metrics, health, status and events, what extensions add to them, and the bytes
of snapshots.

What is served at a path, and to whom, is a `Route`. Metrics, health and the status page, which
holds nothing of the job, are open: scrapes, probes and browsers expect that. All else needs a proof
of the secret of the job's run, or the job's token (see `authentication`), except the status where
`open_status` is set. Only GET and HEAD are allowed. What clients without the token may cost is
limited by `Reception`, and by the name that they have for this server: see `HostNames`. Over TLS a
certificate of the job stands for the token, but for the name: a browser shows a certificate
whatever page asks for it.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, BinaryIO, Protocol

from elasticzero.checkpoint.storage.signed_requests import RUN_HEADER, SCHEME
from elasticzero.errors import OperatorError
from elasticzero.launcher.addresses import bound_socket, host_and_port
from elasticzero.launcher.http import limits
from elasticzero.launcher.http.authentication import Authenticator, Verdict
from elasticzero.launcher.http.limits import HostNames, RefusalLog
from elasticzero.launcher.http.reception import Client, Reception
from elasticzero.launcher.http.routes import HEALTH, TEXT, Route
from elasticzero.launcher.observability.event_log import LogPart
from elasticzero.launcher.protocol.documents import FIRST_RUN, UNSTATED, compare_runs
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.tls.contexts import TlsContexts

log = logging.getLogger(__name__)

EVENTS_BYTES = 16 << 20
"""Bytes of events that are sent if a request does not say how many."""
LEFT_OUT_HEADER = "ElasticZero-Left-Out-Bytes"
"""Header of `/events`: bytes of older events that are not sent."""
SAFE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response of an agent: no other page can frame or embed what it serves, and no
cache keeps it."""
CONNECTIONS_QUEUED = 4096
"""Maximum number of connections that the kernel holds until they are accepted."""
ENCRYPTED_BYTES = 256 << 10
"""Bytes of a file that are encrypted at a time."""
_MOST = re.compile(r"\?most=(\d{1,12})\Z")
_SNAPSHOT = re.compile(r"/snapshots/(\d{1,18})/(\d{1,18})/([A-Za-z0-9_][A-Za-z0-9._-]{0,199})\Z")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})\Z")


class RequestRefused(Exception):
    """Reports that a request gets an error as its response."""

    def __init__(self, status: HTTPStatus, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class SnapshotSource(Protocol):
    """Opens the files of snapshots for the server."""

    def open_file(self, generation: int, step: int, name: str) -> BinaryIO:
        """Opens a file of a snapshot for reading, which must be a real one.

        Args:
            generation: Generation of the snapshot.
            step: Step of the snapshot.
            name: Name of the file.

        Raises:
            FileNotFoundError: There is no such file.
        """


class PortTaken(OperatorError):
    """Reports that another process listens at the port."""


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens for an agent's server.

    Args:
        host: a name or an address of this machine; empty or `::`: every address, also of IPv4.
        port: 0: any free one.

    Raises:
        PortTaken: another process listens there.
        OperatorError: the address cannot be listened at for another reason.
    """
    try:
        listening = bound_socket(host, port)
        try:
            listening.listen(CONNECTIONS_QUEUED)
        except OSError:
            listening.close()
            raise
        return listening
    except OSError as error:
        kind = PortTaken if error.errno == errno.EADDRINUSE else OperatorError
        raise kind(
            f"the agent cannot serve HTTP at {host_and_port(host or '*', port)}: "
            f"{error.strerror or error}; give another --http-port (0: any free one) or --http-host"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenlessAccess:
    """Says what clients without the job's token may do, besides the paths open to everyone."""

    open_status: bool = False
    """True if they may read the status."""
    names: Collection[str] = ()
    """Names under which they may reach the server, besides addresses and this machine's own."""


class AgentServer:
    """Serves HTTP from daemon threads until it is closed."""

    def __init__(  # noqa: PLR0913 - what is served, and to whom
        self,
        listening: socket.socket,
        *,
        routes: Mapping[str, Route],
        snapshots: SnapshotSource,
        events: Callable[[int], LogPart],
        token: Callable[[], Secret],
        files: Mapping[str, Callable[[str], BinaryIO]] | None = None,
        tokenless: TokenlessAccess | None = None,
        run: int = UNSTATED,
        tls: TlsContexts | None = None,
    ) -> None:
        """Begins to serve.

        Args:
            listening: what `listen` has returned; the server closes it.
            routes: what is served besides events and snapshots, by path.
            snapshots: opens the files of snapshots.
            events: returns a log's newest part of at most so many bytes; raises
                `FileNotFoundError` if there is no log.
            token: returns the job's token.
            files: what opens other files that agents read, by the folder that they are served in;
                raises `FileNotFoundError` for a name that has none.
            tokenless: what clients without the token may do; None: as little as by default.
            run: number of the agent's run of the job; requests of another run are refused.
            tls: contexts of its connections; None: it serves without TLS.
        """
        self.routes = routes
        self.snapshots = snapshots
        self.events = events
        self.files = dict(files or {})
        self.run = run
        tokenless = tokenless or TokenlessAccess()
        self.open_status = tokenless.open_status
        self.names = HostNames(tokenless.names)
        self.refusals = RefusalLog()
        self.port: int = listening.getsockname()[1]
        self._reception = Reception(
            listening,
            answer=self._answer,
            authenticator=Authenticator(token, run),
            headers=SAFE_HEADERS,
            refusals=self.refusals,
            tls=tls,
        )

    def _answer(self, client: Client, head: bytes, verdict: Verdict) -> bool:
        """Answers a request; returns whether its connection is kept."""
        client.connection.settimeout(limits.IDLE_TIMEOUT_S)
        request: Any = _Request(
            self,
            head,
            verdict,
            has_certificate=client.has_certificate,
            certified_run=client.run,
            is_encrypted=client.is_encrypted,
        )
        handler = _Handler(client.connection, (client.address, 0), request)
        return not handler.close_connection

    def close(self) -> None:
        """Stops listening and ends all connections."""
        self._reception.close()

    def __enter__(self) -> AgentServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Request:
    """Holds one request; it takes the place of the server in the standard library's handler."""

    agent: AgentServer
    head: bytes
    verdict: Verdict
    has_certificate: bool
    """True if the client has shown a certificate of the job."""
    certified_run: int
    """Run of the job that the certificate states."""
    is_encrypted: bool


class _Handler(BaseHTTPRequestHandler):
    """Answers the one request whose head has come."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # without it, errors are answered without a status line
    server_version = "ElasticZero"
    sys_version = ""
    disable_nagle_algorithm = True

    server: _Request  # type: ignore[assignment]

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BytesIO(self.server.head)
        self._has_token = self.server.verdict.is_holder
        self._is_trusted = self._has_token or self.server.has_certificate

    def handle(self) -> None:
        self.close_connection = True
        self.handle_one_request()

    def do_GET(self) -> None:
        self._respond(body=True)

    def do_HEAD(self) -> None:
        self._respond(body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Drops what the base class logs of each request."""

    def log_error(self, format: str, *args: Any) -> None:
        """Drops what the base class logs of a client that was too slow."""

    def _log_refusal(self, why: str) -> None:
        """Logs a refused request, unless it may read everything: then the response suffices."""
        if not self._is_trusted:
            self.server.agent.refusals.add(self.client_address[0], why)

    def _respond(self, *, body: bool) -> None:
        agent = self.server.agent
        path = self.path.partition("?")[0]
        try:
            self._refuse_body()
            self._check_host(path)
            if (route := agent.routes.get(path)) is not None:
                self._send_answer(route, body=body)
            elif path == "/events":
                self._check_token()
                self._send_events(body=body)
            elif path.startswith(("/snapshots/", *(f"/{folder}/" for folder in agent.files))):
                self._check_token()
                self._check_proof()
                self._send_stored(path, body=body)
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

    def _send_answer(self, route: Route, *, body: bool) -> None:
        may_read_status = route.served_to == "status readers" and self.server.agent.open_status
        if route.served_to != "everyone" and not may_read_status:
            self._check_token()
        if route.served_to == "other agents":
            self._check_proof()
        answer = route.answer(self.path.partition("?")[2] if body else "")
        self._send(answer.status, answer.content, answer.kind, headers=answer.headers, body=body)

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

    def _check_host(self, path: str) -> None:
        """Refuses a request of another site's page, which has no token (see `HostNames`)."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) > 1:
            raise RequestRefused(HTTPStatus.BAD_REQUEST, "a request here has one Host")
        if self._has_token or path == HEALTH or not hosts:  # every browser sends a Host
            return
        if not self.server.agent.names.allow(hosts[0]):
            raise RequestRefused(
                HTTPStatus.MISDIRECTED_REQUEST,
                "the Host of this request is no name of this server; elasticzero run --http-names "
                "adds names, and an address or the job's token needs none",
            )

    def _check_token(self) -> None:
        if not self._is_trusted:
            raise RequestRefused(
                HTTPStatus.UNAUTHORIZED, "this needs the job's token", WWW_Authenticate="Bearer"
            )
        self._check_run()

    def _check_proof(self) -> None:
        """Refuses a request that shows the token in place of a proof, where no node does so.

        Nodes of the release before do, in a job's first run. A process of an earlier run has the
        token, but no proof of this run's secret.
        """
        is_proven = self.server.has_certificate or self.server.verdict is Verdict.PROOF
        if not is_proven and self.server.agent.run > FIRST_RUN:
            raise RequestRefused(
                HTTPStatus.UNAUTHORIZED,
                "a snapshot needs a proof of the secret of this run",
                WWW_Authenticate=SCHEME,
            )

    def _check_run(self) -> None:
        """Refuses a request that states another run of the job than the agent's, or whose client
        has a certificate of another one."""
        run, header = self.server.agent.run, self.headers.get(RUN_HEADER, "")
        stated = int(header[:9]) if header.isdecimal() else UNSTATED
        for other in (stated, self.server.certified_run):
            if compare_runs(other, run):
                raise RequestRefused(
                    HTTPStatus.CONFLICT,
                    f"this agent is of run {run} of the job, not of run {other}",
                )

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

    def _open_stored(self, path: str) -> BinaryIO:
        """Opens a file of a snapshot, or one that an extension serves."""
        _, folder, *names = path.split("/")
        name = names[-1] if names else ""
        try:
            if len(names) == 1 and (open_file := self.server.agent.files.get(folder)):
                return open_file(name)
            generation, step, name = _snapshot_file(path)
            return self.server.agent.snapshots.open_file(generation, step, name)
        except FileNotFoundError:
            raise RequestRefused(HTTPStatus.NOT_FOUND, f"no file {name} here") from None
        except OSError as error:
            why = f"file {name} cannot be opened: {error.strerror}"
            raise RequestRefused(HTTPStatus.INTERNAL_SERVER_ERROR, why) from None

    def _send_stored(self, path: str, *, body: bool) -> None:
        with self._open_stored(path) as file:
            size = os.fstat(file.fileno()).st_size
            ranged = self.headers.get("Range")
            start, stop = (0, size) if ranged is None else _byte_range(ranged, size)
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
        if stop > start and self.server.is_encrypted:
            sent = self._send_encrypted(file, start, stop - start)
        elif stop > start:
            sent = self.connection.sendfile(file, start, stop - start)
        if sent < stop - start:  # the file has become shorter: the client must not wait for more
            self.close_connection = True

    def _send_encrypted(self, file: BinaryIO, start: int, count: int) -> int:
        """Sends a part of a file over TLS; returns how many bytes there were.

        `SSLSocket.sendfile` does the same by 8 KiB at a time, which takes twice as long.

        Args:
            file: The file.
            start: First byte.
            count: Number of bytes.
        """
        file.seek(start)
        buffer = memoryview(bytearray(min(count, ENCRYPTED_BYTES)))
        left = count
        while left and (size := file.readinto(buffer[: min(left, len(buffer))])):  # type: ignore[attr-defined]
            self.connection.sendall(buffer[:size])
            left -= size
        return count - left

    def _send(
        self,
        status: HTTPStatus,
        content: bytes,
        kind: str = TEXT,
        *,
        headers: Mapping[str, str] | None = None,
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


def _snapshot_file(path: str) -> tuple[int, int, str]:
    """Returns the generation, the step and the name of the snapshot's file at a path."""
    match = _SNAPSHOT.match(path)
    if match is None:
        raise RequestRefused(
            HTTPStatus.NOT_FOUND, "a snapshot's file is /snapshots/GENERATION/STEP/NAME"
        )
    return int(match[1]), int(match[2]), match[3]


def _byte_range(header: str, size: int) -> tuple[int, int]:
    """Parses a header `Range: bytes=first-last`, `first-` or `-last_n`; returns [start, stop)."""
    match = _RANGE.match(header.strip())
    if match is None or (not match[1] and not match[2]):
        raise RequestRefused(HTTPStatus.BAD_REQUEST, "one range is served, as in bytes=0-99")
    if match[1]:
        start = int(match[1])
        stop = min(int(match[2]) + 1, size) if match[2] else size
        backwards = bool(match[2]) and int(match[2]) < start
    else:
        start, stop, backwards = max(0, size - int(match[2])), size, False
    if backwards or start >= size or start >= stop:
        raise RequestRefused(
            HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
            f"the file has {size} bytes",
            Content_Range=f"bytes */{size}",
        )
    return start, stop
