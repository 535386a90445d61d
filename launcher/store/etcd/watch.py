"""Multiplexes all watches of one store on one stream to etcd: an agent has half a dozen watches,
and etcd has a thousand agents.

Invariant of a watch: what its callback was told last is the state at some revision R, and either
the stream carries the changes from R + 1 on, or the prefix is about to be read again.

A watch begins with the changes from now on. When etcd has confirmed that, the prefix is read, and
changes that the read already contains are skipped. Prefixes with few keys that stand side by side
are read together. After any error, and from time to time, all
watches begin anew on a new stream. A slow answer is not an error: if a thousand agents ask at once,
asking for everything again would make etcd slower still.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from elasticzero.errors import StoreUnavailable
from elasticzero.launcher.retry import retry_call_async
from elasticzero.launcher.store.api import Entry, PrefixState
from elasticzero.launcher.store.data_loss import HistoryPosition
from elasticzero.launcher.store.etcd.connection import CallFailed, Connection, rpc
from elasticzero.launcher.store.etcd.event_loop import call_soon, start
from elasticzero.launcher.store.etcd.keys import Keyspace, Span, oldest_first
from elasticzero.launcher.store.etcd.protobuf import grpc

log = logging.getLogger(__name__)

_PUT = 0
SLOW_READS = 4
"""Number of reads of a prefix, each with twice the time of the one before, before its stream is
given up."""

Read = Callable[[Span, float], Awaitable[PrefixState]]
"""Reads a span of keys within so many seconds, and returns what it holds."""


class EtcdWatch:
    """Watches one prefix. The event loop calls back; any thread may close it."""

    def __init__(
        self,
        keys: Keyspace,
        prefix: str,
        changed: Callable[[PrefixState], None],
        watches: WatchMultiplexer,
    ) -> None:
        """Creates a watch that has not begun.

        Args:
            keys: Maps the names of the store to keys in etcd.
            prefix: Prefix of the keys to watch, as the store's user names it.
            changed: Called with the whole of the prefix, at first and after every change.
            watches: Sends the requests for this watch, and drops it when it is closed.
        """
        self.prefix = prefix
        self.closed = False
        self._keys = keys
        self._changed = changed
        self._watches = watches
        self._notify_lock = threading.RLock()
        self._last_notified: PrefixState | None = None
        self._history = self._revision = 0
        self._entries: dict[str, Entry] = {}

    def close(self) -> None:
        self.closed = True
        call_soon(self._watches.drop, self)
        if self._notify_lock.acquire(timeout=self._watches.close_s):
            self._notify_lock.release()

    def begin(self, snapshot: PrefixState) -> None:
        """Passes on the prefix as it was read, unless that is what was passed on last."""
        self._history, self._revision = snapshot.history, snapshot.revision
        self._entries = dict(snapshot.entries)
        last = self._last_notified
        if last is None or (last.history, last.entries) != (snapshot.history, snapshot.entries):
            self._notify(snapshot)

    def advance(self, events: Sequence[Any]) -> None:
        """Passes on what changed after the revision that is known."""
        newer = [event for event in events if event.kv.mod_revision > self._revision]
        if not newer:
            return
        for event in newer:
            if event.type == _PUT:
                self._put(self._keys.entry(event.kv))
            else:
                self._entries.pop(self._keys.name(event.kv), None)
        self._revision = max(event.kv.mod_revision for event in newer)
        entries = MappingProxyType(dict(self._entries))
        self._notify(PrefixState(revision=self._revision, entries=entries, history=self._history))

    def _put(self, entry: Entry) -> None:
        """Takes in an entry; entries stay in order of creation, and a new one mostly comes last."""
        entries = self._entries
        if entry.key in entries:
            entries[entry.key] = entry
            return
        last = next(reversed(entries.values()), entry)
        entries[entry.key] = entry
        if (last.create_revision, last.key) > (entry.create_revision, entry.key):
            self._entries = dict(oldest_first(entries))

    def _notify(self, snapshot: PrefixState) -> None:
        with self._notify_lock:
            if not self.closed and not self._watches.over:
                self._changed(snapshot)
                self._last_notified = snapshot


class _Stream:
    """Holds one stream: the requests on it, and the watches whose answers it carries.

    etcd answers in the order of the requests, and gives each watch a number.
    """

    def __init__(self, history: HistoryPosition) -> None:
        """Creates a stream without requests.

        Args:
            history: Position before the stream was opened.
        """
        self.history = history
        self.outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self.unanswered: deque[EtcdWatch] = deque()
        self.watches: dict[int, EtcdWatch] = {}
        self.unread: list[EtcdWatch] = []
        """Watches that etcd has begun, and that are not read yet."""

    async def requests(self, over: asyncio.Event) -> AsyncIterator[Any]:
        while (request := await self.outgoing.get()) is not None and not over.is_set():
            yield request


class WatchMultiplexer:
    """Opens and closes watches, and keeps them on a stream.

    Any thread may add a watch; all else is done in the event loop.
    """

    def __init__(self, connection: Connection, keys: Keyspace, read: Read) -> None:
        """Creates a multiplexer without watches.

        Args:
            connection: Connection to etcd.
            keys: Maps the names of the store to keys in etcd.
            read: Reads the keys of a watch when it begins.
        """
        self._connection = connection
        self._keys = keys
        self._read = read
        self._open: list[EtcdWatch] = []
        self._stream: _Stream | None = None
        self._failures = 0
        self.following: Future[None] | None = None
        """Ends with the connection; None before the first watch."""

    @property
    def close_s(self) -> float:
        return self._connection.timeouts.close_s

    @property
    def over(self) -> bool:
        return self._connection.closed.is_set()

    def add(self, prefix: str, changed: Callable[[PrefixState], None]) -> EtcdWatch:
        watch = EtcdWatch(self._keys, prefix, changed, self)
        call_soon(self._add, watch)
        return watch

    def _add(self, watch: EtcdWatch) -> None:
        self._open.append(watch)
        if self._stream is not None:
            self._create(self._stream, watch)
        if self.following is None:
            self.following = start(self._run())

    def drop(self, watch: EtcdWatch) -> None:
        """Tells etcd to send no more of it."""
        if watch in self._open:
            self._open.remove(watch)
        stream = self._stream
        if stream is None:
            return
        for number in [n for n, other in stream.watches.items() if other is watch]:
            del stream.watches[number]
            self._cancel(stream, number)

    def _create(self, stream: _Stream, watch: EtcdWatch) -> None:
        key, end = self._keys.span(watch.prefix)
        create = rpc.WatchCreateRequest(key=key, range_end=end)
        stream.unanswered.append(watch)
        stream.outgoing.put_nowait(rpc.WatchRequest(create_request=create))

    def _cancel(self, stream: _Stream, number: int) -> None:
        cancel = rpc.WatchCancelRequest(watch_id=number)
        stream.outgoing.put_nowait(rpc.WatchRequest(cancel_request=cancel))

    async def _run(self) -> None:
        while not self.over:
            try:
                await self._follow()
            except StoreUnavailable:
                self._failures += 1
            except Exception:
                log.exception("the watches begin again after an error")
                self._failures += 1
            if self._failures and not self.over:
                await self._connection.pause(self._failures)

    async def _follow(self) -> None:
        """Passes on every prefix as it is, then each change, until the next re-read is due."""
        stream = self._stream = _Stream(self._connection.history.position())
        for watch in self._open:
            self._create(stream, watch)
        resync_s = self._connection.timeouts.resync_s * random.uniform(0.8, 1.0)
        try:
            async with self._connection.stream(
                "watch", "Watch", stream.requests, deadline_s=resync_s
            ) as responses:
                async for response in responses:
                    if self.over or not await self._handle(stream, response):
                        return
        finally:
            self._stream = None
            stream.outgoing.put_nowait(None)

    async def _handle(self, stream: _Stream, response: Any) -> bool:
        """Takes in one response; returns False if it ends the stream."""
        if self._connection.check(stream.history, response.header) != stream.history.number:
            return False
        if response.created:
            watch = self._confirmed_watch(stream, response)
        else:
            watch = stream.watches.get(response.watch_id)
        if response.canceled and watch is not None:
            # Refused, compacted past our revision, or ended by the server: a re-read mends all.
            why = response.cancel_reason or f"compacted at {response.compact_revision}"
            log.debug("watch of %r ended by etcd: %s", watch.prefix, why)
            self._failures += 1
            return False
        self._connection.record_success()
        if response.created and watch is not None:
            stream.unread.append(watch)
        elif watch is not None and watch not in stream.unread:
            watch.advance(response.events)
        await self._read_confirmed_watches(stream)
        self._failures = 0
        return True

    async def _read_confirmed_watches(self, stream: _Stream) -> None:
        """Reads and passes on what has begun, once etcd has begun all that was requested.

        The changes that came until then are older than what is read.
        """
        if stream.unanswered:
            return
        watches, stream.unread = stream.unread, []
        few = [watch for watch in watches if self._keys.is_among_few(watch.prefix)]
        if len(few) > 1:
            state = await self._read_with_backoff(self._keys.span_of_few())
            for watch in few:
                watch.begin(_under(watch.prefix, state))
            watches = [watch for watch in watches if watch not in few]
        for watch in watches:
            if not watch.closed:
                watch.begin(await self._read_with_backoff(self._keys.span(watch.prefix)))

    async def _read_with_backoff(self, span: Span) -> PrefixState:
        """Returns what the span holds; each try after a slow one may take twice as long."""
        first_s = self._connection.timeouts.request_s
        deadlines_s = (first_s * 2**tries for tries in itertools.count())
        return await retry_call_async(
            lambda: self._read(span, next(deadlines_s)),
            replace(self._connection.retry, timeout_s=0.0, min_tries=SLOW_READS),
            retryable=lambda error: (
                isinstance(error, CallFailed) and error.code is grpc.StatusCode.DEADLINE_EXCEEDED
            ),
            closed=self._connection.closed,
        )

    def _confirmed_watch(self, stream: _Stream, response: Any) -> EtcdWatch | None:
        """Returns the watch that etcd has begun, or refused, under the response's number; None: it
        was closed meanwhile."""
        watch = stream.unanswered.popleft()
        if not watch.closed:
            if not response.canceled:
                stream.watches[response.watch_id] = watch
            return watch
        if not response.canceled:
            self._cancel(stream, response.watch_id)
        return None


def _under(prefix: str, state: PrefixState) -> PrefixState:
    """Returns the part of a state that a watch of `prefix` shows."""
    entries = {name: entry for name, entry in state.entries.items() if name.startswith(prefix)}
    return replace(state, entries=MappingProxyType(entries))
