"""The coordination store in this process, with etcd's semantics: for tests and simulations.

`MemoryServer` stands for etcd, with a clock that is passed in, and each `MemoryStore` for one
agent's connection to it, which can be cut and mended. Invariant: every key that a lease holds
exists, and every lease that lives was confirmed less than its TTL ago.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from elasticzero.errors import StoreUnavailable
from elasticzero.launcher.store.api import (
    Condition,
    Entry,
    Lease,
    LeaseLost,
    PrefixState,
    check_write,
)
from elasticzero.launcher.store.data_loss import History

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class _Grant:
    """A lease as the server sees it."""

    ttl_s: int
    confirmed_s: float
    kept: bool = True
    """Its owner is connected and renews it."""
    keys: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Backup:
    """What a server held at one time."""

    entries: Mapping[str, Entry]
    revision: int
    grants: Mapping[int, _Grant]


class MemoryServer:
    """Keys, revisions and leases; time passes when `tick` is called or the store is used."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.changed = threading.Condition(threading.RLock())
        self._entries: dict[str, Entry] = {}
        self._revision = 1
        self._grants: dict[int, _Grant] = {}
        self._last_lease = 0
        self.cluster = 1
        """The id of the cluster, which every answer carries."""

    def backup(self) -> Backup:
        with self.changed:
            self.tick()
            return Backup(dict(self._entries), self._revision, copy.deepcopy(self._grants))

    def restore(self, backup: Backup | None = None, *, cluster: int | None = None) -> None:
        """Lose all data, and hold what a backup held, or nothing. cluster: the id from now on."""
        with self.changed:
            now_s = self.clock()
            self._entries = dict(backup.entries) if backup is not None else {}
            self._revision = backup.revision if backup is not None else 1
            self._grants = copy.deepcopy(dict(backup.grants)) if backup is not None else {}
            for grant in self._grants.values():
                grant.confirmed_s = now_s
            self.cluster = cluster if cluster is not None else self.cluster
            self.changed.notify_all()

    def tick(self) -> None:
        """Renew what is kept alive, and end every lease whose time has passed."""
        with self.changed:
            now_s = self.clock()
            for grant in self._grants.values():
                if grant.kept:
                    grant.confirmed_s = now_s
            over = [i for i, g in self._grants.items() if now_s - g.confirmed_s > g.ttl_s]
            for lease_id in over:
                self.revoke(lease_id)

    def next_expiry_s(self) -> float | None:
        """Seconds until the first lease that nobody renews runs out."""
        with self.changed:
            ends = [g.confirmed_s + g.ttl_s for g in self._grants.values() if not g.kept]
            return max(0.0, min(ends) - self.clock()) if ends else None

    def read(self, prefix: str, limit: int) -> PrefixState:
        with self.changed:
            self.tick()
            under_prefix = [e for key, e in self._entries.items() if key.startswith(prefix)]
            under_prefix.sort(key=lambda entry: (entry.create_revision, entry.key))
            chosen = under_prefix[:limit] if limit else under_prefix
            entries = MappingProxyType({entry.key: entry for entry in chosen})
            return PrefixState(revision=self._revision, entries=entries)

    def count(self, prefix: str, revision: int) -> int:
        with self.changed:
            self.tick()
            return sum(
                key.startswith(prefix) and entry.create_revision <= revision
                for key, entry in self._entries.items()
            )

    def write(
        self,
        puts: Mapping[str, bytes],
        deletes: Sequence[str],
        conditions: Sequence[Condition],
        lease_id: int,
    ) -> int | None:
        with self.changed:
            self.tick()
            if not all(self._holds(condition) for condition in conditions):
                return None
            if lease_id and puts and lease_id not in self._grants:
                raise LeaseLost(f"lease {lease_id:x} is gone, nothing was written: take a new one")
            gone = [
                key
                for key in self._entries
                if any(key == d or (d.endswith("/") and key.startswith(d)) for d in deletes)
            ]
            if puts or gone:
                self._revision += 1
            for key in gone:
                self._remove(key)
            for key, value in puts.items():
                self._put(key, value, lease_id)
            self.changed.notify_all()
            return self._revision

    def grant(self, ttl_s: int) -> int:
        with self.changed:
            self._last_lease += 1
            self._grants[self._last_lease] = _Grant(ttl_s=ttl_s, confirmed_s=self.clock())
            return self._last_lease

    def keep(self, lease_id: int, kept: bool) -> bool:
        """Whether the lease still lives; from now on its owner renews it, or no longer does."""
        with self.changed:
            self.tick()
            grant = self._grants.get(lease_id)
            if grant is not None:
                grant.kept = kept
            self.changed.notify_all()
            return grant is not None

    def confirmed_s(self, lease_id: int) -> float | None:
        with self.changed:
            self.tick()
            grant = self._grants.get(lease_id)
            return None if grant is None else grant.confirmed_s

    def revoke(self, lease_id: int) -> None:
        with self.changed:
            grant = self._grants.pop(lease_id, None)
            if grant is not None and grant.keys:
                self._revision += 1
                for key in sorted(grant.keys):
                    self._entries.pop(key, None)
                self.changed.notify_all()

    def _holds(self, condition: Condition) -> bool:
        entry = self._entries.get(condition.key)
        modified, created = (entry.mod_revision, entry.create_revision) if entry else (0, 0)
        if condition.value is not None and (entry is None or entry.value != condition.value):
            return False
        return condition.mod_revision in (None, modified) and condition.create_revision in (
            None,
            created,
        )

    def _put(self, key: str, value: bytes, lease_id: int) -> None:
        before = self._remove(key)
        entry = Entry(
            key=key,
            value=value,
            create_revision=self._revision,
            mod_revision=self._revision,
            leased=lease_id != 0,
        )
        if before is not None:
            entry = replace(entry, create_revision=before.create_revision)
        self._entries[key] = entry
        if lease_id:
            self._grants[lease_id].keys.add(key)

    def _remove(self, key: str) -> Entry | None:
        for grant in self._grants.values():
            grant.keys.discard(key)
        return self._entries.pop(key, None)


