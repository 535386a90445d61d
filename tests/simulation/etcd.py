"""A model of etcd, and of one agent's connection to it: a `Store`.

What it does to those who use it: answers take time, or are lost after the write took effect, or a
write takes effect long after its sender has given up; watches tell late, and sometimes much later;
leases run out by etcd's own clock; etcd is paused or killed, for shorter or longer than leases
live; single agents are cut off.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import Any

from elasticzero.errors import StoreUnavailable
from elasticzero.launcher.store import Condition, Entry, Lease, LeaseLost, Snapshot
from tests.simulation.timeline import Timeline

REQUEST_S = 2.0
"""Deadline of a request, as in `etcd_rpc.Timeouts`."""
APART_SHARE = 0.1
"""So often one watch of an agent is told of a change at another time than the others."""
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


class Bucket:
    """The keys up to the last slash of their names: what one watch or one read is about."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        """Oldest first: a key that is written again keeps its place."""
        self.names: list[str] = []
        self.snapshot: Snapshot | None = None
        self.newest = b""
        """What was put here last."""
        self.watches: list[Watch] = []


class Grant:
    """A lease as etcd sees it."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.ends_s = 0.0
        self.keys: set[str] = set()


def bucket_name(key: str) -> str:
    return key[: key.rfind("/") + 1] or key


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
        self.writer: Link | None = None
        """Whose write is being done."""
        self.late = False
        """Its sender has given it up."""
        self.written: Callable[[str, Entry], None] = lambda key, entry: None
        """Told of every put."""
        self.removed: Callable[[str, Entry], None] = lambda key, entry: None
        """Told of every key that goes."""
        self._buckets: dict[str, Bucket] = {}
        self._grants: dict[int, Grant] = {}
        self._holders: dict[str, Grant] = {}
        """By key: the lease it goes with."""
        self._leases = 0
        self._backlog: list[Callable[[], object]] = []

    def bucket(self, name: str) -> Bucket:
        found = self._buckets.get(name)
        if found is None:
            found = self._buckets[name] = Bucket()
        return found

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
        return self.queue_s(self.costs.told_s + len(sent) * self.costs.byte_s)

    def read(self, prefix: str, limit: int = 0) -> Snapshot:
        bucket = self.bucket(bucket_name(prefix))
        if limit:
            first = list(bucket.entries.values())[:limit] if limit > 1 else _first(bucket)
            return self._snapshot({entry.key: entry for entry in first})
        if prefix == bucket_name(prefix):
            if bucket.snapshot is None:
                bucket.snapshot = self._snapshot(dict(bucket.entries))
            return bucket.snapshot
        found, index = {}, bisect_left(bucket.names, prefix)
        while index < len(bucket.names) and bucket.names[index].startswith(prefix):
            found[bucket.names[index]] = bucket.entries[bucket.names[index]]
            index += 1
        return self._snapshot(found)

    def count(self, prefix: str, revision: int) -> int:
        """Of what stands under a whole folder now."""
        count = 0
        for entry in self.bucket(prefix).entries.values():  # oldest first
            if entry.create_revision > revision:
                break
            count += 1
        return count

    def _snapshot(self, entries: dict[str, Entry]) -> Snapshot:
        return Snapshot(revision=self.revision, entries=MappingProxyType(entries))

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
            return list(self.bucket(name).entries)
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


