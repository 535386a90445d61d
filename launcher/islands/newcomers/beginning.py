"""Finds the state with which an island begins of which no node is there.

It is what another island has in memory, so that the island has an inner optimizer like that of the
others; else its own newest checkpoint, which its first world names; else one of another island. The
outer parameters it takes from the rounds in any case, where there are any. Its own checkpoint comes
first where more samples were in rounds by then than when the other island's snapshot was taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.ram.store import SnapshotStore
from elasticzero.errors import ElasticZeroError
from elasticzero.launcher.islands.newcomers.from_checkpoint import (
    adopt_checkpoint,
    committed_in,
    newest_of,
)
from elasticzero.launcher.islands.newcomers.from_memory import Brought, MemoryReader, Reach, Read
from elasticzero.launcher.store.api import Entry, LeaseLost, Store, unchanged
from elasticzero.launcher.store.decoding import counts_as_node, is_member, member_at
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
    saves: str | None
    """That of the island."""


@contextmanager
def one_node_at_a_time(
    store: Store, node: str, ttl_s: int, cancelled: Callable[[], bool]
) -> Iterator[None]:
    """Has the other nodes of an island wait at this place until the context ends.

    Args:
        store: The island's part of etcd.
        node: Name of this node.
        ttl_s: Seconds after which others go on where this node has died.
        cancelled: Returns whether to wait no more.

    Raises:
        StoreUnavailable: The store does not answer.
    """
    lease = store.lease(ttl_s)
    try:
        while not cancelled():
            try:
                if store.write({LOCK: node.encode()}, conditions=[FREE], lease=lease):
                    break
                time.sleep(POLL_S)
            except LeaseLost:
                lease = store.lease(ttl_s)
        yield
    finally:
        lease.close(revoke=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Holds what is read to find a state."""

    job: Read
    """Reads the part of etcd that all islands share."""
    island: Read
    """Reads the island's part of etcd."""
    reach: Reach
    snapshots: SnapshotStore
    """The node's snapshots."""


def begin_as_others(
    newcomer: Newcomer, places: Places, log_line: Callable[[str], None]
) -> Brought | None:
    """Has an island begin with the state of another one, unless other nodes of it are there.

    Args:
        newcomer: The node.
        places: What is read.
        log_line: Receives lines about what was found.

    Returns:
        What the node has in its memory now; None: nothing.

    Raises:
        StoreUnavailable: The store does not answer.
        UserError: There are checkpoints of other islands, and none can be taken.
    """
    others = places.island(MEMBERS)
    if any(_lives(e, places.reach) for k, e in others.items() if k != MEMBERS + newcomer.node):
        return None

    def is_behind(manifest: Manifest) -> bool:
        saved = None if newcomer.saves is None else _newest(newcomer.saves)
        return saved is not None and committed_in(saved) > committed_in(manifest)

    reader = MemoryReader(places.job, places.reach, places.snapshots, log_line)
    brought = reader.bring(newcomer.island, is_behind)
    if brought is not None:
        log_line(f"begins with what {brought.island} had at step {brought.step}")
        return brought
    has_begun = WORLD in places.island(WORLD)
    if newcomer.job_saves is not None and not has_begun and not places.reach.cancelled():
        adopt_checkpoint(newcomer.job_saves, newcomer.island, newcomer.workers, log_line)
    return None


def _lives(entry: Entry, reach: Reach) -> bool:
    """Returns whether a node that is registered lives: one that is killed is registered for a
    while."""
    return counts_as_node(entry) and (not is_member(entry) or reach.answers(member_at(entry)))


def _newest(saves: str) -> Manifest | None:
    """Returns the manifest of an island's own newest checkpoint; None: it has none that is good."""
    try:
        return next(newest_of(saves), None)
    except ElasticZeroError:
        return None
