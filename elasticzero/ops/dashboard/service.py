"""Answers `/job`: the status of the whole job, from any agent.

1. The agent that leads answers from what it has seen, and from the status of the other agents,
   which it asks for at most once in a while however many screens there are.
2. Another agent passes on what the leader answers to it at `/job/own`. It asks the first members of
   the world, in the order in which they would lead.
3. While none of those leads, the agent answers from what it has seen itself, and says so: `leads`
   is false. The nodes that it has not asked are `silent`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from elasticzero.launcher.http.agent_client import query_agents, query_leader
from elasticzero.launcher.observability.job_status import (
    collect_status,
    job_in_view,
    phases_in_view,
)
from elasticzero.launcher.protocol.documents import Member
from elasticzero.launcher.protocol.leader import is_leader
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.secrets import Secret
from elasticzero.ops.dashboard.memory import JobMemory

REFRESH_S = 0.5
"""Least seconds between two answers that are made anew."""
REFRESH_A_NODE_S = 0.02
"""Seconds that are added for each node: the leader of a large job asks 50 agents a second."""
PATIENCE_S = 1.0
"""Seconds within which another agent must answer the leader. A lost node delays each answer so long
until its lease has lapsed."""
CANDIDATES = 3
"""Number of members that are asked whether they lead; those that come later do not see the other
nodes."""


class DashboardAgent(Protocol):
    """Shows what one agent has seen of its job."""

    @property
    def view(self) -> View | None: ...

    @property
    def token(self) -> Secret: ...

    @property
    def memory(self) -> JobMemory: ...

    def status(self) -> dict[str, Any]: ...


class JobDashboard:
    """Makes an agent's answers about its whole job, in the threads of its HTTP server."""

    def __init__(self, name: str, node: str, agent: Callable[[], DashboardAgent | None]) -> None:
        """name: the job's. node: this agent's. agent: returns the agent once there is one."""
        self._name = name
        self._node = node
        self._agent = agent
        self._lock = threading.Lock()
        self._latest: Mapping[str, Any] = {}
        self._until_s = 0.0

    def document(self, *, pass_on: bool) -> Mapping[str, Any]:
        """Returns the status of the job; pass_on: that of the leader, where another agent leads."""
        agent = self._agent()
        view = agent.view if agent is not None else None
        if agent is not None and view is not None and pass_on and not is_leader(view):
            found = query_leader(_candidates(view), agent.token)
            if found is not None:
                return found
        with self._lock:
            if time.monotonic() >= self._until_s:
                self._latest = self._made(agent, view)
                waits_s = REFRESH_S + REFRESH_A_NODE_S * len(self._latest["nodes"])
                self._until_s = time.monotonic() + waits_s
            return self._latest

    def _made(self, agent: DashboardAgent | None, view: View | None) -> Mapping[str, Any]:
        job = job_in_view(self._name, view)
        statuses: dict[str, Mapping[str, Any]] = {}
        leads = view is not None and is_leader(view)
        history: Mapping[str, Any] = {}
        if agent is not None:
            if leads:
                others = [m for m in job.members.values() if m.node != self._node]
                statuses |= query_agents(others, agent.token, timeout_s=PATIENCE_S)
            statuses[self._node] = agent.status()
            history = agent.memory.history.values()
        found = collect_status(job, phases_in_view(view), statuses)
        doing = statuses.get(self._node, {}).get("reason", "")
        return job_document(
            found, history, at=time.time(), node=self._node, leads=leads, doing=doing
        )


def job_document(
    found: Mapping[str, Any],
    history: Mapping[str, Any],
    *,
    at: float,
    node: str,
    leads: bool,
    doing: str,
) -> dict[str, Any]:
    """Returns what `/job` serves: the status of the job, its history, and which agent says so.

    at: Unix time of the answer, by the clock of the agent `node`; ages are counted back from it.
    doing: why that agent does what it does.
    """
    document = {
        **found,
        "doing": doing,
        "at": at,
        "node": node,
        "leads": leads,
        "history": dict(history),
    }
    finite: dict[str, Any] = _finite(document)
    return finite


def _candidates(view: View) -> list[Member]:
    members = view.world.members if view.world is not None else ()
    return [member for member in members[:CANDIDATES] if member.node != view.me.node]


def _finite(value: Any) -> Any:
    """Returns the value with null for each number that JSON cannot hold."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
