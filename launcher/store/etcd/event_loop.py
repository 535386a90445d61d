"""Runs coroutines in the one event loop of this process; any other thread may wait for them.

gRPC's asyncio classes belong to the event loop in which they were created, and the loops of one
process wake one another at every message. So all stores of a process share one loop, in a thread of
its own, where a stream costs a fraction of what it costs with a thread of its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_thread: threading.Thread | None = None
_loop: asyncio.AbstractEventLoop | None = None


def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the loop, which runs from the first call until the process ends."""
    global _loop, _thread
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name="etcd", daemon=True)
            _thread.start()
        return _loop


def wait_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in the loop; returns its result, or raises its error.

    Raises:
        RuntimeError: The caller runs in the loop, which would wait for itself for ever.
    """
    if threading.current_thread() is _thread:
        coroutine.close()
        raise RuntimeError(
            "a callback of the store called the store; hand the work over to another thread"
        )
    return start(coroutine).result()


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Begins a coroutine in the loop, from any thread."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop())


def call_soon(function: Callable[..., object], *positional: object) -> None:
    """Calls a function in the loop, after all that were handed over before; any thread may ask."""
    event_loop().call_soon_threadsafe(function, *positional)


def wait_until_over(futures: Collection[Future[None]], timeout_s: float) -> None:
    """Waits until these coroutines have ended, so many seconds at most; in the loop not at all."""
    if threading.current_thread() is not _thread:
        wait(futures, timeout_s)


def _forget_parent() -> None:
    """A forked process has no thread of its parent's."""
    global _lock, _loop, _thread
    _lock, _loop, _thread = threading.Lock(), None, None


os.register_at_fork(after_in_child=_forget_parent)
