"""Reads what agents serve: the status of each, and other objects."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from elasticzero.checkpoint.storage.http import HttpStorage
from elasticzero.checkpoint.storage.signed_requests import RUN_HEADER, RequestSigner
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.http.routes import HEALTH
from elasticzero.launcher.protocol.documents import UNSTATED, Member
from elasticzero.launcher.secrets import Secret
from elasticzero.security.proofs import run_secret

QUERY_TIMEOUT_S = 2.0
"""Seconds within which an agent must answer; it is shown as silent otherwise."""
SILENCE_S = 20.0
"""Seconds without data after which a file that an agent serves cannot be read."""
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
        response = request_agent(connection, member, access.token, path)
        value = json.loads(response.read(MAX_BYTES)) if response.status == 200 else None
    except (OSError, ValueError, RecursionError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return value if isinstance(value, dict) else None


def open_files(address: str, run: int, folder: str, access: AgentAccess) -> HttpStorage:
    """Returns the files that an agent serves in a folder.

    Args:
        address: The agent's address.
        run: Number of the agent's run of the job.
        folder: The folder.
        access: How the job's agents are reached.
    """
    return HttpStorage(
        f"{access.scheme}://{address}/{folder}",
        run_secret(access.token.reveal, run),
        timeout_s=SILENCE_S,
        run=run,
        tls=None if access.tls is None else access.tls(),
    )


def is_answering(member: Member, access: AgentAccess, timeout_s: float = QUERY_TIMEOUT_S) -> bool:
    """Returns whether an agent runs, and its loop turns, as far as it says so in time.

    Args:
        member: The agent's registration.
        access: How the job's agents are reached.
        timeout_s: Seconds for the answer.
    """
    connection = access.connection(member, timeout_s)
    try:
        connection.request("GET", HEALTH)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def request_agent(
    connection: http.client.HTTPConnection, member: Member, token: Secret, target: str
) -> http.client.HTTPResponse:
    """Sends a request to an agent: one that proves the secret of the agent's run of the job.

    An agent whose registration states no run is of the release before, and is shown the token.

    Args:
        connection: Connection to the agent; it connects on demand.
        member: The agent's registration.
        token: The job's token.
        target: Path and query.

    Returns:
        The response, whose body is not read yet.

    Raises:
        OSError: The connection is broken.
        HTTPException: The agent does not answer as HTTP has it.
    """
    states_run = member.run != UNSTATED
    headers = {RUN_HEADER: str(member.run)} if states_run else {}
    signer = RequestSigner(run_secret(token.reveal, member.run), proofs=states_run)
    return signer.send(connection, "GET", target, headers)
