"""Gives each node a place on an island, where islands have several nodes.

Keys `places/<island>/<number>` hold the name of the node that has the place, under a lease of its
agent. A node that starts again within that time finds its own. A place whose lease has lapsed, as
etcd was away, is taken again by its node, which trains on meanwhile. Where another one has come
first, there is a node too many on the island, and one of them waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import suppress

from elasticzero.launcher.store.api import Entry, LeaseLost, Store, unchanged

PREFIX = "places/"


class Reservation:
    """Reserves a node's place on an island."""

    def __init__(self, store: Store, node: str, size: int, ttl_s: int) -> None:
        """Takes a place.

        Args:
            store: The part of etcd that all islands of the job share.
            node: The node's name.
            size: Number of places of an island.
            ttl_s: Seconds after which the place is free if its lease is not renewed.

        Raises:
            StoreUnavailable: The store does not answer.
            LeaseLost: The lease has lapsed at once.
        """
        self._store, self._node, self._ttl_s = store, node, ttl_s
        self._lease = store.lease(ttl_s)
        try:
            while True:
                entries = store.read(PREFIX).entries
                self._key = _free_place(entries, node, size)
                if self._write(entries.get(self._key)):
                    break
        except BaseException:
            self.close()
            raise

    @property
    def island(self) -> str:
        """Returns the island's name."""
        return self._key.split("/")[1]

    def keep(self) -> None:
        """Takes the place again if its lease has lapsed and no other node has it; raises
        `StoreUnavailable`."""
        if not self._lease.lost:
            return
        with suppress(LeaseLost):
            self._lease = self._store.lease(self._ttl_s)
            entry = self._store.read(self._key).entries.get(self._key)
            if entry is None or entry.value == self._node.encode():
                self._write(entry)

    def _write(self, before: Entry | None) -> bool:
        puts, conditions = {self._key: self._node.encode()}, [unchanged(self._key, before)]
        return self._store.write(puts, conditions=conditions, lease=self._lease) is not None

    def close(self) -> None:
        """Gives the place back."""
        self._lease.close(revoke=True)


def _free_place(entries: Mapping[str, Entry], node: str, size: int) -> str:
    """Returns the key of the place that a node is to take: its own, or the first that is free.

    Args:
        entries: The places that are taken.
        node: The node's name.
        size: Number of places of an island.
    """
    taken = [key for key, entry in entries.items() if entry.value == node.encode()]
    keys = (f"{PREFIX}island-{n // size}/{n % size}" for n in itertools.count())
    return taken[0] if taken else next(key for key in keys if key not in entries)