class MemoryStore:
    """One agent's connection to a `MemoryServer`: a `Store`."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._cut = False
        self._closed = False
        self._last_outage_end_s = 0.0
        self.history = History(self._lost_data)
        self._leases: list[_MemoryLease] = []
        self._watches: list[_MemoryWatch] = []

    @property
    def reachable(self) -> bool:
        return not self._cut

    @property
    def last_outage_end_s(self) -> float:
        return self._last_outage_end_s

    def cut(self) -> None:
        """Put the server out of this agent's reach: its leases are no longer renewed."""
        with self._server.changed:
            self._cut = True
            for lease in self._leases:
                self._server.keep(lease.id, False)

    def mend(self) -> None:
        """Let the agent reach the server again: leases that live go on, the others are lost."""
        with self._server.changed:
            self._cut = False
            self._last_outage_end_s = self._server.clock()
            lost = [lease for lease in self._leases if not self._server.keep(lease.id, True)]
            self._leases = [lease for lease in self._leases if lease not in lost]
            self._server.changed.notify_all()
        for lease in lost:
            lease.lose()

    def read(self, prefix: str, *, limit: int = 0) -> PrefixState:
        self._check("read")
        return self.snapshot(prefix, limit)

    def snapshot(self, prefix: str, limit: int = 0) -> PrefixState:
        """What stands under a prefix, in the history that it is of."""
        with self._server.changed:
            state = self._server.read(prefix, limit)
            self._answered(state.revision)
            return replace(state, history=self.history.number)

    def count(self, prefix: str, revision: int) -> int:
        self._check("count")
        return self._server.count(prefix, revision)

    def write(
        self,
        puts: Mapping[str, bytes],
        *,
        deletes: Sequence[str] = (),
        conditions: Sequence[Condition] = (),
        lease: Lease | None = None,
    ) -> int | None:
        check_write(puts, deletes, conditions)
        self._check("write")
        with self._server.changed:
            lease_id = 0 if lease is None else lease.id
            revision = self._server.write(puts, deletes, conditions, lease_id)
            self._answered(revision or 0, wrote=bool(puts))
            return revision

    def watch(self, prefix: str, changed: Callable[[PrefixState], None]) -> _MemoryWatch:
        watch = _MemoryWatch(self, self._server, prefix, changed)
        self._watches.append(watch)
        watch.thread.start()
        return watch

    def lease(self, ttl_s: int, *, on_lost: Callable[[], None] | None = None) -> _MemoryLease:
        self._check("lease")
        lease = _MemoryLease(self, self._server, ttl_s, on_lost)
        self._leases.append(lease)
        return lease

    def close(self) -> None:
        with self._server.changed:
            self._closed = True
            for lease in self._leases:
                self._server.keep(lease.id, False)
        for watch in self._watches:
            watch.close()

    def forget(self, lease: _MemoryLease) -> None:
        with self._server.changed:
            self._leases = [kept for kept in self._leases if kept is not lease]

    def _answered(self, revision: int, *, wrote: bool = False) -> None:
        """Take note of an answer; the server is locked."""
        position, cluster = self.history.position(), self._server.cluster
        self.history.judge_response(position, cluster, revision, wrote=wrote)

    def _lost_data(self) -> None:
        self._last_outage_end_s = self._server.clock()
        lost = [lease for lease in self._leases if not self._server.keep(lease.id, not self._cut)]
        self._leases = [lease for lease in self._leases if lease not in lost]
        for lease in lost:
            threading.Thread(target=lease.lose, name="lease lost", daemon=True).start()

    def _check(self, operation: str) -> None:
        if self._cut or self._closed:
            state = "closed" if self._closed else "cut off"
            raise StoreUnavailable(f"no {operation}: this connection to the store is {state}")


