"""A model of one agent's connection to etcd: a `Store`.

What it does to the agent: answers take time, or are lost after the write took effect, or a write
takes effect long after its sender has given up; watches tell late, and sometimes much later; etcd
is paused or killed, for shorter or longer than leases live; the agent is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from elasticzero.errors import StoreUnavailable
from elasticzero.launcher.store.api import Condition, Lease, LeaseLost, PrefixState
from elasticzero.launcher.store.data_loss import History
from tests.simulation.etcd import Etcd, bucket_name

REQUEST_S = 2.0
"""Deadline of a request, as in `etcd_rpc.Timeouts`."""
SLOWER = 2.0
HELD_BACK_S = 0.1
"""A lease that is not renewed looks so often whether it is to be. Both have the values of
`launcher/store/etcd/lease.py`."""
APART_SHARE = 0.1
"""So often one watch of an agent is told of a change at another time than the others."""


class Link:
    """How one agent reaches etcd."""

    def __init__(
        self,
        etcd: Etcd,
        clock: Callable[[], float],
        trouble: float,
        renews: Callable[[], bool] = lambda: True,
    ) -> None:
        """clock: the agent's own. trouble: the share of requests and watches that go wrong. renews:
        whether leases are to be renewed now."""
        self.etcd = etcd
        self.timeline = etcd.timeline
        self.random = etcd.random
        self.clock = clock
        self.trouble = trouble
        self.cut = False
        self.dead = False
        self.stopped_until_s = 0.0
        """The agent's whole process does not run until then."""
        self.renews = renews
        self.reachable = True
        self.away_since_s = 0.0
        """When it was found that etcd is not reachable, in true time."""
        self.last_outage_end_s = 0.0
        self.history = History(self.record_late_reply)
        self.requests = 0
        """Reads, writes and watches begun; and, apart from them, keepalives:"""
        self.pulses = 0
        self.before_request: Callable[[], None] = lambda: None
        self._freeze: tuple[int, str, Callable[[], None]] | None = None
        """Before the last of so many writes to keys that begin so: what stops the agent."""
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

    def hears(self, revision: int = 0) -> None:
        """An answer of etcd arrives at once."""
        self.history.judge_response(self.history.position(), self.etcd.cluster, revision)

    def record_success(self) -> None:
        if not self.reachable:
            self.last_outage_end_s = self.clock()
            self.reachable = True

    def unanswered(self) -> None:
        if self.reachable:
            self.away_since_s = self.timeline.now_s
            self.reachable = False

    def record_late_reply(self) -> None:
        self.last_outage_end_s = self.clock()
        self.reachable = True


