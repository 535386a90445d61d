"""The two kinds of stream to etcd: watches that never die, and leases that are kept alive.

Invariant of a watch: what its callback was told last is the state at some revision R, and either
the stream of changes from R + 1 is open, or the prefix is about to be read again.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from elasticzero.errors import StoreUnavailable
from elasticzero.launcher.etcd_rpc import CallFailed, Connection, rpc
from elasticzero.launcher.store import Entry, Snapshot

log = logging.getLogger(__name__)

_PUT = 0


class Keyspace:
    """The keys under one prefix in etcd, which the rest of the launcher knows by relative names."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()

    def key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def span(self, prefix: str) -> tuple[bytes, bytes]:
        """First key, and the end (excluded), of every key that begins with `prefix`."""
        first = self.key(prefix)
        return first, first[:-1] + bytes([first[-1] + 1])

    def entry(self, pair: Any) -> Entry:
        return Entry(
            key=self.name(pair),
            value=pair.value,
            create_revision=pair.create_revision,
            mod_revision=pair.mod_revision,
            leased=pair.lease != 0,
        )

    def name(self, pair: Any) -> str:
        name: str = pair.key[len(self._prefix) :].decode()
        return name


def oldest_first(entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """A fixed copy in order of creation."""
    order = sorted(entries.values(), key=lambda entry: (entry.create_revision, entry.key))
    return MappingProxyType({entry.key: entry for entry in order})


class Watch:
    """A thread that reads a prefix, follows its changes, and begins again after any error."""

    def __init__(
        self,
        connection: Connection,
        keys: Keyspace,
        prefix: str,
        read: Callable[[str], Snapshot],
        changed: Callable[[Snapshot], None],
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._prefix = prefix
        self._read = read
        self._changed = changed
        self._told: Snapshot | None = None
        self._failures = 0
        self._closed = threading.Event()
        self._stream: Any = None
        self.thread = threading.Thread(target=self._run, name=f"watch {prefix}", daemon=True)

    def close(self) -> None:
        self._closed.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()
        if threading.current_thread() is not self.thread:
            self.thread.join(self._connection.timeouts.close_s)

    def _over(self) -> bool:
        return self._closed.is_set() or self._connection.closed.is_set()

    def _run(self) -> None:
        while not self._over():
            try:
                self._follow()
            except StoreUnavailable:
                self._failures += 1
            except Exception:
                log.exception("the watch of %r begins again after an error", self._prefix)
                self._failures += 1
            if self._failures and not self._over():
                self._connection.pause(self._failures)

    def _follow(self) -> None:
        """Tell the prefix as it is, then each change, until the next re-read is due."""
        snapshot = self._read(self._prefix)
        if self._told is None or self._told.entries != snapshot.entries:
            self._tell(snapshot)
        entries = dict(snapshot.entries)
        with self._open(snapshot.revision + 1) as responses:
            self._stream = responses
            if self._over():
                return
            for response in responses:
                if response.canceled:
                    # Compacted past our revision, or ended by the server: the re-read mends both.
                    why = response.cancel_reason or f"compacted at {response.compact_revision}"
                    log.info("watch of %r ended by etcd: %s", self._prefix, why)
                    self._failures += 1
                    return
                self._failures = 0
                self._connection.answered()
                if response.events:
                    self._tell(self._advance(entries, response.events))

    def _open(self, revision: int) -> Any:
        key, end = self._keys.span(self._prefix)
        create = rpc.WatchCreateRequest(key=key, range_end=end, start_revision=revision)

        def requests(over: threading.Event) -> Iterator[Any]:
            yield rpc.WatchRequest(create_request=create)
            over.wait()

        resync_s = self._connection.timeouts.resync_s * random.uniform(0.8, 1.0)
        return self._connection.stream("watch", "Watch", requests, deadline_s=resync_s)

    def _advance(self, entries: dict[str, Entry], events: Sequence[Any]) -> Snapshot:
        for event in events:
            if event.type == _PUT:
                entry = self._keys.entry(event.kv)
                entries[entry.key] = entry
            else:
                entries.pop(self._keys.name(event.kv), None)
        revision = max(event.kv.mod_revision for event in events)
        return Snapshot(revision=revision, entries=oldest_first(entries))

    def _tell(self, snapshot: Snapshot) -> None:
        if not self._over():
            self._changed(snapshot)
            self._told = snapshot


class KeptLease:
    """A lease and the thread that keeps it alive, at a third of its TTL, over one stream.

    While etcd is silent it tries on; only etcd's own word makes the lease lost.
    """

    def __init__(
        self,
        connection: Connection,
        ttl_s: int,
        on_lost: Callable[[], None] | None,
        *,
        granted: Any,
        asked_s: float,
    ) -> None:
        """`granted`: etcd's answer; `asked_s`: when it was asked (monotonic)."""
        self.id: int = granted.ID
        self.ttl_s: int = max(granted.TTL, ttl_s)
        self.lost = False
        self.confirmed_s = asked_s
        self._connection = connection
        self._on_lost = on_lost
        self._interval_s = self.ttl_s / 3
        self._late_s = max(self.ttl_s / 6, 0.5)
        self._sent_s = asked_s
        self._unanswered = False
        self._failures = 0
        self._closed = threading.Event()
        self._stream: Any = None
        name = f"keepalive {self.id:x}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def close(self, *, revoke: bool) -> None:
        self._closed.set()
        self.check()
        if threading.current_thread() is not self.thread:
            self.thread.join(self._connection.timeouts.close_s)
        if revoke and not self.lost:
            request = rpc.LeaseRevokeRequest(ID=self.id)
            try:
                self._connection.call("revoke", "LeaseRevoke", request)
            except CallFailed as error:
                log.info("lease %x is left to run out: %s", self.id, error)

    def check(self) -> None:
        """Ask etcd about the lease at once, on a new stream."""
        stream = self._stream
        if stream is not None:
            stream.cancel()

    def _over(self) -> bool:
        return self.lost or self._closed.is_set() or self._connection.closed.is_set()

    def _run(self) -> None:
        while not self._over():
            try:
                self._keep_alive()
            except StoreUnavailable:
                self._failures += 1
            except Exception:
                log.exception("the keepalive of lease %x begins again after an error", self.id)
                self._failures += 1
            if not self._over():
                self._connection.pause(max(1, self._failures))
        if self.lost and self._on_lost is not None and not self._closed.is_set():
            self._on_lost()

    def _keep_alive(self) -> None:
        self._unanswered = False
        with self._connection.stream("keepalive", "LeaseKeepAlive", self._pulses) as responses:
            self._stream = responses
            if self._over():
                return
            for response in responses:
                took_s = time.monotonic() - self._sent_s
                self._connection.observe("keepalive", took_s, None)
                self._connection.answered()
                if response.TTL <= 0:
                    log.warning("lease %x is lost: etcd no longer knows it", self.id)
                    self.lost = True
                    return
                if took_s > self._late_s:
                    self._connection.answered_late()
                self.confirmed_s = self._sent_s
                self._failures = 0
                self._unanswered = False

    def _pulses(self, over: threading.Event) -> Iterator[Any]:
        """The requests of one stream, which ends when one of them has had no answer by the next."""
        while not over.is_set() and not self._over():
            self._sent_s = time.monotonic()
            self._unanswered = True
            yield rpc.LeaseKeepAliveRequest(ID=self.id)
            over.wait(self._interval_s)
            if self._unanswered and not over.is_set():
                self._connection.end_silent_stream("keepalive", self._stream)
                return
