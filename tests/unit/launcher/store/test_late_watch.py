"""A node was away while its job ended and was begun again, and its watches tell of that late."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elasticzero.errors import RunEnded
from elasticzero.launcher.protocol.documents import Run, to_bytes
from elasticzero.launcher.store.job_run import RUN
from elasticzero.launcher.store.watch_cache import MEMBERS, WORLD
from tests.support.memory_store import MemoryServer
from tests.unit.launcher.store.nodes import Node, stands, world


@pytest.mark.parametrize("new", [None, 1])
def test_a_restart_that_is_seen_late_is_no_loss(
    server: MemoryServer, node: Callable[..., Node], new: int | None
) -> None:
    """A release without runs began the job again: no number tells of it, but revisions do.

    The node registered anew before it looked. Then it took the world's end for a loss, and wrote
    the old world over the new one.
    """
    a = node("a")
    a.store.write({WORLD: to_bytes(world(8, "a"))})
    a.look()
    server.write({}, [MEMBERS, WORLD], (), 0)
    server.revoke(1)
    a.lose_lease()
    if new is not None:
        server.write({WORLD: to_bytes(world(new, "b", token="new-run"))}, (), (), 0)
    for _ in range(3):
        a.turn()
    a.turns()
    assert a.store.history.number == 0, a.messages
    assert stands(server).get(WORLD, {}).get("generation") == new


@pytest.mark.parametrize("new", [None, 1])
def test_a_node_of_an_earlier_run_writes_nothing(
    server: MemoryServer, node: Callable[..., Node], new: int | None
) -> None:
    """Not even its registration: the store refuses each of its writes, and it is told why."""
    a = node("a")
    a.store.write({WORLD: to_bytes(world(8, "a", run=1))})
    a.look()
    server.revoke(1)
    a.lose_lease()
    server.write({RUN: to_bytes(Run(number=2))}, [MEMBERS, WORLD], (), 0)
    if new is not None:
        server.write({WORLD: to_bytes(world(new, "b", token="new-run", run=2))}, (), (), 0)
    before = stands(server)
    for _ in range(3):
        with pytest.raises(RunEnded, match="run 2 of the job has taken the place of run 1"):
            a.turn()
    a.look()
    assert a.observer.world()[0] in (None, world(8, "a", run=1)), "what it knew, or nothing"
    assert a.observer.later_run == (2 if new is not None else 0)
    assert stands(server) == before
