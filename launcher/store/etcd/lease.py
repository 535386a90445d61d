"""Keeps leases of etcd alive, each over a stream of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from elasticzero.errors import StoreUnavailable
from elasticzero.launcher.store.etcd.connection import CallFailed, Connection, rpc
from elasticzero.launcher.store.etcd.event_loop import call_soon, start, wait_for, wait_until_over

log = logging.getLogger(__name__)


PAUSED_S = 0.1
"""Seconds between two looks at whether a lease is to be renewed again."""
SLOWER = 2.0
"""Multiple of the time of the answer before, beyond which a late answer shows an outage: a store
that is always as slow was not away."""
UNANSWERED = 3
"""Number of requests in a row without an answer, a TTL in all, after which a stream is ended."""


class EtcdLease:
    """Keeps a lease alive from the event loop, at a third of its TTL, over one stream.

    While etcd is silent it tries again; only etcd's own answer makes the lease lost. A slow answer
    does not end the stream: a thousand agents that open new ones would make etcd slower still.
    """

    def __init__(
        self,
        connection: Connection,
        ttl_s: int,
        on_lost: Callable[[], None] | None,
        *,
        granted: Any,
        requested_s: float,
        renews: Callable[[], bool] = lambda: True,
    ) -> None:
        """Takes over a granted lease, and begins to keep it alive.

        Args:
            connection: Sends the requests.
            ttl_s: TTL that was requested.
            on_lost: Called in the event loop when etcd no longer has the lease.
            granted: etcd's response.
            requested_s: Time of the request, monotonic.
            renews: Returns whether the lease is to be renewed now.
        """
        self.id: int = granted.ID
        self.ttl_s: int = max(granted.TTL, ttl_s)
        self.lost = False
        self.confirmed_s = requested_s
        self._connection = connection
        self._on_lost = on_lost
        self._renews = renews
        self._interval_s = self.ttl_s / 3
        self._late_s = max(self.ttl_s / 6, 0.5)
        self._last_took_s = 0.0
        """Seconds until the last answer."""
        self._failures = 0
        self._closed = False
        self._stream: Any = None
        self.keepalives: Future[None] = start(self._run())
        """Ends with the lease, or with the connection."""

    def close(self, *, revoke: bool) -> None:
        self._closed = True
        call_soon(self.check)
        wait_until_over([self.keepalives], self._connection.timeouts.close_s)
        if revoke and not self.lost:
            request = rpc.LeaseRevokeRequest(ID=self.id)
            try:
                wait_for(self._connection.call("revoke", "LeaseRevoke", request))
            except CallFailed as error:
                log.debug("lease %x is left to run out: %s", self.id, error)

    def check(self) -> None:
        """Asks etcd about the lease at once, on a new stream; called in the event loop."""
        stream = self._stream
        if stream is not None:
            stream.cancel()

    def _over(self) -> bool:
        return self.lost or self._closed or self._connection.closed.is_set()

    async def _run(self) -> None:
        while not self._over():
            try:
                await self._keep_alive()
            except StoreUnavailable:
                self._failures += 1
            except Exception:
                log.exception("the keepalive of lease %x begins again after an error", self.id)
                self._failures += 1
            if not self._over():
                await self._connection.pause(max(1, self._failures))
        if self.lost and self._on_lost is not None and not self._closed:
            self._on_lost()

    async def _keep_alive(self) -> None:
        sent_s: deque[float] = deque()  # of the pulses that have no answer yet
        position = self._connection.history.position()
        pulses = partial(self._pulses, sent_s)
        stream = self._connection.stream("keepalive", "LeaseKeepAlive", pulses)
        async with stream as responses:
            self._stream = responses
            if self._over():
                return
            async for response in responses:
                requested_s = sent_s.popleft()
                took_s = time.monotonic() - requested_s
                self._connection.observe("keepalive", took_s, None)
                self._connection.record_success()
                if self._connection.check(position, response.header) != position.number:
                    return
                if response.TTL <= 0:
                    log.warning("lease %x is lost: etcd no longer has it", self.id)
                    self.lost = True
                    return
                if took_s > max(self._late_s, SLOWER * self._last_took_s):
                    self._connection.record_late_reply()
                self._last_took_s = took_s
                self.confirmed_s = requested_s
                self._failures = 0

    async def _pulses(self, sent_s: deque[float], over: asyncio.Event) -> AsyncIterator[Any]:
        """Yields the requests of one stream.

        The stream ends if too many requests have no response, or if there is another endpoint.
        """
        while not over.is_set() and not self._over():
            if not self._renews():
                await self._wait_for_holder(over)
                continue
            sent_s.append(time.monotonic())
            yield rpc.LeaseKeepAliveRequest(ID=self.id)
            await asyncio.sleep(self._interval_s)
            if sent_s and not over.is_set():
                last = len(sent_s) >= UNANSWERED
                self._connection.record_timeout("keepalive", self._stream, end=last)

    async def _wait_for_holder(self, over: asyncio.Event) -> None:
        """Waits until the lease is to be renewed again; meanwhile it may run out."""
        await asyncio.sleep(PAUSED_S)  # a process that was suspended needs a moment
        if not self._renews():
            log.warning("lease %x is not renewed: the agent's loop stands still", self.id)
        while not self._renews() and not over.is_set() and not self._over():
            await asyncio.sleep(PAUSED_S)
