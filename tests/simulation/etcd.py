"""A model of etcd: keys, revisions, leases by its own clock, outages, and the loss of its data."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import Protocol

from elasticzero.launcher.store.api import Condition, Entry, LeaseLost, PrefixState
from tests.simulation.timeline import Timeline

EXPIRY_CHECK_S = 0.5
"""etcd looks for leases that have run out so often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What etcd does one after another, in seconds; by default nothing takes it any time."""

    read_s: float = 0.0
    write_s: float = 0.0
    told_s: float = 0.0
    """One watch told of one change."""
    byte_s: float = 0.0
    """Of what it sends."""
    answer_s: float = 0.0
    """Each answer, and each message to a watch, comes so much later; all wait side by side."""


class Watching(Protocol):
    """Is told that something under a prefix has changed."""

    prefix: str

    def poke(self) -> None: ...


class Bucket:
    """The keys up to the last slash of their names: what one watch or one read is about."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        """Oldest first: a key that is written again keeps its place."""
        self.names: list[str] = []
        self.snapshot: PrefixState | None = None
        self.newest = b""
        """What was put here last."""
        self.watches: list[Watching] = []


class Grant:
    """A lease as etcd sees it."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.ends_s = 0.0
        self.keys: set[str] = set()


def bucket_name(key: str) -> str:
    return key[: key.rfind("/") + 1] or key


@dataclass(frozen=True, slots=True)
class Backup:
    """What etcd held at one time."""

    revision: int
    entries: tuple[Entry, ...]
    grants: Mapping[int, tuple[float, frozenset[str]]]
    """By lease: its TTL, and the keys that go with it."""


