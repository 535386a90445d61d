"""Collects the own times of a world's workers for the agent that leads, in a thread of its own.

Each agent measures its own workers and serves the result in its status. The leader asks all of them
now and then, seldom enough that a thousand nodes cost it little. What the times mean is decided in
`observability/compute_time.py`, which is pure and stands apart from this thread.
"""

from __future__ import annotations

import threading
import time

from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.http.agent_client import query_agents
from elasticzero.launcher.observability.compute_time import WorkerTimes, worker_times
from elasticzero.launcher.protocol.documents import World
from elasticzero.launcher.protocol.leader import is_leader
from elasticzero.launcher.protocol.view import View

POLL_S = 10.0
"""Least seconds from one poll of all agents to the next."""
POLL_A_NODE_S = 0.05
"""Least seconds for each node between two polls, in large worlds."""
THREADS = 8
"""Number of agents that are asked at a time."""


class ComputePoll:
    """Asks the agents of a world on request, in one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = 0
        self._times: WorkerTimes = {}
        self._polling = False
        self._next_s = 0.0

    def times(self) -> WorkerTimes:
        """Returns the times that are known of the world's workers, by node and local rank."""
        return self._times

    def turn(self, view: View, access: AgentAccess) -> None:
        """Asks for newer times when that is due, where this agent leads and the workers train."""
        world, now_s = view.world, time.monotonic()
        if world is None or view.round_s is not None or not is_leader(view):
            return
        with self._lock:
            if world.generation != self._generation:
                self._generation, self._times = world.generation, {}
                self._next_s = now_s + POLL_S
            if not self._polling and now_s >= self._next_s:
                self._polling = True
                self._next_s = now_s + max(POLL_S, POLL_A_NODE_S * len(world.members))
                threading.Thread(
                    target=self._ask, args=(world, access), name="elasticzero-compute", daemon=True
                ).start()

    def _ask(self, world: World, access: AgentAccess) -> None:
        try:
            statuses = query_agents(world.members, access, threads=THREADS)
            times = worker_times(world.generation, statuses)
            with self._lock:
                if world.generation == self._generation:
                    self._times = times
        finally:
            self._polling = False
