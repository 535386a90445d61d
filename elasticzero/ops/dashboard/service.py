"""Answers `/job`: the status of the whole job, from any agent.

1. The agent that leads answers from what it has seen, and from the status of the other agents,
   which it asks for at most once in a while however many screens there are.
2. Another agent passes on what the leader answers to it at `/job/own`. It asks the first members of
   the world, in the order in which they would lead.
3. `/job/page` is that answer as the body of the status page. It is written in the thread of a
   request, once for each answer however many browsers ask.
4. While none of those members leads, the agent answers from what it has seen itself: `leads` is
   false then. The nodes that it has not asked are `silent`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from elasticzero.launcher.agent.extensions.base import AgentContext, AgentExtension
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.http.agent_client import query_agents
from elasticzero.launcher.http.routes import Answer, Route, json_answer
from elasticzero.launcher.observability.job_status import (
    collect_status,
    job_in_view,
    phases_in_view,
)
from elasticzero.launcher.protocol.documents import Member
from elasticzero.launcher.protocol.leader import is_leader
from elasticzero.launcher.protocol.view import View
from elasticzero.ops.dashboard.body import status_page_body
from elasticzero.ops.dashboard.leader_client import JOB, JOB_PAGE, OWN_JOB, query_leader
from elasticzero.ops.dashboard.memory import JobMemory
from elasticzero.ops.dashboard.page import BODY_POLICY, status_page

REFRESH_S = 0.5
"""Least seconds between two answers that are made anew."""
REFRESH_A_NODE_S = 0.02
"""Seconds that are added for each node: the leader of a large job asks 50 agents a second."""
PATIENCE_S = 1.0
"""Seconds within which another agent must answer the leader. Until the lease of a lost node lapses,
the node delays each answer by as much."""
CANDIDATES = 3
"""Number of members that are asked whether they lead; those that come later do not see the other
nodes."""
HTML = "text/html; charset=utf-8"


class DashboardExtension(AgentExtension):
    """Serves the status page, and the status of the whole job with its history.

    Answers are made in the threads of the agent's HTTP server.
    """

    def __init__(self, context: AgentContext) -> None:
        self._name = context.options.job_of_island
        self._node = context.options.node
        self._status = context.status
        self._memory = JobMemory(self._node)
        self._seen: tuple[View, AgentAccess] | None = None
        """The view of the agent's last turn, and how agents are reached; None: it has made none."""
        self._lock = threading.Lock()
        self._latest: Mapping[str, Any] = {}
        self._until_s = 0.0

    def recorded(self, event: Mapping[str, Any]) -> None:
        self._memory.history.take(event)

    def turn(self, view: View, access: AgentAccess) -> None:
        self._seen = view, access
        self._memory.turn(view, self._status, access)

    def routes(self) -> dict[str, Route]:
        """Returns the page, and the status of the job from the leader and from this agent."""
        return {**page_routes(), **job_routes(self.document)}

    def close(self, outcome: str | None) -> None:
        self._memory.close()

    def document(self, *, pass_on: bool) -> Mapping[str, Any]:
        """Returns the status of the job with its history, as `/job` serves it.

        Args:
            pass_on: whether the leader is asked where another agent leads. Without that, and where
                no leader answers, the status is what this agent has seen itself.
        """
        seen = self._seen
        if seen is not None and pass_on:
            view, access = seen
            if not is_leader(view):
                status = query_leader(_candidates(view), access)
                if status is not None:
                    return status
        with self._lock:
            if time.monotonic() >= self._until_s:
                self._latest = self._made(seen)
                waits_s = REFRESH_S + REFRESH_A_NODE_S * len(self._latest["nodes"])
                self._until_s = time.monotonic() + waits_s
            return self._latest

    def _made(self, seen: tuple[View, AgentAccess] | None) -> Mapping[str, Any]:
        view = seen[0] if seen is not None else None
        job = job_in_view(self._name, view)
        if seen is not None:
            job = replace(job, scheme=seen[1].scheme)
        statuses: dict[str, Mapping[str, Any]] = {}
        leads = seen is not None and is_leader(seen[0])
        if seen is not None and leads:
            others = [m for m in job.members.values() if m.node != self._node]
            statuses |= query_agents(others, seen[1], timeout_s=PATIENCE_S)
        statuses[self._node] = self._status()
        history = self._memory.history.values()
        status = collect_status(job, phases_in_view(view), statuses)
        doing = statuses.get(self._node, {}).get("reason", "")
        return job_document(
            status, history, at=time.time(), node=self._node, leads=leads, doing=doing
        )


def page_routes() -> dict[str, Route]:
    """Returns the route of the status page, by path."""

    def answer(query: str) -> Answer:
        page, headers = status_page()
        return Answer(content=page, kind=HTML, headers=headers)

    return {"/": Route(answer=answer, served_to="everyone")}


def job_routes(document: Callable[..., Mapping[str, Any]]) -> dict[str, Route]:
    """Returns the routes of the status of the job, by path.

    Args:
        document: returns the status; its keyword `pass_on` asks for the leader's.
    """
    return {
        JOB: Route(
            answer=lambda query: json_answer(document(pass_on=True)), served_to="status readers"
        ),
        OWN_JOB: Route(
            answer=lambda query: json_answer(document(pass_on=False)), served_to="status readers"
        ),
        JOB_PAGE: Route(answer=PageBody(document).answer, served_to="status readers"),
    }


class PageBody:
    """Answers with the body of the status page, and keeps it until the document is another one."""

    def __init__(self, document: Callable[..., Mapping[str, Any]]) -> None:
        """Begins without an answer. document: returns the status of the job, as in `job_routes`."""
        self._document = document
        self._lock = threading.Lock()
        self._written_of: tuple[str, float] | None = None
        self._answer = Answer(content=b"")

    def answer(self, query: str) -> Answer:
        document = self._document(pass_on=True)
        version = document["node"], document["at"]
        with self._lock:
            if version != self._written_of:
                content = status_page_body(document).encode()
                self._answer = Answer(content=content, kind=HTML, headers=BODY_POLICY)
                self._written_of = version
            return self._answer


def job_document(
    status: Mapping[str, Any],
    history: Mapping[str, Any],
    *,
    at: float,
    node: str,
    leads: bool,
    doing: str,
) -> dict[str, Any]:
    """Returns what `/job` serves: the status of the job, its history, and which agent says so.

    Args:
        status: the status of the job, as `collect_status` returns it.
        history: what the agent remembers of the job, as `JobHistory.values` returns it.
        at: Unix time of the answer, by the clock of the agent; ages are counted back from it.
        node: name of the agent's node.
        leads: whether the agent leads the job.
        doing: sentence that says what the agent does and why.
    """
    document = {
        **status,
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
