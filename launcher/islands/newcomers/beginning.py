"""Finds the state with which an island begins of which no node is there.

It is what another island has in memory, so that the island has an inner optimizer like that of the
others; else its own newest checkpoint, which its first world names; else one of another island. The
outer parameters it takes from the rounds in any case, where there are any.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from elasticzero.checkpoint.ram.store import SnapshotStore
from elasticzero.launcher.islands.newcomers.from_checkpoint import adopt_checkpoint
from elasticzero.launcher.islands.newcomers.from_memory import Brought, Reach, bring_snapshot
from elasticzero.launcher.store.api import LeaseLost, Store, unchanged
from elasticzero.launcher.store.watch_cache import MEMBERS, WORLD

LOCK, POLL_S = "adopting", 0.2
"""Key of the node that looks for a state, and seconds between two looks at it."""
FREE = unchanged(LOCK, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """Describes the node that looks for a state."""

    node: str
    island: str
    workers: int
    """Number of the island's workers, nearly."""
    job_saves: str | None
    """Checkpoint directory of the job; None: it has none."""


@contextmanager
def one_node_at_a_time(store: Store, node: str, ttl_s: int) -> Iterator[None]:
    """Has the other nodes of an island wait at this place until the context ends.

    Args:
        store: The island's part of etcd.
        node: Name of this node.
        ttl_s: Seconds after which others go on where this node has died.

    Raises:
        StoreUnavailable: The store does not answer.
    """
    lease = store.lease(ttl_s)
    try:
        while True:
            try:
                if store.write({LOCK: node.encode()}, conditions=[FREE], lease=lease):
                    break
                time.sleep(POLL_S)
            except LeaseLost:
                lease = store.lease(ttl_s)
        yield
    finally:
        lease.close(revoke=True)


def begin_as_others(
    newcomer: Newcomer,
    job: Store,
    island: Store,
    reach: Reach,
    snapshots: SnapshotStore,
    log_line: Callable[[str], None],
) -> Brought | None:
    """Has an island begin with the state of another one, unless other nodes of it are there.

    Args:
        newcomer: The node.
        job: The part of etcd that all islands share.
        island: The island's part of etcd.
        reach: How agents of other islands are reached.
        snapshots: The node's snapshots.
        log_line: Receives a line about what was found.

    Returns:
        What the node has in its memory now; None: nothing.

    Raises:
        StoreUnavailable: The store does not answer.
        UserError: There are checkpoints of other islands, and none can be taken.
    """
    if {*island.read(MEMBERS).entries} - {MEMBERS + newcomer.node}:
        return None
    brought = bring_snapshot(job, newcomer.island, reach, snapshots, log_line)
    if brought is not None:
        log_line(f"begins with what {brought.island} had at step {brought.step}")
    elif newcomer.job_saves is not None and WORLD not in island.read(WORLD).entries:
        adopt_checkpoint(newcomer.job_saves, newcomer.island, newcomer.workers, log_line)
    return brought