class Link:
    """How one agent reaches etcd."""

    def __init__(self, etcd: Etcd, clock: Callable[[], float], trouble: float) -> None:
        """clock: the agent's own. trouble: the share of requests and watches that go wrong."""
        self.etcd = etcd
        self.timeline = etcd.timeline
        self.random = etcd.random
        self.clock = clock
        self.trouble = trouble
        self.cut = False
        self.dead = False
        self.stopped_until_s = 0.0
        """The agent's whole process does not run until then."""
        self.reachable = True
        self.away_since_s = 0.0
        """When it was found that etcd is not reachable, in true time."""
        self.last_outage_end_s = 0.0
        self.requests = 0
        """Reads, writes and watches begun; and, apart from them, keepalives:"""
        self.pulses = 0
        self._told_at_s = -1.0
        """When something was last to be told, and how long that took to arrive."""
        self._telling_s = 0.0

    @property
    def well(self) -> bool:
        return self.etcd.state == "up" and not self.cut

    def telling_s(self) -> float:
        """How long it takes until a watch tells of what is so now: mostly as long as the agent's
        other watches, with which it shares a stream."""
        random, trouble = self.random, self.trouble
        if trouble and random.random() < trouble:
            return random.uniform(0.3, 4.0)
        now_s = self.timeline.now_s
        if self._told_at_s != now_s or (trouble and random.random() < APART_SHARE):
            self._told_at_s, self._telling_s = now_s, random.uniform(0.001, 0.012)
        return self._telling_s

    def answered(self) -> None:
        if not self.reachable:
            self.last_outage_end_s = self.clock()
            self.reachable = True

    def unanswered(self) -> None:
        if self.reachable:
            self.away_since_s = self.timeline.now_s
            self.reachable = False

    def answered_late(self) -> None:
        self.last_outage_end_s = self.clock()
        self.reachable = True


class SimulatedStore(Link):
    """One agent's connection: its methods are called from the agent's task."""

    kept: KeptLease | None = None
    """The lease of the agent's registration."""

    @property
    def unregistered(self) -> bool:
        """The registration has lapsed, as far as is known."""
        return self.kept is not None and self.kept.lost

    def read(self, prefix: str, *, limit: int = 0) -> Snapshot:
        result: Snapshot = self._request(lambda: self.etcd.read(prefix, limit))
        return result

    def count(self, prefix: str, revision: int) -> int:
        result: int = self._request(lambda: self.etcd.count(prefix, revision))
        return result

    def write(
        self,
        puts: Mapping[str, bytes],
        *,
        deletes: Sequence[str] = (),
        conditions: Sequence[Condition] = (),
        lease: Lease | None = None,
    ) -> int | None:
        lease_id = 0 if lease is None else lease.id

        def serve() -> int | None:
            return self.etcd.write(puts, deletes, conditions, lease_id)

        result: int | None = self._request(serve, writes=True)
        return result

    def watch(self, prefix: str, changed: Callable[[Snapshot], None]) -> Watch:
        return Watch(self, prefix, changed)

    def lease(self, ttl_s: int, *, on_lost: Callable[[], None] | None = None) -> KeptLease:
        sent_s = self.clock()
        lease_id = self._request(lambda: self.etcd.grant(ttl_s))
        self.kept = KeptLease(self, lease_id, ttl_s, sent_s)
        return self.kept

    def close(self) -> None:
        self.dead = True

    def _request(self, serve: Callable[[], Any], *, writes: bool = False) -> Any:
        """What etcd answers, after the time that takes; raises `StoreUnavailable`."""
        self.requests += 1
        random, timeline, etcd = self.random, self.timeline, self.etcd
        draw = random.random()
        slow = draw < 2 * self.trouble
        timeline.sleep(random.uniform(0.02, 0.4) if slow else random.uniform(0.0003, 0.002))
        sent_s = timeline.now_s
        if not self.cut and etcd.state == "paused" and etcd.back_s < sent_s + REQUEST_S:
            timeline.sleep(etcd.back_s - sent_s + 0.001)
        if self.cut or etcd.state == "paused":
            if writes and not self.cut and random.random() < 0.5:
                etcd.queue(lambda: self._serve_late(serve))
            timeline.sleep(REQUEST_S)
            self._fail("does not answer")
        if etcd.costs is not None:
            timeline.sleep(etcd.queue_s(etcd.costs.write_s if writes else etcd.costs.read_s))
        if etcd.state == "killed" or random.random() < self.trouble / 2:
            self._fail("refuses connections")
        etcd.writer = self
        answer = serve()
        timeline.sleep(random.uniform(0.0003, 0.002))
        if not self.well or random.random() < self.trouble:
            self._fail("gave no answer, and perhaps did it")
        self.answered()
        return answer

    def _serve_late(self, serve: Callable[[], object]) -> None:
        self.etcd.writer, self.etcd.late = self, True
        with suppress(LeaseLost):
            serve()
        self.etcd.late = False

    def _fail(self, why: str) -> None:
        self.unanswered()
        raise StoreUnavailable(f"etcd {why}")


