"""Channels to etcd, deadlines, and what is known of its health.

The stubs are those of the etcd3 package; its client, watcher and lease are not used (one endpoint
only, no deadlines, watches that die at the first error).
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from elasticzero.errors import OperatorError, StoreUnavailable, UserError

log = logging.getLogger(__name__)

Observe = Callable[[str, float, str | None], None]
"""Told of every request: operation, seconds, and the error's code or None."""


def _import_stubs() -> Any:
    """etcd3's generated stubs, which need protobuf's pure-Python runtime.

    The variable that chooses the runtime is set around the import only: what this process starts
    later must not inherit it.
    """
    variable = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
    before = os.environ.get(variable)
    os.environ[variable] = "python"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from etcd3 import etcdrpc
    except TypeError as error:
        raise OperatorError(
            "etcd3's stubs cannot be loaded, because this process imported protobuf before the "
            f"launcher ({str(error).splitlines()[0]}); import elasticzero.launcher.etcd first"
        ) from error
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
    return etcdrpc


rpc = _import_stubs()

_STUBS = {"Watch": "WatchStub", "LeaseGrant": "LeaseStub", "LeaseRevoke": "LeaseStub"}
_STUBS |= {"LeaseKeepAlive": "LeaseStub", "Range": "KVStub", "Txn": "KVStub"}

_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),  # etcd ends connections that ping more than every 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # no back-off shared with another store
    ("grpc.enable_http_proxy", 0),
)
_NEEDS_LEADER = (("hasleader", "true"),)
"""Sent with streams: a member cut off from the others ends them instead of falling silent."""
_SILENT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
TRANSIENT = _SILENT | {grpc.StatusCode.CANCELLED}
"""Codes after which a try may succeed; they leave open whether etcd did what it was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the store waits, in seconds."""

    request_s: float = 2.0
    """Deadline of one request, and of the tries of one read. Looking up a write whose answer was
    lost takes half as long again."""
    resync_s: float = 30.0
    """A watch reads its prefix again so often, whatever it was told."""
    backoff_s: float = 0.05
    """First pause after a failure; it doubles up to `backoff_max_s`."""
    backoff_max_s: float = 1.0
    close_s: float = 2.0
    """`close` waits no longer for threads to end."""

    def __post_init__(self) -> None:
        if min(self.request_s, self.resync_s, self.backoff_s, self.backoff_max_s) <= 0:
            raise ValueError(f"timeouts must be positive: {self}")


class CallFailed(StoreUnavailable):
    """One request, or one stream, ended with a gRPC status."""

    def __init__(self, message: str, code: grpc.StatusCode) -> None:
        super().__init__(message)
        self.code = code


