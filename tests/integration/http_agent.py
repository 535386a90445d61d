"""What an agent's server serves in tests, and how they ask it."""

from __future__ import annotations

import http.client
import os
import socket
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

from elasticzero.launcher.agent.status import LoopPulse, agent_routes
from elasticzero.launcher.http import routes
from elasticzero.launcher.http.server import AgentServer, TokenlessAccess, listen
from elasticzero.launcher.observability.event_log import LogPart
from elasticzero.launcher.observability.metrics import Metrics
from elasticzero.launcher.secrets import Secret
from elasticzero.ops.dashboard.service import job_routes, page_routes

TOKEN = "the-job's-own-password"
CONTENT = os.urandom(3_000_000)
BEARER = {"Authorization": f"Bearer {TOKEN}"}
EVENTS = b'{"time": 2.0, "event": "round"}\n{"time": 3.0, "event": "exit"}\n'
HEAD = b'{"time": 1.0, "event": "world"}\n'
FILE = "/snapshots/3/120/rank-00000-of-00002.safetensors"


class Folder:
    """Snapshots under a directory, as the agent keeps them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[tuple[int, int, str]] = []

    def open_file(self, generation: int, step: int, name: str) -> BinaryIO:
        self.asked.append((generation, step, name))
        return (self.root / str(generation) / str(step) / name).open("rb")


class Agent:
    """What the server asks; a test may change it."""

    def __init__(self, root: Path) -> None:
        self.folder = Folder(root)
        self.metrics = Metrics()
        self.well = (True, "3 workers train")
        self.current_status: dict[str, object] = {"job": "j", "generation": 3}
        self.broken = False
        self.open_status = False
        self.run = 0
        self.asked_bytes = 0

    def status(self) -> dict[str, object]:
        if self.broken:
            raise RuntimeError("a bug")
        return self.current_status

    def job(self, *, pass_on: bool) -> dict[str, object]:
        return {"job": "j", "passed_on": pass_on}

    def events(self, most_bytes: int) -> LogPart:
        self.asked_bytes = most_bytes
        file = (self.folder.root / "events.jsonl").open("rb")
        return LogPart(HEAD, file, max(0, len(EVENTS) - most_bytes), len(EVENTS))

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> AgentServer:
        health = routes.Route(answer=self.health, served_to="everyone")
        served = {
            **agent_routes(self.metrics, LoopPulse(5.0), self.status, bytes),
            "/healthz": health,
            **page_routes(),
            **job_routes(self.job),
        }
        return AgentServer(
            listen(host, port),
            routes=served,
            snapshots=self.folder,
            events=self.events,
            token=lambda: Secret(TOKEN),
            tokenless=TokenlessAccess(open_status=self.open_status, names=["watch.example.org"]),
            run=self.run,
        )

    def health(self, query: str) -> routes.Answer:
        well, why = self.well
        status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
        return routes.Answer(content=f"{why}\n".encode(), status=status)


def agent_in(root: Path) -> Agent:
    """An agent with one snapshot and an event log in a directory."""
    path = root / "3" / "120"
    path.mkdir(parents=True)
    (path / FILE.rpartition("/")[2]).write_bytes(CONTENT)
    (path / "empty").write_bytes(b"")
    (root / "events.jsonl").write_bytes(EVENTS)
    (root / "secret").write_bytes(b"not to be read")
    return Agent(root)


Answer = tuple[int, dict[str, str], bytes]


def ask(server: AgentServer, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(
            method, path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def raw(server: AgentServer, request: bytes) -> bytes:
    """Everything the server answers to these bytes, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
        answer = b""
        try:
            s.sendall(request)
            s.shutdown(socket.SHUT_WR)
            while data := s.recv(65536):
                answer += data
        except OSError:
            pass  # it closed before it had read everything
        return answer
