"""Metadata servers of the three clouds, played by real HTTP servers with their rules of tokens and
headers, and with the troubles that such servers have."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.deadlines import patience

PATIENCE_S = 20.0
"""Generous: only a test that fails waits so long."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """Names in small letters."""


@dataclass(frozen=True)
class Reply:
    status: int
    text: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


class Metadata:
    """A server on a port of its own; a cloud is a subclass that answers `reply`."""

    choice = ""
    """The cloud's name, as `--preemption` has it."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.trouble: Reply | str | None = None
        """Answered instead of what is right; `drop`: the connection is closed without an answer."""
        self.ahead_s = 0.0
        """The server's clock is before this machine's by so much."""
        self.changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """What leads an agent here."""
        return {f"ELASTICZERO_{self.choice.upper()}_METADATA_URL": self.url}

    def now_s(self) -> float:
        return time.time() + self.ahead_s

    def reply(self, request: Request) -> Reply:
        return Reply(404)

    def wait(self, count: int) -> None:
        """Until so many requests have come."""
        deadline_s = time.monotonic() + patience(PATIENCE_S)
        while len(self.requests) < count:
            assert time.monotonic() < deadline_s, f"only {len(self.requests)} requests came"
            time.sleep(0.01)

    def __enter__(self) -> Any:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self.changed:
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(played: Metadata) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, parts.path, query, headers)
            played.requests.append(request)
            if played.trouble == "drop":
                return
            reply = played.trouble if isinstance(played.trouble, Reply) else played.reply(request)
            data = reply.text.encode()
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(data)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):  # who asked waits no longer
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = _answer

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(played.now_s() if timestamp is None else timestamp)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


class Aws(Metadata):
    choice = "aws"

    def __init__(self) -> None:
        super().__init__()
        self.tokens: set[str] = set()
        self.issued = 0
        self.action: dict[str, Any] | None = None
        self.recommended = False

    def interrupt(self, in_s: float, action: str = "terminate") -> None:
        moment = datetime.fromtimestamp(self.now_s() + in_s, UTC)
        self.action = {"action": action, "time": moment.strftime("%Y-%m-%dT%H:%M:%SZ")}

    def reply(self, request: Request) -> Reply:
        if request.path == "/latest/api/token":
            ttl = request.headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
            if request.method != "PUT" or not ttl.isdecimal() or not 1 <= int(ttl) <= 21600:
                return Reply(400)
            self.issued += 1
            token = f"AQAAA-token-{self.issued}=="
            self.tokens.add(token)
            return Reply(200, token, {"X-aws-ec2-metadata-token-ttl-seconds": ttl})
        if request.headers.get("x-aws-ec2-metadata-token") not in self.tokens:
            return Reply(401)
        if request.path == "/latest/meta-data/spot/instance-action" and self.action:
            return Reply(200, json.dumps(self.action))
        rebalance = "/latest/meta-data/events/recommendations/rebalance"
        if request.path == rebalance and self.recommended:
            return Reply(200, json.dumps({"noticeTime": "2026-11-21T08:22:00Z"}))
        return Reply(404)


class Gcp(Metadata):
    choice = "gcp"

    def __init__(self) -> None:
        super().__init__()
        self.preempted = False

    def preempt(self) -> None:
        with self.changed:
            self.preempted = True
            self.changed.notify_all()

    def reply(self, request: Request) -> Reply:
        if request.headers.get("metadata-flavor") != "Google":
            return Reply(403)
        if request.path != "/computeMetadata/v1/instance/preempted":
            return Reply(404)
        with self.changed:
            if request.query.get("wait_for_change") == "true":
                same = request.query.get("last_etag") == self._etag
                if same:
                    limit_s = float(request.query.get("timeout_sec", "60"))
                    self.changed.wait_for(lambda: self.preempted, limit_s)
            text = "TRUE" if self.preempted else "FALSE"
            return Reply(200, text, {"Metadata-Flavor": "Google", "ETag": self._etag})

    @property
    def _etag(self) -> str:
        return "e1" if self.preempted else "e0"


class Azure(Metadata):
    choice = "azure"

    def __init__(self, name: str = "vmss_3") -> None:
        super().__init__()
        self.name = name
        self.events: list[dict[str, Any]] = []
        self.first_s = 0.0
        """What the first look for events takes."""

    def schedule(
        self, kind: str, in_s: float | None, *names: str, status: str = "Scheduled"
    ) -> None:
        not_before = ""
        if in_s is not None:
            moment = datetime.fromtimestamp(self.now_s() + in_s, UTC)
            not_before = format_datetime(moment, usegmt=True)
        self.events.append(
            {
                "EventId": f"f020ba2e-{len(self.events)}",
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": list(names or (self.name,)),
                "EventStatus": status,
                "NotBefore": not_before,
            }
        )

    def reply(self, request: Request) -> Reply:
        if request.headers.get("metadata") != "true" or "x-forwarded-for" in request.headers:
            return Reply(400, "Bad request. Required metadata header not specified")
        if "api-version" not in request.query:
            return Reply(400, "Bad request. api-version is invalid or was not specified")
        if request.path == "/metadata/instance/compute/name":
            return Reply(200, self.name)
        if request.path == "/metadata/scheduledevents":
            with self.changed:
                self.changed.wait_for(lambda: False, self.first_s)
                self.first_s = 0.0
            document = {"DocumentIncarnation": len(self.events), "Events": self.events}
            return Reply(200, json.dumps(document))
        return Reply(404)
