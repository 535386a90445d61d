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

from elasticzero.launcher.store import Entry, Snapshot, Store, Subscription
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
NOTHING_ASKED = Control()


def document(kind: type[Any], data: bytes) -> Any:
    """The document of this kind that stands in the store as `data`."""
    return world_from_bytes(data) if kind is World else decode(kind, json.loads(data))


class Observer:
    """Follows prefixes of the store and reads documents out of their newest snapshots."""

    def __init__(
        self,
        store: Store,
        changed: Callable[[], None],
        read_document: Callable[[type[Any], bytes], Any] = document,
    ) -> None:
        self._store = store
        self._read = read_document
        self._changed = changed
        self._lock = threading.Lock()
        self._latest: dict[str, Snapshot] = {}
        self._subscriptions: dict[str, Subscription] = {}
        self._decoded: dict[str, tuple[int, Any]] = {}
        """By key: the revision of an entry, and the document that stood there."""
        self._gathered: dict[str, tuple[Snapshot, dict[str, Any]]] = {}
        """By prefix: a snapshot, and its documents by node."""

    def follow(self, prefixes: Iterable[str]) -> None:
        """Follow exactly these prefixes from now on."""
        wanted = set(prefixes)
        if wanted == self._subscriptions.keys():
            return
        for prefix in sorted(self._subscriptions.keys() - wanted):
            self._subscriptions.pop(prefix).close()
            with self._lock:
                self._latest.pop(prefix, None)
            self._gathered.pop(prefix, None)
            for key in [key for key in self._decoded if key.startswith(prefix)]:
                del self._decoded[key]
        for prefix in sorted(wanted - self._subscriptions.keys()):
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
        return self._latest.get(prefix)

    def world(self) -> tuple[World | None, int]:
        """The world, and the revision it was written at (0: there is none)."""
        entry = self._entry(WORLD, WORLD)
        if entry is None:
            return None, 0
        return self._document(entry, World), entry.mod_revision

    def done(self) -> Done | None:
        entry = self._entry(DONE, DONE)
        return self._document(entry, Done) if entry is not None else None

    def control(self) -> Control:
        entry = self._entry(CONTROL, CONTROL)
        return self._document(entry, Control) if entry is not None else NOTHING_ASKED

    def alarm(self, generation: int) -> Alarm | None:
        entry = self._entry(ALARM, f"{ALARM}{generation}")
        return self._document(entry, Alarm) if entry is not None else None

    def reports(self, generation: int) -> Mapping[str, Report] | None:
        """By node; None while they are not followed. The same object as long as nothing changes."""
        return self._gather(reports_of(generation), Report)

    def members(self) -> Mapping[str, Member] | None:
        """By node, the oldest registration first; None while they are not followed. The same object
        as long as nothing changes."""
        return self._gather(MEMBERS, Member)

    def _gather(self, prefix: str, kind: type[T]) -> Mapping[str, T] | None:
        """The documents of a followed folder by node, the oldest first."""
        snapshot = self.get(prefix)
        if snapshot is None:
            return None
        known = self._gathered.get(prefix)
        if known is not None and known[0] is snapshot:
            return known[1]
        entries = sorted(snapshot.entries.values(), key=lambda entry: entry.create_revision)
        start = len(prefix)
        found = {entry.key[start:]: self._document(entry, kind) for entry in entries}
        self._gathered[prefix] = (snapshot, found)
        return found

    def _entry(self, prefix: str, key: str) -> Entry | None:
        snapshot = self.get(prefix)
        return snapshot.entries.get(key) if snapshot is not None else None

    def _document(self, entry: Entry, kind: type[T]) -> T:
        """What stands in an entry, read once for each revision."""
        revision, found = self._decoded.get(entry.key, (0, None))
        if revision != entry.mod_revision:
            found = self._read(kind, entry.value)
            self._decoded[entry.key] = (entry.mod_revision, found)
        result: T = found
        return result


def reports_of(generation: int) -> str:
    """Prefix of a generation's reports."""
    return f"{REPORTS}{generation}/"


def members_of(snapshot: Snapshot) -> dict[str, Member]:
    """The registrations in a snapshot of `members/`, oldest first."""
    entries = sorted(snapshot.entries.values(), key=lambda entry: entry.create_revision)
    members = [decode(Member, json.loads(entry.value), entry.key) for entry in entries]
    return {member.node: member for member in members}


class Since:
    """Since when things have been so: remembers the time at which each key first appeared."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}

    def update(self, keys: Iterable[str], now_s: float) -> dict[str, float]:
        """The keys that are so now, each with the time it was first seen in an unbroken row."""
        first = self._first
        self._first = {key: first.get(key, now_s) for key in keys}
        return self._first

    def since(self, generation: int, so: bool, now_s: float) -> float | None:
        """Since when it has been so in this generation; None if it is not."""
        if not so:
            self._first = {}
            return None
        key = str(generation)
        return self.update((key,), now_s)[key]
