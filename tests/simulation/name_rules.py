"""The rule of agents that have one name: R23 of `launcher/protocol/invariants.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from elasticzero.launcher.protocol.documents import Member

if TYPE_CHECKING:
    from tests.simulation.agents import Agent
    from tests.simulation.cluster import Cluster


class NameRules:
    """Checks who may have a name."""

    def __init__(self, cluster: Cluster, require: Callable[[bool, str, str], None]) -> None:
        self._cluster = cluster
        self._require = require

    def registers(self, member: Member, registered: Collection[tuple[str, str]]) -> None:
        """R23: no agent takes the name of another one that is registered.

        registered: what stands, by node and incarnation.
        """
        cluster = self._cluster
        agents = [host.agent for host in (cluster.hosts[member.node], *cluster.namesakes)]
        for agent in agents:
            writes = agent is not None and agent.store is cluster.etcd.writer
            if agent is None or writes or agent.host.name != member.node or cluster.etcd.losses:
                continue
            me = agent.membership.me
            stands = (me.node, me.incarnation) in registered
            text = f"{me.node} is registered as {member.incarnation}, over {me.incarnation}"
            self._require(not stands or me.incarnation == member.incarnation, "R23", text)

    def is_refused(self, agent: Agent) -> None:
        """R23: only an agent ends for its name whose name another one has had all the time."""
        others = [
            host.agent
            for host in (self._cluster.hosts[agent.host.name], *self._cluster.namesakes)
            if host.name == agent.host.name and host.agent is not agent
        ]
        taken = any(other is not None for other in others)
        text = f"{agent.host.name} ends, though no other machine has its name"
        self._require(taken or self._cluster.etcd.losses > 0, "R23", text)

    def has_namesake(self, agent: Agent) -> bool:
        """Whether another agent that lives has its name: they wait for each other's lease."""
        name = agent.host.name
        others = [a for a in self._cluster.running() if a.host.name == name and a is not agent]
        return bool(others)
