"""Repeats a call that fails for a while: the one place of the launcher that sets `tenacity` up.

A loop that waits for a condition, such as a lease that has to lapse, is no retry and stays a loop.
So does a state machine that puts its next write off after a failure, for it must not block.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import tenacity

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Says how long to pause after a failure, and when to give up."""

    first_pause_s: float
    """Longest pause in seconds after the first failure."""
    max_pause_s: float
    """Longest pause in seconds after any failure."""
    growth: float = 2.0
    """Factor by which the longest pause grows with each failure in a row."""
    spread: float = 0.5
    """Random share of a pause, so that callers that failed together do not retry together."""
    timeout_s: float = float("inf")
    """Seconds since the first try after which no other one is made."""
    min_tries: int = 1
    """Number of tries that are made however long they take."""

    def pause_s(self, failures: int) -> float:
        """Returns the seconds to wait after so many failures in a row."""
        longest_s = self.first_pause_s * self.growth ** min(failures - 1, 20)
        return min(self.max_pause_s, longest_s) * random.uniform(1.0 - self.spread, 1.0)


def retry_call(
    call: Callable[[], T],
    policy: RetryPolicy,
    *,
    retryable: Callable[[BaseException], bool],
    closed: threading.Event | None = None,
    on_failure: Callable[[int, BaseException], None] | None = None,
) -> T:
    """Returns what `call` returns, and raises its last error once the policy gives up.

    Args:
        call: What is tried.
        policy: Says how long and how often.
        retryable: Tells the errors after which a try can succeed; any other is raised at once.
        closed: Ends the pauses and the tries when it is set.
        on_failure: Called before each pause, with the number of failures so far and the last error.
    """

    retrying = tenacity.Retrying(
        sleep=time.sleep if closed is None else tenacity.sleep_using_event(closed),
        **_rules(policy, retryable, closed, on_failure),
    )
    return retrying(call)


async def retry_call_async(
    call: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    *,
    retryable: Callable[[BaseException], bool],
    closed: asyncio.Event,
) -> T:
    """Does in an event loop what `retry_call` does in a thread; for the arguments see there."""

    async def attempt() -> T:
        return await call()

    async def sleep(seconds: float) -> None:
        await pause_unless(closed, seconds)

    retrying = tenacity.AsyncRetrying(sleep=sleep, **_rules(policy, retryable, closed, None))
    return await retrying(attempt)


async def pause_unless(closed: asyncio.Event, seconds: float) -> None:
    """Waits so many seconds; less if the event is set meanwhile."""
    with suppress(TimeoutError):
        await asyncio.wait_for(closed.wait(), seconds)


def _rules(
    policy: RetryPolicy,
    retryable: Callable[[BaseException], bool],
    closed: threading.Event | asyncio.Event | None,
    on_failure: Callable[[int, BaseException], None] | None,
) -> dict[str, Any]:
    """Returns the policy in tenacity's words; for the arguments see `retry_call`."""

    def pause(state: tenacity.RetryCallState) -> float:
        pause_s = policy.pause_s(state.attempt_number)
        left_s = policy.timeout_s - (state.seconds_since_start or 0.0)
        return min(pause_s, left_s) if left_s > 0 else pause_s

    def stop(state: tenacity.RetryCallState) -> bool:
        if closed is not None and closed.is_set():
            return True
        late = (state.seconds_since_start or 0.0) >= policy.timeout_s
        return late and state.attempt_number >= policy.min_tries

    def report(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if on_failure is not None and error is not None:
            on_failure(state.attempt_number, error)

    return {
        "retry": tenacity.retry_if_exception(retryable),
        "wait": pause,
        "stop": stop,
        "before_sleep": report,
        "reraise": True,
    }
