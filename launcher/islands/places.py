"""Gives each node a place on an island, where islands have several nodes.

Keys `places/<island>/<number>` hold the name of the node that has the place, under a lease of its
agent. A node that starts again within that time finds its own. A place whose lease has lapsed, as
etcd was away, may be given away while its node trains on: a node too many on an island waits there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from elasticzero.launcher.store.api import Entry, Lease, Store, unchanged

PREFIX = "places/"


def take_place(store: Store, node: str, size: int, ttl_s: int) -> tuple[str, Lease]:
    """Takes a place; returns the island, and the lease that keeps the place.

    Args:
        store: The part of etcd that all islands of the job share.
        node: The node's name.
        size: Number of places of an island.
        ttl_s: Seconds after which the place is free if its lease is not renewed.

    Raises:
        StoreUnavailable: The store does not answer.
    """
    lease = store.lease(ttl_s)
    try:
        while True:
            entries = store.read(PREFIX).entries
            key = free_place(entries, node, size)
            conditions = [unchanged(key, entries.get(key))]
            if store.write({key: node.encode()}, conditions=conditions, lease=lease) is not None:
                return key.split("/")[1], lease
    except BaseException:
        lease.close(revoke=True)
        raise


def free_place(entries: Mapping[str, Entry], node: str, size: int) -> str:
    """Returns the key of the place that a node is to take: its own, or the first that is free.

    Args:
        entries: The places that are taken.
        node: The node's name.
        size: Number of places of an island.
    """
    taken = [key for key, entry in entries.items() if entry.value == node.encode()]
    keys = (f"{PREFIX}island-{n // size}/{n % size}" for n in itertools.count())
    return taken[0] if taken else next(key for key in keys if key not in entries)
