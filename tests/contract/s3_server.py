"""A real S3 server process on loopback, and a proxy before it that does harm when told to."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

from tests.support.deadlines import patience

Harm = Literal["busy", "forbidden", "cut", "silent"] | None
"""What happens to a request: answered 503 or 403, cut off in the middle of its body, or done and
not answered."""
UPLOAD_PART = re.compile(r"PUT .*partNumber=(\d+)")
COMPLETE = re.compile(r"POST .*uploadId=")
SERVING = re.compile(r"Running on http://127\.0\.0\.1:(\d+)")
PUT = re.compile(r"PUT [^?]*$")


@contextmanager
def running_server() -> Iterator[int]:
    """Runs moto's server; gives its port."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with tempfile.NamedTemporaryFile("r") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log.fileno())
        try:
            deadline_s = time.monotonic() + patience(60)
            while not (serving := SERVING.search(Path(log.name).read_text())):
                assert process.poll() is None and time.monotonic() < deadline_s
                time.sleep(0.05)
            yield int(serving[1])
        finally:
            process.kill()
            process.wait()


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the server, but for those that `harm` picks."""

    daemon_threads = True

    def __init__(self, server_port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream_port = server_port
        self.harm: Callable[[str], Harm] = lambda _: None
        """Asked with each request's method and path."""
        self.seen: list[str] = []
        """The method and path of every request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def reset(self) -> None:
        self.harm = lambda _: None
        self.seen.clear()

    def count(self, pattern: re.Pattern[str]) -> int:
        return sum(bool(pattern.match(line)) for line in self.seen)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def handle_one_request(self) -> None:
        with contextlib.suppress(OSError):
            super().handle_one_request()

    def _pass_on(self) -> None:
        line = f"{self.command} {self.path}"
        self.server.seen.append(line)
        harm = self.server.harm(line)
        length = int(self.headers.get("Content-Length", "0"))
        if harm == "cut":
            self.rfile.read(length // 2)
            self._hang_up()
            return
        body = self.rfile.read(length)
        if harm in ("busy", "forbidden"):
            code, status = ("SlowDown", 503) if harm == "busy" else ("AccessDenied", 403)
            text = f"<Error><Code>{code}</Code><Message>{code} by a test</Message></Error>"
            self._answer(status, {"Content-Type": "application/xml"}, text.encode())
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream_port, timeout=30)
        upstream.request(self.command, self.path, body, dict(self.headers.items()))
        response = upstream.getresponse()
        data = response.read()
        upstream.close()
        if harm == "silent":
            self._hang_up()
            return
        self._answer(response.status, dict(response.getheaders()), data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        size = headers.get("Content-Length", headers.get("content-length", str(len(data))))
        self.send_header("Content-Length", size if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def proxied(server_port: int) -> Iterator[Proxy]:
    """Runs a proxy before the server."""
    with Proxy(server_port) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.01,), name="s3-proxy")
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