class Etcd:
    """Keys, revisions, leases and watches."""

    def __init__(self, timeline: Timeline, random: Random, costs: Costs | None = None) -> None:
        self.timeline = timeline
        self.random = random
        self.costs = costs
        self._busy_until_s = 0.0
        self._away_s = 0.0
        self.rate = random.uniform(0.99, 1.01)
        """How fast its clock goes."""
        self.state = "up"
        """Or "paused": silent; or "killed": refuses connections."""
        self.back_s = 0.0
        """When an outage ends."""
        self.gone_s = 0.0
        """When the last one began."""
        self.revision = 1
        self.writer: object | None = None
        """Whose write is being done."""
        self.late = False
        """Its sender has given it up."""
        self.frozen_s = 0.0
        """For so long its sender was frozen before it was sent."""
        self.written: Callable[[str, Entry], None] = lambda key, entry: None
        """Told of every put."""
        self.removed: Callable[[str, Entry], None] = lambda key, entry: None
        """Told of every key that goes."""
        self.restored: Callable[[str, Entry], None] = lambda key, entry: None
        """Told of every key that a backup brings back."""
        self.losses = 0
        """How often it has lost its data, and when it last did."""
        self.lost_s = 0.0
        self.losing = False
        """Keys go because it loses its data."""
        self.cluster = 1
        """The id that its answers carry."""
        self.backups: list[Backup] = []
        self._buckets: dict[str, Bucket] = {}
        self._grants: dict[int, Grant] = {}
        self._holders: dict[str, Grant] = {}
        """By key: the lease it goes with."""
        self._leases = 0
        self._backlog: list[Callable[[], object]] = []

    def bucket(self, name: str) -> Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = Bucket()
        return bucket

    def queue_s(self, cost_s: float) -> float:
        """How long it takes until work of this size is done, after what came before it."""
        now_s = self.timeline.now_s
        self._busy_until_s = max(now_s, self._busy_until_s) + cost_s
        return self._busy_until_s - now_s

    def told_s(self, name: str) -> float:
        """How long it takes to send what one watch of a bucket is told."""
        if self.costs is None:
            return 0.0
        sent = self.bucket(name).newest
        queue_s = self.queue_s(self.costs.told_s + len(sent) * self.costs.byte_s)
        return queue_s + self.costs.answer_s

    @property
    def answer_s(self) -> float:
        """So much later each answer comes."""
        return 0.0 if self.costs is None else self.costs.answer_s

    def read(self, prefix: str, limit: int = 0) -> PrefixState:
        bucket = self.bucket(bucket_name(prefix))
        if limit:
            first = list(bucket.entries.values())[:limit] if limit > 1 else _first(bucket)
            return self._snapshot({entry.key: entry for entry in first})
        if prefix == bucket_name(prefix):
            if bucket.snapshot is None or self.losses:  # then the revision tells old from new
                bucket.snapshot = self._snapshot(dict(bucket.entries))
            return bucket.snapshot
        entries, index = {}, bisect_left(bucket.names, prefix)
        while index < len(bucket.names) and bucket.names[index].startswith(prefix):
            entries[bucket.names[index]] = bucket.entries[bucket.names[index]]
            index += 1
        return self._snapshot(entries)

    def count(self, prefix: str, revision: int) -> int:
        """Of what stands under a whole folder now."""
        count = 0
        for entry in self.bucket(prefix).entries.values():  # oldest first
            if entry.create_revision > revision:
                break
            count += 1
        return count

    def _snapshot(self, entries: dict[str, Entry]) -> PrefixState:
        return PrefixState(revision=self.revision, entries=MappingProxyType(entries))

    def write(
        self,
        puts: Mapping[str, bytes],
        deletes: Sequence[str],
        conditions: Sequence[Condition],
        lease_id: int,
    ) -> int | None:
        for condition in conditions:
            entry = self.bucket(bucket_name(condition.key)).entries.get(condition.key)
            if condition.mod_revision != (entry.mod_revision if entry else 0):
                return None
            if condition.value is not None and (entry is None or entry.value != condition.value):
                return None
        grant = self._grants.get(lease_id)
        if lease_id and grant is None:
            raise LeaseLost(f"lease {lease_id:x} is gone")
        gone = [key for name in deletes for key in self._named(name)]
        if puts or gone:
            self.revision += 1
        changed = {self._remove(key) for key in gone}
        changed |= {self._put(key, value, grant) for key, value in puts.items()}
        self._changed(changed)
        return self.revision

    def _named(self, name: str) -> list[str]:
        if name.endswith("/"):
            below = [bucket for key, bucket in self._buckets.items() if key.startswith(name)]
            return [key for bucket in below for key in bucket.entries]
        return [name] if name in self.bucket(bucket_name(name)).entries else []

    def _put(self, key: str, value: bytes, grant: Grant | None) -> str:
        bucket, now = self.bucket(bucket_name(key)), self.revision
        before = bucket.entries.get(key)
        created = before.create_revision if before is not None else now
        entry = Entry(
            key=key,
            value=value,
            create_revision=created,
            mod_revision=now,
            leased=grant is not None,
        )
        bucket.entries[key] = entry
        bucket.newest = value
        if before is None:
            insort(bucket.names, key)
        holder = self._holders.pop(key, None)
        if holder is not None:
            holder.keys.discard(key)
        if grant is not None:
            grant.keys.add(key)
            self._holders[key] = grant
        self.written(key, entry)
        return key

    def _remove(self, key: str) -> str:
        bucket = self.bucket(bucket_name(key))
        entry = bucket.entries.pop(key)
        holder = self._holders.pop(key, None)
        if holder is not None:
            holder.keys.discard(key)
        del bucket.names[bisect_left(bucket.names, key)]
        self.removed(key, entry)
        return key

    def _changed(self, keys: set[str]) -> None:
        for name in sorted({bucket_name(key) for key in keys}):
            bucket = self.bucket(name)
            bucket.snapshot = None
            for watch in bucket.watches:
                if watch.prefix == name or any(key.startswith(watch.prefix) for key in keys):
                    watch.poke()

    def grant(self, ttl_s: float) -> int:
        self._leases += 1
        grant = self._grants[self._leases] = Grant(ttl_s)
        self._renew(grant)
        self._expect_end(self._leases, grant)
        return self._leases

    def renew(self, lease_id: int) -> bool:
        """Whether the lease lives; then it lives for another TTL. One whose time has passed does
        not, though etcd may not have looked yet."""
        grant = self._grants.get(lease_id)
        if grant is None or grant.ends_s < self.timeline.now_s:
            self.revoke(lease_id)
            return False
        self._renew(grant)
        return True

    def _renew(self, grant: Grant) -> None:
        grant.ends_s = self.timeline.now_s + grant.ttl_s / self.rate

    def _expect_end(self, lease_id: int, grant: Grant) -> None:
        wait_s = max(0.0, grant.ends_s - self.timeline.now_s)
        late_s = self.random.uniform(0.0, EXPIRY_CHECK_S)
        self.timeline.after(wait_s + late_s, self._end_if_over, lease_id)

    def _end_if_over(self, lease_id: int) -> None:
        grant = self._grants.get(lease_id)
        if grant is None or self.state != "up":
            return  # on its return etcd looks at all of them
        if grant.ends_s > self.timeline.now_s:
            self._expect_end(lease_id, grant)
        else:
            self.revoke(lease_id)

    def revoke(self, lease_id: int) -> None:
        grant = self._grants.pop(lease_id, None)
        if grant is None:
            return
        if grant.keys:
            self.revision += 1
            self._changed({self._remove(key) for key in sorted(grant.keys)})

    def has_lease(self, lease_id: int) -> bool:
        return lease_id in self._grants

    def entries(self) -> tuple[Entry, ...]:
        """Returns all that is held, the oldest first."""
        entries = [e for bucket in self._buckets.values() for e in bucket.entries.values()]
        return tuple(sorted(entries, key=lambda entry: (entry.create_revision, entry.key)))

    def back_up(self) -> None:
        """Keep what is held now, to be restored some time."""
        grants = {i: (g.ttl_s, frozenset(g.keys)) for i, g in self._grants.items()}
        self.backups.append(Backup(self.revision, self.entries(), grants))

    def lose_data(self, backup: Backup | None, *, cluster: int) -> None:
        """Hold what a backup held, or nothing. cluster: the id from now on."""
        self.losses += 1
        self.lost_s = self.timeline.now_s
        self.cluster = cluster
        self.losing = True
        gone = [key for bucket in self._buckets.values() for key in bucket.entries]
        self._changed({self._remove(key) for key in gone})
        self.losing = False
        for bucket in self._buckets.values():
            bucket.snapshot = None  # its revision is of the history that is over
        self._grants, self._holders, self._backlog = {}, {}, []
        self.revision = backup.revision if backup is not None else 1
        if backup is None:
            return
        for lease_id, (ttl_s, keys) in backup.grants.items():
            grant = self._grants[lease_id] = Grant(ttl_s)
            grant.keys = set(keys)
            self._holders |= dict.fromkeys(keys, grant)
            self._renew(grant)
            self._expect_end(lease_id, grant)
        for entry in backup.entries:
            bucket = self.bucket(bucket_name(entry.key))
            bucket.entries[entry.key] = entry
            insort(bucket.names, entry.key)
            self.restored(entry.key, entry)
        self._changed({entry.key for entry in backup.entries})

    @property
    def served_s(self) -> float:
        """How long it has answered so far: its outages do not count."""
        now_s = self.timeline.now_s
        return now_s - self._away_s - (now_s - self.gone_s if self.state != "up" else 0.0)

    def stop(self, state: str, seconds: float) -> None:
        """Be "paused" or "killed" for so long."""
        if self.state == "up":
            self.gone_s = self.timeline.now_s
        self.state = state
        self.back_s = self.timeline.now_s + seconds
        self.timeline.after(seconds, self._return, self.back_s)

    def _return(self, back_s: float) -> None:
        if back_s != self.back_s or self.state == "up":
            return
        self._away_s += self.timeline.now_s - self.gone_s
        killed, self.state = self.state == "killed", "up"
        for lease_id, grant in list(self._grants.items()):
            if killed:
                self._renew(grant)  # a new leader gives every lease its whole TTL again
            self._expect_end(lease_id, grant)
        late, self._backlog = self._backlog, []
        for request in late:
            request()

    def queue(self, request: Callable[[], object]) -> None:
        """Serve a request when etcd goes on: its sender no longer waits."""
        self._backlog.append(request)


def _first(bucket: Bucket) -> list[Entry]:
    return [entry for entry in [next(iter(bucket.entries.values()), None)] if entry is not None]
