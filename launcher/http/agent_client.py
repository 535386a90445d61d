"""Reads what agents serve: the status of each, and other objects."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from elasticzero.checkpoint.storage.http import RUN_HEADER
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.protocol.documents import UNSTATED, Member

QUERY_TIMEOUT_S = 2.0
"""Seconds within which an agent must answer; it is shown as silent otherwise."""
MAX_PARALLEL_QUERIES = 64
MAX_BYTES = 4 << 20
"""Maximum bytes of an answer; a longer one counts as none."""
STATUS = "/status"
"""Path of the agent's own status."""


def query_agents(
    members: Iterable[Member],
    access: AgentAccess,
    *,
    timeout_s: float = QUERY_TIMEOUT_S,
    threads: int = MAX_PARALLEL_QUERIES,
) -> dict[str, Mapping[str, Any]]:
    """Returns what each agent serves at `/status`, by node; the requests run in parallel.

    Args:
        members: The agents' registrations.
        access: How the job's agents are reached.
        timeout_s: Seconds after which an agent that has not answered is left out.
        threads: Maximum number of requests at a time.
    """
    waiting = list(members)
    answers: dict[str, Mapping[str, Any]] = {}

    def loop() -> None:
        while waiting:
            try:
                member = waiting.pop()
            except IndexError:
                return
            answer = query_agent(member, access, STATUS, timeout_s)
            if answer is not None:
                answers[member.node] = answer

    started = [
        threading.Thread(target=loop, name=f"elasticzero-query-{i}", daemon=True)
        for i in range(min(threads, len(waiting)))
    ]
    deadline_s = time.monotonic() + timeout_s
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return dict(answers)


def query_agent(
    member: Member, access: AgentAccess, path: str, timeout_s: float = QUERY_TIMEOUT_S
) -> Mapping[str, Any] | None:
    """Returns the object that an agent serves; None if it serves none in time.

    Args:
        member: The agent's registration.
        access: How the job's agents are reached.
        path: Path of the object.
        timeout_s: Seconds for the answer.
    """
    connection = access.connection(member, timeout_s)
    try:
        headers = {"Authorization": f"Bearer {access.token.reveal}"}
        if member.run != UNSTATED:
            headers[RUN_HEADER] = str(member.run)
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        value = json.loads(response.read(MAX_BYTES)) if response.status == 200 else None
    except (OSError, ValueError, RecursionError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return value if isinstance(value, dict) else None
