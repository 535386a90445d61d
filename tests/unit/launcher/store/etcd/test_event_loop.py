"""One event loop serves all threads of a process, and no thread waits in it for itself."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from elasticzero.launcher.store.etcd.event_loop import (
    call_soon,
    event_loop,
    start,
    wait_for,
    wait_until_over,
)
from tests.support.deadlines import patience


async def _thread_name() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def _raise(error: Exception) -> None:
    raise error


def test_all_threads_share_one_loop() -> None:
    names: list[str] = []
    threads = [
        threading.Thread(target=lambda: names.append(wait_for(_thread_name()))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(20))
    assert names == ["etcd"] * 8


def test_an_error_reaches_the_thread_that_waits() -> None:
    with pytest.raises(KeyError, match="nothing"):
        wait_for(_raise(KeyError("nothing")))


def test_functions_are_called_in_order() -> None:
    seen: list[int] = []
    for number in range(100):
        call_soon(seen.append, number)
    wait_for(_thread_name())
    assert seen == list(range(100))


def test_the_loop_does_not_wait_for_itself() -> None:
    async def play() -> str:
        return wait_for(_thread_name())

    with pytest.raises(RuntimeError, match="hand the work over to another thread"):
        wait_for(play())


def test_a_wait_for_what_never_ends_has_a_limit() -> None:
    waiting = start(asyncio.sleep(3600))
    wait_until_over([waiting], 0.05)
    assert not waiting.done()
    waiting.cancel()
    wait_until_over([waiting], patience(20))
    assert waiting.done()


def test_a_forked_process_begins_a_loop_of_its_own() -> None:
    parents = event_loop()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        fresh = event_loop() is not parents and wait_for(_thread_name()) == "etcd"
        os.write(writing, b"fresh" if fresh else b"stale")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        assert answer.read() == b"fresh"
    os.waitpid(child, 0)
