"""Asks agents for the status that they serve, several at a time."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from elasticzero.launcher.protocol.documents import Member
from elasticzero.launcher.secrets import Secret

QUERY_TIMEOUT_S = 2.0
"""Seconds within which an agent must answer; it counts as silent otherwise."""
MAX_PARALLEL_QUERIES = 64
MOST_BYTES = 1 << 20


def query_agents(
    members: Iterable[Member], token: Secret, *, threads: int = MAX_PARALLEL_QUERIES
) -> dict[str, Mapping[str, Any]]:
    """Returns what each agent serves at `/status`, by node; a silent agent is missing.

    threads: maximum number of requests at a time.
    """
    waiting = list(members)
    answers: dict[str, Mapping[str, Any]] = {}

    def loop() -> None:
        while waiting:
            try:
                member = waiting.pop()
            except IndexError:
                return
            answer = _query_agent(member, token)
            if answer is not None:
                answers[member.node] = answer

    started = [
        threading.Thread(target=loop, name=f"elasticzero-query-{i}", daemon=True)
        for i in range(min(threads, len(waiting)))
    ]
    deadline_s = time.monotonic() + QUERY_TIMEOUT_S
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return dict(answers)


def _query_agent(member: Member, token: Secret) -> Mapping[str, Any] | None:
    connection = http.client.HTTPConnection(member.host, member.http_port, timeout=QUERY_TIMEOUT_S)
    try:
        connection.request("GET", "/status", headers={"Authorization": f"Bearer {token.reveal}"})
        response = connection.getresponse()
        value = json.loads(response.read(MOST_BYTES)) if response.status == 200 else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return value if isinstance(value, dict) else None
