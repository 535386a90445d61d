"""Brings one rank into a world that others enter inside of their loops.

Rules:
 NC1  The rank runs its script up to `session.restore` without a connection to the others
      (`comm/worlds/unconnected.py`). There it connects to them, unless its script differs, and
      waits until they have gone over.
 NC2  Then it restores the state of their boundary, and goes on to the loop that they are in. What
      it does on the way concerns nobody else.
 NC3  As its first global batch begins it takes part in what all ranks do. Until then the others
      wait, at the latest for its gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from elasticzero.checkpoint.io.reader import Checkpoint
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.comm.rendezvous import ClosableStore, RankInfo
from elasticzero.comm.worlds import entering
from elasticzero.comm.worlds.next_world import connect_beside
from elasticzero.comm.worlds.unconnected import refuse_meetings
from elasticzero.errors import ElasticZeroError, EntryRefused
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.messages import AwaitsBoundary, Switched
from elasticzero.snapshots.restore import open_source

POLL_S = 0.002
T = TypeVar("T")


class Newcomer:
    """Holds how far one rank has come on its way into a world."""

    def __init__(
        self,
        link: AgentClient,
        groups: ProcessGroups,
        check: Callable[[str], None],
    ) -> None:
        """Begins without a connection.

        Args:
            link: The client of the agent.
            groups: The groups, which are connected by `join`.
            check: Raises `EntryRefused` where what rank 0 tells is not so on this rank.
        """
        self._link, self._groups, self._check = link, groups, check
        self._allow_meetings = refuse_meetings()
        self._connected: ProcessGroups | None = None
        self.boundary: entering.Boundary | None = None
        """The boundary at which the others have gone over; None: they have not."""
        self._told_s = 0.0
        """When this rank was told of it, by the monotonic clock."""

    def await_boundary(self) -> entering.Boundary:
        """Returns the boundary whose state this rank begins with, once the others have gone over;
        the assignment names it then (NC1).

        Raises:
            EntryRefused: This rank's script is not that of the others.
            DistError: The others are gone.
        """
        a, token = self._link.assignment, self._link.assignment.token

        def reached(store: ClosableStore) -> None:
            text = entering.told(store, token, entering.SCRIPT, a.connect_timeout_s)
            self._check(text)

        with self._link.busy("waiting for the others' boundary"):
            self._link.send(AwaitsBoundary())
            self._connected = connect_beside(
                RankInfo.from_assignment(a), self._groups.device, None, reached
            )
            text = entering.told(self._connected.store, token, entering.BOUNDARY, a.start_timeout_s)
        self._told_s = time.monotonic()
        self.boundary = boundary = entering.Boundary.decoded(text)
        self._link.assignment = replace(
            a,
            resume=Resume(
                tier="ram",
                step=boundary.newest.step,
                generation=a.resume.generation,
                sources=a.resume.sources,
            ),
            checkpoint_every=boundary.checkpoint_every,
            snapshot_every=boundary.snapshot_every,
            verify_every=boundary.verify_every,
        )
        return boundary

    def require_boundary(self, what: str) -> None:
        """Raises `EntryRefused` unless the boundary is known.

        Args:
            what: What is to be read of its state.
        """
        if self.boundary is None:
            raise EntryRefused(f"{what} is not known before session.restore, inside of a loop")

    def open_source(self) -> Checkpoint:
        """Returns the state of the boundary, once rank 0's node holds its shard. The first read of
        another shard waits for the node that has captured that one.

        Raises:
            ElasticZeroError: It does not hold it within the time for connecting. A read of the
                state raises the same.
        """
        assignment = self._link.assignment
        deadline_s = time.monotonic() + assignment.connect_timeout_s

        def until_held(open_it: Callable[[], T]) -> T:
            while True:
                try:
                    return open_it()
                except ElasticZeroError:
                    if time.monotonic() >= deadline_s:
                        raise
                self._link.check()
                time.sleep(POLL_S)

        return open_source(assignment, until_held)

    def check_loop(self, loop: Mapping[str, str]) -> None:
        """Raises unless this rank has come to the loop that the others are in, or takes part.

        Args:
            loop: The description of its loop.

        Raises:
            EntryRefused: It is another one.
        """
        if self._connected is None or self.boundary is None:
            return
        theirs = self.boundary.loop
        odd = [name for name in {**theirs, **loop} if theirs.get(name) != loop.get(name)]
        if odd:
            raise EntryRefused(
                f"{odd[0]} of the loop is {loop.get(odd[0])} here, and {theirs.get(odd[0])} on the "
                "ranks that train"
            )

    def join(self) -> bool:
        """Has this rank be one of those that it was to be among (NC3); returns False if it is.

        Raises:
            DistBackendError: The groups were shut.
        """
        connected, self._connected = self._connected, None
        if connected is None or self.boundary is None:
            return False
        self._allow_meetings()
        self._groups.connect_as(connected)
        seconds = time.monotonic() - self._told_s
        token, step = self._link.assignment.token, self.boundary.newest.step
        self._link.send(Switched(token=token, step=step, seconds=seconds))
        return True

    @property
    def is_on_its_way(self) -> bool:
        """Returns whether the others have gone over, and this rank takes no part yet."""
        return self._connected is not None and self.boundary is not None

    def shut(self) -> None:
        """Breaks the connections that are not the groups' yet; any thread may call it."""
        connected = self._connected
        if connected is not None:
            connected.shut()
