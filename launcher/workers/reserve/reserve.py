"""Holds what a node's next workers are made from: its fork server, processes of the generation
before that may go on, and processes that stand by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set

from elasticzero.ipc.channel import ChannelClosed
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.workers.forking.client import ForkServer
from elasticzero.launcher.workers.group import WorkerGroup
from elasticzero.launcher.workers.process import Worker, kill_all
from elasticzero.launcher.workers.reserve.standby_rules import StandbyFacts, StandbyMode
from elasticzero.launcher.workers.reserve.standbys import Standbys
from elasticzero.processes import ram

LOOK_S = 0.5
"""Seconds between two looks at whether a process is to stand by."""


def trains(view: View) -> bool:
    """Returns whether the workers of this node train, and no change of the world is under way."""
    state = view.workers
    changing = view.round_s is not None or view.proposal is not None or state.prepared is not None
    ends = view.leaving or view.done is not None
    return state.restored and state.failure is None and not (changing or ends)


def waits(view: View) -> bool:
    """Returns whether this node waits for a place in a world that trains."""
    outside = view.world is not None and view.outside_s is not None
    return outside and view.round_s is None and view.done is None and not view.leaving


class Reserve:
    """Has one fork server at a time; where that dies, all processes that it has forked die too."""

    def __init__(self, start_server: Callable[[], ForkServer], standbys: Standbys) -> None:
        """Starts a fork server.

        Args:
            start_server: Starts one.
            standbys: The processes that stand by.
        """
        self._start_server = start_server
        self.server = start_server()
        self.standbys = standbys
        self._kept: dict[int, Worker] = {}
        """Processes of a retired group that are ready for the next one, by local rank."""
        self._settled_s: float | None = None
        """Time since which the workers train, or a spare node waits; None: neither."""
        self._looked_s = -math.inf
        self.script_s: float | None = None
        """Seconds from a worker's fork to `elasticzero.run`, when it was last seen; None: never."""
        self._script_bytes = 0

    def ended(self) -> list[tuple[int, int]] | None:
        """Returns process id and exit code of each process that has ended since the last call; None
        if the server has died."""
        try:
            return self.server.ended()
        except (ChannelClosed, OSError, ValueError):
            return None

    def replace_server(self) -> None:
        """Starts another fork server; raises `OSError` where the machine has no room for one now. A
        closed server is found dead at the next look."""
        self.standbys.forget_all()
        self.server.close()
        self.server = self._start_server()

    def turn(self, view: View, group: WorkerGroup | None, mode: StandbyMode, now_s: float) -> None:
        """Starts a process that stands by, or ends them, if that is to be.

        Args:
            view: What the agent sees.
            group: This node's workers.
            mode: Value of --standby.
            now_s: Present time, on the monotonic clock.
        """
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        if group is not None and group.script_s is not None:
            self.script_s, self._script_bytes = group.script_s, group.script_bytes
        is_spare = group is None and waits(view)
        if not is_spare and (group is None or not trains(view)):
            self._settled_s = None
        elif self._settled_s is None:
            self._settled_s = now_s
        facts = StandbyFacts(
            mode=mode,
            is_program=self.standbys.launch.is_program,
            refused=self.standbys.refused,
            settled_s=None if self._settled_s is None else now_s - self._settled_s,
            is_spare=is_spare,
            script_s=self.script_s,
            on_gpu=group is not None and group.on_gpu,
            memory=ram(),
            script_bytes=self._script_bytes,
            beginning=self.standbys.beginning,
        )
        try:
            self.standbys.turn(self.server, facts, now_s)
        except (ChannelClosed, OSError):
            return  # the server has died, which the next poll finds; or this machine is too full

    def keep(self, workers: Mapping[int, Worker]) -> None:
        """Keeps the processes of a group that may go on in another generation.

        Args:
            workers: The processes, by local rank.
        """
        kill_all(self._kept.values())
        self._kept = dict(workers)

    def take(self, local_ranks: Set[int]) -> dict[int, Worker]:
        """Returns processes for the workers of a generation; no other is kept from now on.

        Args:
            local_ranks: Local ranks of the workers.
        """
        kept, self._kept = self._kept, {}
        kill_all(worker for rank, worker in kept.items() if rank not in local_ranks)
        taken = {rank: worker for rank, worker in kept.items() if rank in local_ranks}
        return taken | self.standbys.take(self.server, local_ranks - taken.keys())

    def close(self) -> None:
        """Ends all processes."""
        self.standbys.close()
        self.server.close()