class _MemoryLease:
    def __init__(
        self,
        store: MemoryStore,
        server: MemoryServer,
        ttl_s: int,
        on_lost: Callable[[], None] | None,
    ) -> None:
        self.id = server.grant(ttl_s)
        self.ttl_s = ttl_s
        self._store = store
        self._server = server
        self._on_lost = on_lost
        self._lost = False
        self._confirmed_s = server.clock()

    @property
    def lost(self) -> bool:
        return self._lost

    @property
    def confirmed_s(self) -> float:
        if self._store.reachable:
            self._confirmed_s = self._server.confirmed_s(self.id) or self._confirmed_s
        return self._confirmed_s

    def lose(self) -> None:
        self._lost = True
        if self._on_lost is not None:
            self._on_lost()

    def close(self, *, revoke: bool) -> None:
        self._store.forget(self)
        self._server.keep(self.id, False)
        if revoke and self._store.reachable:
            self._server.revoke(self.id)


class _MemoryWatch:
    """A thread that tells each state it finds different from the one it told last."""

    def __init__(
        self,
        store: MemoryStore,
        server: MemoryServer,
        prefix: str,
        changed: Callable[[PrefixState], None],
    ) -> None:
        self._store = store
        self._server = server
        self._prefix = prefix
        self._changed = changed
        self._closed = False
        self.thread = threading.Thread(target=self._run, name=f"watch {prefix}", daemon=True)

    def close(self) -> None:
        with self._server.changed:
            self._closed = True
            self._server.changed.notify_all()
        if threading.current_thread() is not self.thread:
            self.thread.join(2.0)

    def _run(self) -> None:
        told: PrefixState | None = None
        while (snapshot := self._next(told)) is not None:
            self._changed(snapshot)
            told = snapshot

    def _next(self, told: PrefixState | None) -> PrefixState | None:
        """The next state to tell, once there is one; None when closed."""
        with self._server.changed:
            while not self._closed:
                if self._store.reachable:
                    snapshot = self._store.snapshot(self._prefix)
                    last = (told.history, told.entries) if told is not None else None
                    if last != (snapshot.history, snapshot.entries):
                        return snapshot
                self._server.changed.wait(self._server.next_expiry_s())
        return None
