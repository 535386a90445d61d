"""Holds what a process needs to read what a job's agents serve."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from elasticzero.launcher.protocol.documents import Member
from elasticzero.launcher.secrets import Secret


@dataclass(frozen=True, slots=True)
class AgentAccess:
    """Says how the agents of one job are reached."""

    token: Secret
    """The job's token."""
    tls: Callable[[], ssl.SSLContext] | None = field(default=None, compare=False)
    """Returns the context of a new connection; None: the job's agents serve without TLS."""

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"

    def connection(self, member: Member, timeout_s: float) -> http.client.HTTPConnection:
        """Returns a connection to an agent, which is not open yet.

        Args:
            member: The agent's registration.
            timeout_s: Seconds for which the agent may be silent.
        """
        host, port = member.host, member.http_port
        if self.tls is None:
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self.tls())