class Connection:
    """A channel for each endpoint, one of them in use, and the health of etcd as seen from here.

    An endpoint that is silent is left for the next one, and the streams open on it are ended.
    """

    def __init__(self, endpoints: Sequence[str], observe: Observe, timeouts: Timeouts) -> None:
        self.endpoints = tuple(_address(endpoint) for endpoint in endpoints)
        if not self.endpoints:
            raise UserError("no etcd endpoint was given; name at least one, as HOST:PORT")
        self.timeouts = timeouts
        self.observe = observe
        self.closed = threading.Event()
        self.reachable = True
        self.last_outage_end_s = 0.0
        self._outage_began_s = 0.0
        self._channels = [grpc.insecure_channel(e, options=_OPTIONS) for e in self.endpoints]
        self._methods = [
            {
                method: getattr(getattr(rpc, stub)(channel), method)
                for method, stub in _STUBS.items()
            }
            for channel in self._channels
        ]
        self._current = 0
        self._streams: dict[Any, int] = {}
        self._lock = threading.Lock()

    def call(self, operation: str, method: str, request: Any, *, deadline_s: float = 0.0) -> Any:
        """The response to one request at the endpoint in use; raises `CallFailed`."""
        index = self._current
        began_s = time.monotonic()
        try:
            response = self._start(
                index, method, request, timeout=deadline_s or self.timeouts.request_s
            )
        except grpc.RpcError as error:
            failure = self._failure(operation, index, error)
            self.observe(operation, time.monotonic() - began_s, failure.code.name.lower())
            if failure.code in _SILENT:
                self._silent(index, str(failure))
            elif failure.code not in TRANSIENT:
                self.answered()
            raise failure from None
        self.observe(operation, time.monotonic() - began_s, None)
        self.answered()
        return response

    @contextmanager
    def stream(
        self,
        operation: str,
        method: str,
        requests: Callable[[threading.Event], Iterator[Any]],
        *,
        deadline_s: float | None = None,
    ) -> Iterator[Any]:
        """An open stream of responses; in the block, a stream that breaks raises `CallFailed`.

        `requests` makes the iterator of requests, which must end when its event is set. With a
        deadline, the block simply ends when that has passed.
        """
        index = self._current
        over = threading.Event()
        call = self._start(
            index, method, requests(over), timeout=deadline_s, metadata=_NEEDS_LEADER
        )
        try:
            with self._lock:
                self._streams[call] = index
            if self.closed.is_set():
                call.cancel()
            yield call
        except grpc.RpcError as error:
            failure = self._failure(operation, index, error)
            if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED and deadline_s is not None:
                return
            if failure.code is not grpc.StatusCode.CANCELLED:
                self.observe(operation, 0.0, failure.code.name.lower())
            if failure.code in _SILENT:
                self._silent(index, str(failure))
            raise failure from None
        finally:
            over.set()
            call.cancel()
            with self._lock:
                self._streams.pop(call, None)

    def answered(self) -> None:
        """etcd gave an answer, whatever it says: an outage is over."""
        if self.reachable:
            return
        with self._lock:
            if self.reachable:
                return
            self.last_outage_end_s = time.monotonic()
            self.reachable = True
        log.warning("etcd is back after %.1f s", self.last_outage_end_s - self._outage_began_s)

    def answered_late(self) -> None:
        """etcd answered after a silence in which leases may have run out: that was an outage."""
        with self._lock:
            self.last_outage_end_s = time.monotonic()
            self.reachable = True

    def end_silent_stream(self, operation: str, call: Any) -> None:
        """A stream gave no answer in time: its endpoint is silent, and the stream is ended."""
        self.observe(operation, 0.0, "no_answer")
        with self._lock:
            index = self._streams.get(call, self._current)
        self._silent(index, f"etcd at {self.endpoints[index]} does not answer `{operation}`")
        call.cancel()

    def pause(self, failures: int) -> None:
        """Wait before the next try, longer after more failures in a row; `close` ends the wait."""
        doubled_s = self.timeouts.backoff_s * 2.0 ** min(failures - 1, 20)
        longest_s = min(self.timeouts.backoff_max_s, doubled_s)
        self.closed.wait(longest_s * random.uniform(0.5, 1.0))

    def close(self) -> None:
        """Fail all calls and streams, now and later."""
        self.closed.set()
        with self._lock:
            calls = list(self._streams)
        for call in calls:
            call.cancel()
        for channel in self._channels:
            channel.close()

    def _start(self, index: int, method: str, request: Any, **options: Any) -> Any:
        try:
            return self._methods[index][method](request, **options)
        except ValueError:  # what a closed channel raises
            if not self.closed.is_set():
                raise
            raise CallFailed(
                f"this connection to etcd at {self.endpoints[index]} was closed",
                grpc.StatusCode.CANCELLED,
            ) from None

    def _failure(self, operation: str, index: int, error: grpc.RpcError) -> CallFailed:
        code, detail = grpc.StatusCode.UNKNOWN, str(error)
        if isinstance(error, grpc.Call):
            code, detail = error.code(), error.details() or "no details"
        return CallFailed(
            f"etcd at {self.endpoints[index]}: no {operation} ({code.name.lower()}: {detail}); "
            "running workers go on, the agent tries again: check that etcd runs and is in reach",
            code,
        )

    def _silent(self, index: int, why: str) -> None:
        if self.closed.is_set():
            return
        with self._lock:
            began = self.reachable
            if began:
                self.reachable = False
                self._outage_began_s = time.monotonic()
            abandoned = []
            if len(self._channels) > 1 and index == self._current:
                self._current = (index + 1) % len(self._channels)
                abandoned = [call for call, at in self._streams.items() if at == index]
        for call in abandoned:
            call.cancel()
        if began:
            log.warning("%s", why)


def _address(endpoint: str) -> str:
    """The gRPC target of what the user wrote: HOST:PORT, with or without http://."""
    address = endpoint.strip().removeprefix("http://").rstrip("/")
    host, colon, port = address.rpartition(":")
    if "://" in address:
        raise UserError(f"etcd endpoint {endpoint!r}: only plain HOST:PORT is understood")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"etcd endpoint {endpoint!r} is not HOST:PORT, as in 10.0.0.7:2379")
    return address