class SimulatedStore(Link):
    """One agent's connection: its methods are called from the agent's task."""

    stored: Callable[[Mapping[str, bytes]], Mapping[str, bytes]] = staticmethod(lambda puts: puts)
    """What the agent's release writes in the place of this one's documents."""
    kept: SimulatedLease | None = None
    """The lease of the agent's registration."""

    @property
    def unregistered(self) -> bool:
        """The registration has lapsed, as far as is known."""
        return self.kept is not None and self.kept.lost

    def read(self, prefix: str, *, limit: int = 0) -> PrefixState:
        state: PrefixState = self._request(lambda: self.etcd.read(prefix, limit))
        number = self.history.number
        return replace(state, history=number) if number else state

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

        stored = self.stored(puts)

        def serve() -> int | None:
            return self.etcd.write(stored, deletes, conditions, lease_id)

        result: int | None = self._request(serve, keys=stored)
        return result

    def watch(self, prefix: str, changed: Callable[[PrefixState], None]) -> Watch:
        return Watch(self, prefix, changed)

    def lease(self, ttl_s: int, *, on_lost: Callable[[], None] | None = None) -> SimulatedLease:
        sent_s = self.clock()
        lease_id = self._request(lambda: self.etcd.grant(ttl_s))
        self.kept = SimulatedLease(self, lease_id, ttl_s, sent_s, on_lost)
        return self.kept

    def close(self) -> None:
        self.dead = True

    def freeze_before(self, writes: int, freeze: Callable[[], None], *, prefix: str = "") -> None:
        """Have `freeze` stop the agent before the last of its next writes: what it has read for
        that one is old when the agent goes on.

        Args:
            writes: How many writes.
            freeze: What stops the agent.
            prefix: Only writes to keys that begin so count.
        """
        self._freeze = (writes, prefix, freeze)

    def _count_write(self, keys: Iterable[str]) -> None:
        if self._freeze is None:
            return
        left, prefix, freeze = self._freeze
        if not any(key.startswith(prefix) for key in keys):
            return
        self._freeze = (left - 1, prefix, freeze) if left > 1 else None
        if left == 1:
            freeze()

    def _sit_out(self) -> float:
        """A process that is stopped sends nothing; returns for how long."""
        began_s = self.timeline.now_s
        while (left_s := self.stopped_until_s - self.timeline.now_s) > 0:
            self.timeline.sleep(left_s)
        return self.timeline.now_s - began_s

    def _request(self, serve: Callable[[], Any], *, keys: Iterable[str] | None = None) -> Any:
        """What etcd answers, after the time that takes; raises `StoreUnavailable`. keys: those that
        it writes; None: it only reads."""
        self.requests += 1
        random, timeline, etcd = self.random, self.timeline, self.etcd
        self.before_request()
        writes = keys is not None
        if keys is not None:
            self._count_write(keys)
        frozen_s = self._sit_out()
        draw = random.random()
        slow = draw < 2 * self.trouble
        position = self.history.position()
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
            served_s = etcd.queue_s(etcd.costs.write_s if writes else etcd.costs.read_s)
            timeline.sleep(served_s + etcd.answer_s / 2)
        if etcd.state == "killed" or random.random() < self.trouble / 2:
            self._fail("refuses connections")
        etcd.writer, etcd.frozen_s = self, frozen_s
        answer = serve()
        cluster, revision, losses = etcd.cluster, etcd.revision, etcd.losses
        timeline.sleep(random.uniform(0.0003, 0.002) + etcd.answer_s / 2)
        if not self.well or random.random() < self.trouble or etcd.losses != losses:
            self._fail("gave no answer, and perhaps did it")
        wrote = writes and answer is not None
        verdict = self.history.judge_response(position, cluster, revision, wrote=wrote)
        if verdict == "late":
            self._fail("lost its data meanwhile")
        self.record_success()
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

    def __init__(self, link: Link, prefix: str, changed: Callable[[PrefixState], None]) -> None:
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
            state = link.etcd.read(self.prefix)
            link.hears(link.etcd.revision)
            number = link.history.number
            self._changed(replace(state, history=number) if number else state)

    def close(self) -> None:
        self._closed = True
        self._bucket.watches.remove(self)


class SimulatedLease:
    """A lease that is renewed at a third of its TTL; only etcd's own word makes it lost."""

    def __init__(
        self,
        link: Link,
        lease_id: int,
        ttl_s: int,
        sent_s: float,
        on_lost: Callable[[], None] | None,
    ) -> None:
        self.id = lease_id
        self._on_lost = on_lost
        self._last_took_s = 0.0
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
        if not link.renews():
            link.timeline.after(HELD_BACK_S, self._pulse)
            return
        etcd = link.etcd
        link.pulses += 1
        takes_s = link.random.uniform(0.001, 0.004) + etcd.answer_s
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
        link.record_success()
        link.hears()
        if not link.etcd.renew(self.id):
            self.lost = True
            if self._on_lost is not None:
                self._on_lost()
            return
        if took_s > max(self.ttl_s / 6, 0.5, SLOWER * self._last_took_s):
            link.record_late_reply()
        self._last_took_s = took_s
        self.confirmed_s = sent_s
        self._failures = 0
        link.timeline.after(max(0.0, self._interval_s - took_s), self._pulse)

    def close(self, *, revoke: bool) -> None:
        """Called when the agent's process ends, or the lease is lost."""
        self._closed = True
        if revoke and not self.lost and self._link.well:
            self._link.etcd.revoke(self.id)