class Watch:
    """Tells the state of a prefix soon after each change, or much later."""

    def __init__(self, link: Link, prefix: str, changed: Callable[[Snapshot], None]) -> None:
        self._link = link
        self.prefix = prefix
        self._changed = changed
        self._pending = False
        self._closed = False
        self._bucket = link.etcd.bucket(bucket_name(prefix))
        self._bucket.watches.append(self)
        link.requests += 1
        self.poke()

    def poke(self) -> None:
        """There is something to tell."""
        if self._pending:
            return
        self._pending = True
        link = self._link
        told_s = link.etcd.told_s(bucket_name(self.prefix)) if link.etcd.costs else 0.0
        link.timeline.after(link.telling_s() + told_s, self._arrive)

    def _arrive(self) -> None:
        link = self._link
        if link.dead and not self._closed:
            self.close()
        if self._closed:
            return
        now_s = link.timeline.now_s
        if not link.well:
            link.timeline.after(link.random.uniform(0.3, 1.0), self._arrive)
        elif link.stopped_until_s > now_s:
            link.timeline.after(link.stopped_until_s - now_s, self._arrive)
        else:
            self._pending = False
            self._changed(link.etcd.read(self.prefix))

    def close(self) -> None:
        self._closed = True
        self._bucket.watches.remove(self)


class KeptLease:
    """A lease that is renewed at a third of its TTL; only etcd's own word makes it lost."""

    def __init__(self, link: Link, lease_id: int, ttl_s: int, sent_s: float) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self.lost = False
        self.confirmed_s = sent_s
        self._link = link
        self._closed = False
        self._interval_s = ttl_s / 3
        self._failures = 0
        link.timeline.after(self._interval_s, self._pulse)

    @property
    def _over(self) -> bool:
        return self.lost or self._closed or self._link.dead

    def _pulse(self) -> None:
        link = self._link
        if self._over:
            return
        now_s = link.timeline.now_s
        if link.stopped_until_s > now_s:
            link.timeline.after(link.stopped_until_s - now_s, self._pulse)
            return
        etcd = link.etcd
        link.pulses += 1
        takes_s = link.random.uniform(0.001, 0.004)
        if etcd.state == "paused" and not link.cut:
            takes_s += etcd.back_s - now_s
        if etcd.state == "killed" or link.cut or takes_s > self._interval_s:
            link.timeline.after(self._interval_s, self._silent)
        else:
            link.timeline.after(takes_s, self._answer, link.clock(), takes_s)

    def _silent(self) -> None:
        if self._over:
            return
        self._link.unanswered()
        doubled_s = 0.05 * 2.0 ** min(self._failures, 5)
        self._failures += 1
        wait_s = min(1.0, doubled_s) * self._link.random.uniform(0.5, 1.0)
        self._link.timeline.after(wait_s, self._pulse)

    def _answer(self, sent_s: float, took_s: float) -> None:
        link = self._link
        if self._over:
            return
        if not link.well:
            link.timeline.after(self._interval_s - took_s, self._silent)
            return
        link.answered()
        if not link.etcd.renew(self.id):
            self.lost = True
            return
        if took_s > max(self.ttl_s / 6, 0.5):
            link.answered_late()
        self.confirmed_s = sent_s
        self._failures = 0
        link.timeline.after(max(0.0, self._interval_s - took_s), self._pulse)

    def close(self, *, revoke: bool) -> None:
        """Called when the agent's process ends, or the lease is lost."""
        self._closed = True
        if revoke and not self.lost and self._link.well:
            self._link.etcd.revoke(self.id)
