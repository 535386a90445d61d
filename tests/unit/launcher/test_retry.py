"""`retry_call` repeats what may yet succeed, and gives up when its policy says so."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from elasticzero.launcher.retry import RetryPolicy, retry_call, retry_call_async

AT_ONCE = RetryPolicy(first_pause_s=0.0, max_pause_s=0.0)


def failing(times: int, error: type[Exception] = OSError) -> Callable[[], int]:
    """Fails so many times, then returns how often it was called."""
    calls = 0

    def call() -> int:
        nonlocal calls
        calls += 1
        if calls <= times:
            raise error(f"try {calls}")
        return calls

    return call


def is_os_error(error: BaseException) -> bool:
    return isinstance(error, OSError)


def test_a_call_is_repeated_until_it_succeeds() -> None:
    reported: list[tuple[int, str]] = []
    value = retry_call(
        failing(2),
        AT_ONCE,
        retryable=is_os_error,
        on_failure=lambda failures, error: reported.append((failures, str(error))),
    )
    assert value == 3
    assert reported == [(1, "try 1"), (2, "try 2")]


def test_an_error_that_is_not_retryable_is_raised_at_once() -> None:
    with pytest.raises(KeyError, match="try 1"):
        retry_call(failing(1, KeyError), AT_ONCE, retryable=is_os_error)


@pytest.mark.parametrize("tries", [1, 3])
def test_it_gives_up_after_its_time_and_fewest_tries(tries: int) -> None:
    policy = RetryPolicy(first_pause_s=0.0, max_pause_s=0.0, timeout_s=0.0, min_tries=tries)
    with pytest.raises(OSError, match=f"try {tries}"):
        retry_call(failing(9), policy, retryable=is_os_error)


def test_a_pause_ends_with_the_time_that_is_left() -> None:
    policy = RetryPolicy(first_pause_s=60.0, max_pause_s=60.0, timeout_s=1.0)
    began_s = time.monotonic()
    with pytest.raises(OSError, match="try 2"):
        retry_call(failing(9), policy, retryable=is_os_error)
    assert time.monotonic() - began_s < 30.0


def test_an_event_ends_the_tries() -> None:
    closed = threading.Event()
    long = RetryPolicy(first_pause_s=60.0, max_pause_s=60.0)
    with pytest.raises(OSError, match="try 2"):
        retry_call(
            failing(9),
            long,
            retryable=is_os_error,
            closed=closed,
            on_failure=lambda failures, error: closed.set(),
        )


def test_a_coroutine_is_repeated_until_it_succeeds() -> None:
    call = failing(2)

    async def play() -> int:
        closed = asyncio.Event()

        async def attempt() -> int:
            return call()

        return await retry_call_async(attempt, AT_ONCE, retryable=is_os_error, closed=closed)

    assert asyncio.run(play()) == 3


def test_an_event_ends_the_pauses_of_a_coroutine() -> None:
    call = failing(9)
    long = RetryPolicy(first_pause_s=3600.0, max_pause_s=3600.0)

    async def play() -> None:
        closed = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, closed.set)

        async def attempt() -> int:
            return call()

        with pytest.raises(OSError, match="try 2"):
            await retry_call_async(attempt, long, retryable=is_os_error, closed=closed)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("failures", "longest_s"), [(1, 2.0), (2, 3.0), (3, 4.5), (4, 6.75), (5, 8.0), (500, 8.0)]
)
def test_pauses_grow_up_to_a_cap(failures: int, longest_s: float) -> None:
    policy = RetryPolicy(first_pause_s=2.0, max_pause_s=8.0, growth=1.5)
    pauses_s = [policy.pause_s(failures) for _ in range(50)]
    assert longest_s / 2 <= min(pauses_s) <= max(pauses_s) <= longest_s
    assert len(set(pauses_s)) > 1
