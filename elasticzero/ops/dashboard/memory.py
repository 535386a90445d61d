"""Keeps the history of a job in an agent: what it has seen, and what was before it joined.

A node that joins may lead the job later, once all earlier nodes have left. So its agent asks the
leader for the history once, in a thread, and continues it. It asks once its workers train: the
other nodes stand still until then, and the leader asks all of them to answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.protocol.documents import World
from elasticzero.launcher.protocol.view import View
from elasticzero.ops.dashboard.history import JobHistory
from elasticzero.ops.dashboard.leader_client import query_leader

GOODPUT_EVERY_S = 1.0
"""Least seconds between two values of the goodput in the history."""
TRIES = 5
PAUSE_S = 2.0
"""Seconds between two tries to ask the leader."""
CLOSE_S = 1.0
"""Maximum seconds for which `close` waits for a try to end."""


class JobMemory:
    """Fills the history of a job in the agent's loop."""

    def __init__(self, node: str) -> None:
        """Begins an empty history. node: name of the agent's node."""
        self.history = JobHistory(node)
        self._node = node
        self._goodput_due_s = 0.0
        self._thread: threading.Thread | None = None
        self._joined_in = 0
        """First generation that has named the node; 0: none has."""
        self._ended = threading.Event()

    def turn(
        self, view: View, status: Callable[[], Mapping[str, Any]], access: AgentAccess
    ) -> None:
        """Notes what the events do not say; called in each turn of the agent's loop.

        Args:
            view: what the agent sees in this turn.
            status: returns what the agent serves at `/status`, of which the goodput is noted.
            access: how the leader is asked.
        """
        now_s = time.monotonic()
        if now_s >= self._goodput_due_s:
            self._goodput_due_s = now_s + GOODPUT_EVERY_S
            self.history.goodput(time.time(), status()["goodput"])
        world = view.world
        if world is None or not world.names(view.me):
            return
        self._joined_in = self._joined_in or world.generation
        trains = view.workers.stepped_s > 0 or view.workers.plain
        if self._joined_in > 1 and trains and self._thread is None:
            self._thread = threading.Thread(
                target=self._ask, args=(world, access), name="elasticzero-history", daemon=True
            )
            self._thread.start()

    def _ask(self, world: World, access: AgentAccess) -> None:
        others = [member for member in world.members if member.node != self._node]
        for _ in range(TRIES):
            leader_status = query_leader(others, access)
            if leader_status is not None:
                self.history.continues(leader_status["history"])
                return
            if self._ended.wait(PAUSE_S):
                return

    def close(self) -> None:
        """Ends the tries to ask the leader."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
