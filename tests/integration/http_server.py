"""An agent's server in a process of its own: `python -m tests.integration.http_server DESCRIPTORS`.

It prints its port. DESCRIPTORS is the number of files that it may open; 0: as many as are allowed.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Mapping
from typing import BinaryIO

from elasticzero.launcher.http.routes import Answer, Route
from elasticzero.launcher.http.server import AgentServer, listen
from elasticzero.launcher.observability.event_log import LogPart
from elasticzero.launcher.secrets import Secret

TOKEN = "the-job's-own-password"
PAGE = b"x" * (4 << 20)
"""What anybody may read; more than the kernel takes for a client that reads nothing."""


class NoSnapshots:
    def open_file(self, generation: int, step: int, name: str) -> BinaryIO:
        raise FileNotFoundError(name)


def no_events(most_bytes: int) -> LogPart:
    raise FileNotFoundError("no log")


class Hog:
    """Opens all descriptors that are left."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def answer(self, query: str) -> Answer:
        try:
            while True:
                self.descriptors.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return Answer(content=b"none is left\n")


def serving(routes: Mapping[str, Route]) -> AgentServer:
    """An agent's server with these routes, on a free port, and no snapshots."""
    return AgentServer(
        listen("127.0.0.1", 0),
        routes=routes,
        snapshots=NoSnapshots(),
        events=no_events,
        token=lambda: Secret(TOKEN),
    )


def main() -> None:
    if limit := int(sys.argv[1]):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    routes = {
        "/page": Route(answer=lambda query: Answer(content=PAGE), served_to="everyone"),
        "/healthz": Route(answer=lambda query: Answer(content=b"ok\n"), served_to="everyone"),
        "/status": Route(answer=lambda query: Answer(content=b"{}\n"), served_to="token holders"),
        "/hog": Route(answer=Hog().answer, served_to="token holders"),
    }
    with serving(routes) as server:
        print(server.port, flush=True)
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main()
