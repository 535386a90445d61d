"""Implements the coordination store with etcd v3.

Only this package talks to etcd. Every request has a deadline. A read is retried until then. A write
is sent once; if its outcome is unknown, it is verified by a read and never repeated. No transaction
only reads: older releases of etcd panic when the client of such a one gives up (etcd-io/etcd
#14110, #14891).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from elasticzero.errors import StoreUnavailable
from elasticzero.launcher.retry import RetryPolicy, retry_call_async
from elasticzero.launcher.store.api import (
    Condition,
    Lease,
    LeaseLost,
    PrefixState,
    RequestTooLarge,
    check_write,
)
from elasticzero.launcher.store.data_loss import History
from elasticzero.launcher.store.etcd.access import Access
from elasticzero.launcher.store.etcd.connection import (
    TRANSIENT,
    CallFailed,
    Connection,
    OpenChannels,
    RequestObserver,
    Timeouts,
    rpc,
)
from elasticzero.launcher.store.etcd.event_loop import start, wait_for, wait_until_over
from elasticzero.launcher.store.etcd.keys import Keyspace, Span, oldest_first
from elasticzero.launcher.store.etcd.lease import EtcdLease
from elasticzero.launcher.store.etcd.protobuf import grpc
from elasticzero.launcher.store.etcd.watch import EtcdWatch, WatchMultiplexer
from elasticzero.text import list_text

__all__ = ["EtcdStore", "Timeouts"]

log = logging.getLogger(__name__)

T = TypeVar("T")

TOO_LARGE = ("request is too large", "received message larger than max")
"""Words of etcd, and of gRPC before it, for a request larger than `--max-request-bytes`."""


def _ignore(operation: str, seconds: float, error: str | None) -> None:
    """Records nothing.

    Args:
        operation: Kind of request.
        seconds: Time that it took.
        error: Why it failed; None: it did not.
    """


class EtcdStore:
    """Implements a `Store` of the keys under `prefix`, reached by any of `endpoints`.

    It connects when it is first used. Create it after any fork.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        prefix: str,
        *,
        access: Access | None = None,
        observe: RequestObserver = _ignore,
        timeouts: Timeouts | None = None,
        channels: OpenChannels | None = None,
    ) -> None:
        """Creates a store that connects when it is first used.

        Args:
            endpoints: Members of etcd, as the user wrote them.
            prefix: Put before each key.
            access: TLS and user for etcd; None: neither.
            observe: Called after every request.
            timeouts: Time limits; None: the defaults.
            channels: Opens the channels in place of the store's own way.

        Raises:
            UserError: The endpoints or certificates cannot be used.
        """
        self._timeouts = timeouts or Timeouts()
        self._connection = Connection(endpoints, observe, self._timeouts, access, channels)
        self._keys = Keyspace(prefix)
        self._watches = WatchMultiplexer(self._connection, self._keys, self._read)
        self._leases: dict[int, EtcdLease] = {}
        self._renews: Callable[[], bool] = lambda: True

    @property
    def reachable(self) -> bool:
        return self._connection.reachable

    @property
    def last_outage_end_s(self) -> float:
        return self._connection.last_outage_end_s

    @property
    def history(self) -> History:
        return self._connection.history

    @property
    def cluster(self) -> str:
        """Returns the id of the cluster that answered last, in hexadecimal; "" if none has."""
        return f"{self.history.cluster:x}" if self.history.cluster else ""

    def read(self, prefix: str, *, limit: int = 0) -> PrefixState:
        return self._answer(self._read(self._keys.span(prefix), limit=limit))

    def count(self, prefix: str, revision: int) -> int:
        first, end = self._keys.span(prefix)
        request = rpc.RangeRequest(key=first, range_end=end, revision=revision, count_only=True)
        count: int = self._answer(self._retried("read", "Range", request))[0].count
        return count

    def write(
        self,
        puts: Mapping[str, bytes],
        *,
        deletes: Sequence[str] = (),
        conditions: Sequence[Condition] = (),
        lease: Lease | None = None,
    ) -> int | None:
        check_write(puts, deletes, conditions)
        lease_id = 0 if lease is None else lease.id
        request = rpc.TxnRequest(
            compare=[c for condition in conditions for c in self._compares(condition)],
            success=[self._put(name, value, lease_id) for name, value in puts.items()]
            + [self._delete(name) for name in deletes],
        )
        return wait_for(self._write(puts, deletes, conditions, lease, request))

    async def _write(
        self,
        puts: Mapping[str, bytes],
        deletes: Sequence[str],
        conditions: Sequence[Condition],
        lease: Lease | None,
        request: Any,
    ) -> int | None:
        """Sends a transaction; for the arguments see `write`, whose request this is."""
        try:
            response = await self._connection.call("write", "Txn", request)
        except CallFailed as error:
            if error.code is grpc.StatusCode.NOT_FOUND and lease is not None:
                if lease.id in self._leases:
                    self._leases[lease.id].check()
                raise LeaseLost(
                    f"lease {lease.id:x} is gone, nothing was written: take a new one"
                ) from None
            if any(text in error.detail for text in TOO_LARGE):
                sizes = {name: len(value) for name, value in puts.items()}
                sizes |= {c.key: len(c.value) for c in conditions if c.value is not None}
                raise RequestTooLarge(
                    f"{error}: "
                    + list_text((f"{key!r} has {size} bytes" for key, size in sizes.items()), 4)
                ) from None
            if error.code not in TRANSIENT:
                raise
            return await self._verify_write(puts, deletes, error)
        revision: int = response.header.revision
        return revision if response.succeeded else None

    def watch(self, prefix: str, changed: Callable[[PrefixState], None]) -> EtcdWatch:
        return self._watches.add(prefix, changed)

    def lease(self, ttl_s: int, *, on_lost: Callable[[], None] | None = None) -> EtcdLease:
        requested_s = time.monotonic()
        # A grant that is repeated may leave a lease behind that nobody uses; it runs out.
        request = rpc.LeaseGrantRequest(TTL=ttl_s)
        granted, _ = self._answer(self._retried("lease", "LeaseGrant", request))
        lease = EtcdLease(
            self._connection,
            ttl_s,
            on_lost,
            granted=granted,
            requested_s=requested_s,
            renews=self._renews,
        )
        kept = {i: other for i, other in self._leases.items() if not other.keepalives.done()}
        self._leases = {**kept, lease.id: lease}
        return lease

    def renew_leases_while(self, condition: Callable[[], bool]) -> None:
        """Has the leases that are taken from now on renewed only while the condition holds; the
        event loop calls it."""
        self._renews = condition

    def close(self) -> None:
        wait_until_over([start(self._connection.close())], self._timeouts.close_s)
        following = self._watches.following
        running: list[Future[None]] = [lease.keepalives for lease in self._leases.values()]
        running += [following] if following is not None else []
        wait_until_over(running, self._timeouts.close_s)

    def __enter__(self) -> EtcdStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, request: Coroutine[Any, Any, T]) -> T:
        """Returns the answer to a request; where none comes, says what is wrong on this side."""
        try:
            return wait_for(request)
        except CallFailed:
            self._connection.raise_if_access_refused()
            raise

    async def _read(self, span: Span, deadline_s: float = 0.0, *, limit: int = 0) -> PrefixState:
        """Reads the keys of a span.

        Args:
            span: First key, and the end.
            deadline_s: Seconds for each try; 0: `request_s`.
            limit: Maximum number of entries; 0: all.
        """
        first, end = span
        request = rpc.RangeRequest(
            key=first,
            range_end=end,
            limit=limit,
            sort_order=rpc.RangeRequest.ASCEND,
            sort_target=rpc.RangeRequest.CREATE,
        )
        response, history = await self._retried("read", "Range", request, deadline_s)
        entries = {entry.key: entry for entry in map(self._keys.entry, response.kvs)}
        revision = response.header.revision
        return PrefixState(revision=revision, entries=oldest_first(entries), history=history)

    async def _retried(
        self, operation: str, method: str, request: Any, deadline_s: float = 0.0
    ) -> tuple[Any, int]:
        """Sends a request; retries while etcd is silent: at every endpoint, and for `request_s`.

        Args:
            operation: What the request does, for metrics and messages.
            method: Name of the gRPC method.
            request: The message to send.
            deadline_s: Seconds for each try; 0: `request_s`.

        Returns:
            The response, and the number of its history.
        """
        ask = partial(self._connection.call_in_history, operation, method, request)
        return await retry_call_async(
            partial(ask, deadline_s=deadline_s),
            RetryPolicy(
                first_pause_s=self._timeouts.backoff_s,
                max_pause_s=self._timeouts.request_s / 4,
                spread=1.0,
                timeout_s=self._timeouts.request_s,
                min_tries=len(self._connection.endpoints),
            ),
            retryable=lambda e: isinstance(e, CallFailed) and e.code in TRANSIENT,
            closed=self._connection.closed,
        )

    async def _verify_write(
        self, puts: Mapping[str, bytes], deletes: Sequence[str], error: CallFailed
    ) -> int | None:
        """Finds out whether a write whose answer was lost was done, by reading what it wrote.

        Args:
            puts: Values that the write put, by name.
            deletes: Names that the write deleted.
            error: The error in place of the answer.

        Returns:
            The revision of the write, if the store now holds what it wrote.

        Raises:
            StoreUnavailable: The write may still be on its way, or have been overwritten; only the
                caller can decide what to do.
        """
        written = list_text(map(repr, [*puts, *deletes]), 4)
        unknown = StoreUnavailable(f"{error}; it is not known whether {written} was written")
        if self._connection.closed.is_set():
            raise unknown from None
        until_s = time.monotonic() + self._timeouts.request_s / 2
        revision, pairs = 0, {}
        try:
            for name in [*puts, *deletes]:
                left_s = max(0.001, until_s - time.monotonic())
                request = self._range(name, revision)
                answer = self._connection.call("read", "Range", request, deadline_s=left_s)
                response = await answer
                revision, pairs[name] = revision or response.header.revision, response.kvs
        except CallFailed:
            raise unknown from None
        revisions = set()
        for name, value in puts.items():
            if not pairs[name] or pairs[name][0].value != value:
                raise unknown from None
            revisions.add(pairs[name][0].mod_revision)
        if any(pairs[name] for name in deletes) or len(revisions) > 1:
            raise unknown from None
        return revisions.pop() if revisions else revision

    def _compares(self, condition: Condition) -> list[Any]:
        compare, key = rpc.Compare, self._keys.key(condition.key)
        result = []
        if condition.mod_revision is not None:
            result.append(compare(key=key, target=compare.MOD, mod_revision=condition.mod_revision))
        if condition.create_revision is not None:
            result.append(
                compare(key=key, target=compare.CREATE, create_revision=condition.create_revision)
            )
        if condition.value is not None:
            result.append(compare(key=key, target=compare.VALUE, value=condition.value))
        return result

    def _put(self, name: str, value: bytes, lease_id: int) -> Any:
        put = rpc.PutRequest(key=self._keys.key(name), value=value, lease=lease_id)
        return rpc.RequestOp(request_put=put)

    def _delete(self, name: str) -> Any:
        key, end = self._keys.span(name) if name.endswith("/") else (self._keys.key(name), b"")
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key, range_end=end))

    def _range(self, name: str, revision: int) -> Any:
        """Makes a request for what a key or a folder holds at that revision; 0: now."""
        key, end = self._keys.span(name) if name.endswith("/") else (self._keys.key(name), b"")
        return rpc.RangeRequest(key=key, range_end=end, revision=revision)
