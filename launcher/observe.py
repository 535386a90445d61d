"""What one agent has seen of the store: the newest snapshot of each prefix it follows, and since
when.

Store threads put snapshots in; the agent's loop takes frozen values out. Times are this machine's
monotonic clock, taken when a thing was first seen here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from elasticzero.launcher.store import Snapshot, Store, Subscription
from elasticzero.launcher.world import (
    Alarm,
    Control,
    Done,
    Member,
    Report,
    World,
    world_from_bytes,
)
from elasticzero.records import decode

T = TypeVar("T")

WORLD, CONTROL, DONE, ALARM, MEMBERS, REPORTS = (
    "world",
    "control",
    "done",
    "alarm/",
    "members/",
    "reports/",
)


class Observer:
    """Follows prefixes of the store and reads documents out of their newest snapshots."""

    def __init__(self, store: Store, changed: Callable[[], None]) -> None:
        self._store = store
        self._changed = changed
        self._lock = threading.Lock()
        self._latest: dict[str, Snapshot] = {}
        self._subscriptions: dict[str, Subscription] = {}

    def follow(self, prefixes: Iterable[str]) -> None:
        """Follow exactly these prefixes from now on."""
        wanted = set(prefixes)
        for prefix in self._subscriptions.keys() - wanted:
            self._subscriptions.pop(prefix).close()
            with self._lock:
                self._latest.pop(prefix, None)
        for prefix in wanted - self._subscriptions.keys():
            self._subscriptions[prefix] = self._store.watch(prefix, self._take(prefix))

    def _take(self, prefix: str) -> Callable[[Snapshot], None]:
        def take(snapshot: Snapshot) -> None:
            self.put(prefix, snapshot)
            self._changed()

        return take

    def put(self, prefix: str, snapshot: Snapshot) -> None:
        """Take in a snapshot, unless a newer one is here."""
        with self._lock:
            known = self._latest.get(prefix)
            if known is None or known.revision <= snapshot.revision:
                self._latest[prefix] = snapshot

    def get(self, prefix: str) -> Snapshot | None:
        """The newest snapshot of a followed prefix; None before the first."""
        with self._lock:
            return self._latest.get(prefix)

    def world(self) -> tuple[World | None, int]:
        """The world, and the revision it was written at (0: there is none)."""
        entry = _entry(self.get(WORLD), WORLD)
        return (world_from_bytes(entry.value), entry.mod_revision) if entry else (None, 0)

    def done(self) -> Done | None:
        return _document(self.get(DONE), DONE, Done)

    def control(self) -> Control:
        return _document(self.get(CONTROL), CONTROL, Control) or Control()

    def alarm(self, generation: int) -> Alarm | None:
        return _document(self.get(ALARM), f"{ALARM}{generation}", Alarm)

    def reports(self, generation: int) -> dict[str, Report]:
        """By node."""
        prefix = reports_of(generation)
        return _documents(self.get(prefix), prefix, Report)

    def members(self) -> dict[str, Member] | None:
        """By node, the oldest registration first; None while they are not followed."""
        snapshot = self.get(MEMBERS)
        return None if snapshot is None else members_of(snapshot)

    def close(self) -> None:
        for subscription in self._subscriptions.values():
            subscription.close()
        self._subscriptions.clear()


def reports_of(generation: int) -> str:
    """Prefix of a generation's reports."""
    return f"{REPORTS}{generation}/"


def members_of(snapshot: Snapshot) -> dict[str, Member]:
    """The registrations in a snapshot of `members/`, oldest first."""
    entries = sorted(snapshot.entries.values(), key=lambda entry: entry.create_revision)
    members = [decode(Member, json.loads(entry.value), entry.key) for entry in entries]
    return {member.node: member for member in members}


def _entry(snapshot: Snapshot | None, key: str) -> Any:
    return snapshot.entries.get(key) if snapshot is not None else None


def _document(snapshot: Snapshot | None, key: str, kind: type[T]) -> T | None:
    entry = _entry(snapshot, key)
    return decode(kind, json.loads(entry.value), key) if entry is not None else None


def _documents(snapshot: Snapshot | None, prefix: str, kind: type[T]) -> dict[str, T]:
    entries: Mapping[str, Any] = snapshot.entries if snapshot is not None else {}
    return {
        key.removeprefix(prefix): decode(kind, json.loads(entry.value), key)
        for key, entry in entries.items()
    }


class Since:
    """Since when things have been so: remembers the time at which each key first appeared."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}

    def update(self, keys: Iterable[str], now_s: float) -> dict[str, float]:
        """The keys that are so now, each with the time it was first seen in an unbroken row."""
        self._first = {key: self._first.get(key, now_s) for key in keys}
        return self._first
