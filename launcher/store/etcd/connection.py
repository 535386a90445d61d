"""Sends requests and streams to etcd with deadlines and failover, and tracks its health.

All of it runs in the process's event loop for etcd, but for what says that any thread may call it.
The messages are those of the etcd3 package (`protobuf.py`); its client, watcher and lease are
not used (one endpoint only, no deadlines, watches that die at the first error).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from elasticzero.errors import AccessRefused, StoreUnavailable, UserError
from elasticzero.launcher.retry import RetryPolicy, pause_unless
from elasticzero.launcher.store.data_loss import History, HistoryPosition
from elasticzero.launcher.store.etcd.access import (
    Access,
    Endpoint,
    parse_endpoint,
)
from elasticzero.launcher.store.etcd.auth import (
    NO_USERS_ENABLED,
    NOT_ENABLED,
    TokenCache,
    explain_failed_login,
    explain_refusal,
    is_old_login,
)
from elasticzero.launcher.store.etcd.channels import open_channels
from elasticzero.launcher.store.etcd.diagnose import diagnose_endpoint
from elasticzero.launcher.store.etcd.event_loop import call_soon, wait_for
from elasticzero.launcher.store.etcd.protobuf import grpc, load_messages

log = logging.getLogger(__name__)

RequestObserver = Callable[[str, float, str | None], None]
"""Called after every request with the operation, the seconds it took, and the error's code or
None."""
OpenChannels = Callable[[Sequence[Endpoint], Access], list[Any]]


rpc = load_messages()

_STUBS = {"Watch": "WatchStub", "LeaseGrant": "LeaseStub", "LeaseRevoke": "LeaseStub"}
_STUBS |= {"LeaseKeepAlive": "LeaseStub", "Range": "KVStub", "Txn": "KVStub"}
_STUBS |= {"Authenticate": "AuthStub"}

_PUT = "request_put"
_NO_SPACE = "space exceeded"
_NO_CONNECTION = "failed to connect to all addresses"
_NEEDS_LEADER = (("hasleader", "true"),)
"""Sent with streams: a member cut off from the others ends them instead of falling silent."""
_SILENT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
TRANSIENT = _SILENT | {grpc.StatusCode.CANCELLED}
"""Codes after which a try may succeed; they leave open whether etcd did what it was asked."""
_LINEARIZABLE = frozenset({"Range", "Txn"})
"""Methods whose answers are at no lower revision than any that was known before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Holds the time limits of the store, in seconds."""

    request_s: float = 2.0
    """Deadline of one request, and of the tries of one read. Looking up a write whose answer was
    lost takes half as long again."""
    resync_s: float = 30.0
    """Seconds after which a watch reads its prefix again, whatever the stream has sent."""
    backoff_s: float = 0.05
    """First pause after a failure; it doubles up to `backoff_max_s`."""
    backoff_max_s: float = 1.0
    close_s: float = 2.0
    """Maximum seconds for which `close` waits for threads to end."""
    login_s: float = 240.0
    """Seconds for which a login is used; etcd forgets one after 300 s by default."""

    def __post_init__(self) -> None:
        if min(self.request_s, self.resync_s, self.backoff_s, self.backoff_max_s) <= 0:
            raise ValueError(f"timeouts must be positive: {self}")


class CallFailed(StoreUnavailable):
    """Says that one request, or one stream, ended with a gRPC status."""

    def __init__(self, message: str, code: grpc.StatusCode, detail: str = "") -> None:
        """Creates the error.

        Args:
            message: What failed, and what to do.
            code: The gRPC status.
            detail: etcd's own message.
        """
        super().__init__(message)
        self.code = code
        self.detail = detail


class Connection:
    """Holds a channel for each endpoint, one of them in use, and tracks the health of etcd.

    An endpoint that is silent is left for the next one, and the streams open on it are ended.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        observe: RequestObserver,
        timeouts: Timeouts,
        access: Access | None = None,
        channels: OpenChannels | None = None,
    ) -> None:
        """Opens a channel for each endpoint; any thread but the loop's may do so.

        Args:
            endpoints: Members of etcd, as the user wrote them.
            observe: Called in the loop after every request.
            timeouts: Time limits.
            access: TLS and user for etcd; None: neither.
            channels: Opens the channels in place of `open_channels`.
        """
        access = access or Access()
        self.endpoints = tuple(parse_endpoint(endpoint, access) for endpoint in endpoints)
        if not self.endpoints:
            raise UserError("no etcd endpoint was given; name at least one, as HOST:PORT")
        self.timeouts = timeouts
        self.retry = RetryPolicy(
            first_pause_s=timeouts.backoff_s, max_pause_s=timeouts.backoff_max_s
        )
        self._access = access
        authenticated = access.user is not None
        self._login = TokenCache(self._log_in, timeouts.login_s) if authenticated else None
        self._users_enabled = True
        self._has_answered = False
        self.history = History(self._begin_anew)
        self.observe = observe
        self.closed = asyncio.Event()
        self.reachable = True
        self.last_outage_end_s = 0.0
        self._outage_began_s = 0.0
        self._channels: list[Any] = []
        self._methods: list[dict[str, Any]] = []
        self._current = 0
        self._streams: dict[Any, int] = {}
        wait_for(self._open(channels or open_channels))

    async def _open(self, channels: OpenChannels) -> None:
        self._channels = channels(self.endpoints, self._access)
        self._methods = [
            {
                method: getattr(getattr(rpc, stub)(channel), method)
                for method, stub in _STUBS.items()
            }
            for channel in self._channels
        ]

    async def call(
        self, operation: str, method: str, request: Any, *, deadline_s: float = 0.0
    ) -> Any:
        """Returns the response to one request at the endpoint in use.

        Args:
            operation: What the request does, for metrics and messages.
            method: Name of the gRPC method.
            request: The message to send.
            deadline_s: Seconds for the answer; 0: `request_s`.

        Raises:
            CallFailed: The request ended with a gRPC status.
            AccessRefused: etcd refuses the user.
        """
        answer = await self.call_in_history(operation, method, request, deadline_s=deadline_s)
        return answer[0]

    async def call_in_history(
        self, operation: str, method: str, request: Any, *, deadline_s: float = 0.0
    ) -> tuple[Any, int]:
        """Returns the response to one request, with the number of the history that it is of.

        Args:
            operation: What the request does, for metrics and messages.
            method: Name of the gRPC method.
            request: The message to send.
            deadline_s: Seconds for the answer; 0: `request_s`.

        Raises:
            CallFailed: The request ended with a gRPC status.
            AccessRefused: etcd refuses the user.
        """
        for last_try in (self._login is None, True):
            token = await self._login.token() if self._login is not None else ""
            try:
                return await self._call(operation, method, request, token, deadline_s)
            except CallFailed as failure:
                if self._login is not None and is_old_login(failure.detail):
                    self._login.invalidate(token)
                    if not last_try:
                        continue  # it was refused at the door: nothing was done, a write neither
                refused = explain_refusal(self._where(), self._access, failure.detail)
                if refused is not None:
                    raise AccessRefused(refused) from None
                raise
        raise AssertionError("unreachable")

    async def _call(
        self, operation: str, method: str, request: Any, token: str, deadline_s: float = 0.0
    ) -> tuple[Any, int]:
        index = self._current
        position = self.history.position()
        began_s = time.monotonic()
        timeout_s = deadline_s or self.timeouts.request_s
        try:
            call = self._start(index, method, request, timeout=timeout_s, metadata=_metadata(token))
            with _cancelled_as_failure(call, self.endpoints[index]):
                response = await call
        except grpc.aio.AioRpcError as error:
            failure = self._failure(operation, index, error)
            self.observe(operation, time.monotonic() - began_s, failure.code.name.lower())
            if failure.code in _SILENT:
                self._fail_over(index, str(failure))
            elif failure.code not in TRANSIENT:
                self.record_success()
            raise failure from None
        self.observe(operation, time.monotonic() - began_s, None)
        self.record_success()
        wrote = method == "Txn" and response.succeeded and request.success[0].HasField(_PUT)
        linearizable = method in _LINEARIZABLE
        number = self.check(position, response.header, linearizable=linearizable, wrote=wrote)
        if number is None:
            raise CallFailed(
                f"etcd at {self.endpoints[index]} lost its data while this {operation} was on its "
                "way; it is asked again",
                grpc.StatusCode.CANCELLED,
            )
        return response, number

    def check(
        self, sent: HistoryPosition, header: Any, *, linearizable: bool = False, wrote: bool = False
    ) -> int | None:
        """Finds out which history a response is of.

        Args:
            sent: Position when the request was sent.
            header: The response's header.
            linearizable: Whether the response has no lower revision than any known before.
            wrote: Whether the request was to put something, and it did.

        Returns:
            The number of the history. None: another history has begun since then, so the response
            may be of either.
        """
        revision = header.revision if linearizable else 0
        verdict = self.history.judge_response(sent, header.cluster_id, revision, wrote=wrote)
        if verdict == "late":
            return None
        return sent.number + (verdict == "lost")

    def _begin_anew(self) -> None:
        """Ends all streams; new ones begin with what the store holds now. Any thread may call
        it."""
        log.debug("etcd has lost its data: %s", self.history.reason)
        self.record_late_reply()
        call_soon(self._cancel_streams)

    def _cancel_streams(self) -> None:
        for call in list(self._streams):
            call.cancel()

    @asynccontextmanager
    async def stream(
        self,
        operation: str,
        method: str,
        requests: Callable[[asyncio.Event], AsyncIterator[Any]],
        *,
        deadline_s: float | None = None,
    ) -> AsyncIterator[Any]:
        """Opens a stream of responses.

        Args:
            operation: What the stream does, for metrics and messages.
            method: Name of the gRPC method.
            requests: Makes the iterator of requests, which must end when its event is set.
            deadline_s: Seconds after which the block simply ends; None: it has no such limit.

        Raises:
            CallFailed: The stream breaks; it is raised in the block.
        """
        token = await self._login.token() if self._login is not None else ""
        index = self._current
        over = asyncio.Event()
        metadata = _NEEDS_LEADER + _metadata(token)
        call = self._start(index, method, requests(over), timeout=deadline_s, metadata=metadata)
        self._streams[call] = index
        try:
            with _cancelled_as_failure(call, self.endpoints[index]):
                yield call
        except grpc.aio.AioRpcError as error:
            failure = self._failure(operation, index, error)
            if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED and deadline_s is not None:
                return
            if failure.code is not grpc.StatusCode.CANCELLED:
                self.observe(operation, 0.0, failure.code.name.lower())
            if failure.code in _SILENT:
                self._fail_over(index, str(failure))
            if self._login is not None and is_old_login(failure.detail):
                self._login.invalidate(token)
            raise failure from None
        finally:
            over.set()
            call.cancel()
            self._streams.pop(call, None)

    def record_success(self) -> None:
        """Notes that etcd gave an answer, whatever it says: an outage is over."""
        self._has_answered = True
        if self.reachable:
            return
        self.last_outage_end_s = time.monotonic()
        self.reachable = True
        log.warning("etcd is back after %.1f s", self.last_outage_end_s - self._outage_began_s)

    def raise_if_access_refused(self) -> None:
        """Raises `AccessRefused` if etcd has never answered and something on our side is the
        reason. It connects, and so no coroutine calls it."""
        if self._has_answered or self.closed.is_set():
            return
        diagnoses = [diagnose_endpoint(endpoint, self._access) for endpoint in self.endpoints]
        reasons = [reason for reason in diagnoses if reason is not None]
        if reasons:
            raise AccessRefused("; ".join(reasons))

    async def _log_in(self) -> str:
        """Returns a token for user and password; an empty one where etcd needs none."""
        access = self._access
        assert access.user is not None and access.password is not None
        request = rpc.AuthenticateRequest(name=access.user, password=access.password.reveal)
        try:
            token: str = (await self._call("login", "Authenticate", request, ""))[0].token
        except CallFailed as failure:
            if NOT_ENABLED in failure.detail:
                if self._users_enabled:
                    log.warning(NO_USERS_ENABLED, self._where(), access.user)
                self._users_enabled = False
                return ""
            if failure.code is grpc.StatusCode.INVALID_ARGUMENT:
                raise AccessRefused(explain_failed_login(self._where(), access)) from None
            raise
        self._users_enabled = True
        return token

    def _where(self) -> Endpoint:
        return self.endpoints[self._current]

    def record_late_reply(self) -> None:
        """Notes an outage: etcd answered after a silence in which leases may have expired. Any
        thread may call it."""
        self.last_outage_end_s = time.monotonic()
        self.reachable = True

    def record_timeout(self, operation: str, call: Any, *, end: bool) -> None:
        """Notes that a stream gave no answer in time, so its endpoint is silent.

        The stream is ended, with all streams of that endpoint, if there is another one, or that one
        is in use already; and if `end` says so.

        Args:
            operation: What the stream does, for metrics and messages.
            call: The stream.
            end: Whether to end the stream in any case.
        """
        self.observe(operation, 0.0, "no_answer")
        index = self._streams.get(call, self._current)
        self._fail_over(index, f"etcd at {self.endpoints[index]} does not answer `{operation}`")
        if end or index != self._current:
            call.cancel()

    async def pause(self, failures: int) -> None:
        """Waits before the next try, longer after more failures in a row; `close` ends the wait."""
        await pause_unless(self.closed, self.retry.pause_s(failures))

    async def close(self) -> None:
        """Fails all calls and streams, now and later."""
        self.closed.set()
        self._cancel_streams()
        for channel in self._channels:
            await channel.close()

    def _start(self, index: int, method: str, request: Any, **options: Any) -> Any:
        try:
            return self._methods[index][method](request, **options)
        except grpc.aio.UsageError:  # what a closed channel raises
            if not self.closed.is_set():
                raise
            raise _ended_here(self.endpoints[index]) from None

    def _failure(self, operation: str, index: int, error: grpc.aio.AioRpcError) -> CallFailed:
        code, detail = error.code(), error.details() or "no details"
        what = "check that etcd runs and is in reach"
        if _NO_SPACE in detail:
            what = "make room with `etcdctl compact`, `etcdctl defrag` and `etcdctl alarm disarm`"
        why = f"{code.name.lower()}: {_plainly(detail)}"
        return CallFailed(
            f"etcd at {self.endpoints[index]}: no {operation} ({why}); {what}",
            code,
            detail,
        )

    def _fail_over(self, index: int, why: str) -> None:
        if self.closed.is_set():
            return
        began = self.reachable
        if began:
            self.reachable = False
            self._outage_began_s = time.monotonic()
        if len(self._channels) > 1 and index == self._current:
            self._current = (index + 1) % len(self._channels)
            for call in [call for call, at in self._streams.items() if at == index]:
                call.cancel()
        if began and self._has_answered:  # before the first answer the one who asks says what to do
            log.warning("%s", why)


@contextmanager
def _cancelled_as_failure(call: Any, endpoint: Endpoint) -> Iterator[None]:
    """Raises `CallFailed` where gRPC says that this process itself has cancelled the call: asyncio
    takes that for the end of the whole coroutine."""
    try:
        yield
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
        raise _ended_here(endpoint) from None


def _ended_here(endpoint: Endpoint) -> CallFailed:
    return CallFailed(
        f"this connection to etcd at {endpoint} was closed", grpc.StatusCode.CANCELLED
    )


def _plainly(detail: str) -> str:
    """Returns gRPC's message about a connection that failed, without the list of its tries."""
    return detail.rpartition(": ")[2].lower() if detail.startswith(_NO_CONNECTION) else detail


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("token", token),) if token else ()
