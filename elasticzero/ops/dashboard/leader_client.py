"""Reads the status of a whole job from the agent that leads it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.http.agent_client import query_agent
from elasticzero.launcher.protocol.documents import Member

LEADER_TIMEOUT_S = 3.0
"""Seconds within which the leading agent must answer; it may wait for other agents itself."""
JOB, OWN_JOB, JOB_PAGE = "/job", "/job/own", "/job/page"
"""Paths of the job's status: as the leader has it, as the agent that is asked has it, and as the
leader has it in the form of the status page's body."""


def query_leader(members: Iterable[Member], access: AgentAccess) -> Mapping[str, Any] | None:
    """Asks agents for the status of the job, until one says that it leads the job.

    Args:
        members: the agents in the order in which they would lead.
        access: how the job's agents are reached.

    Returns:
        The status of the job, as the leader serves it; None: no agent that leads the job has
        answered within `LEADER_TIMEOUT_S`.
    """
    deadline_s = time.monotonic() + LEADER_TIMEOUT_S
    for member in members:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            break
        status = query_agent(member, access, OWN_JOB, left_s)
        if status is not None and status.get("leads"):
            return status
    return None
