"""Runs work on several items at a time, in threads that do not prevent the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

THREADS = 4
"""Default number of items that are worked on at a time."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def run_parallel(
    items: Iterable[_Item], work: Callable[[_Item], _Result], *, threads: int = THREADS
) -> list[_Result]:
    """Calls `work` on every item, up to `threads` at a time.

    After an error no further item is begun; once the running ones have ended, the error of the
    first item that failed is raised. The threads are daemons and not an executor's, which Python
    waits for at exit: one whose storage hangs would prevent the agent from ending.

    Args:
        items: The items, which are begun in this order.
        work: The function of one item; the caller's thread and others call it at the same time.
        threads: The most items that are worked on at a time.

    Returns:
        The results, in the order of the items.
    """
    waiting = list(enumerate(items))
    results: dict[int, _Result] = {}
    errors: dict[int, BaseException] = {}

    def loop() -> None:
        while waiting and not errors:
            try:
                index, item = waiting.pop(0)
            except IndexError:
                return
            try:
                results[index] = work(item)
            except BaseException as error:  # noqa: BLE001 - the top of a thread: handed on
                errors[index] = error

    others = [
        threading.Thread(target=loop, name=f"elasticzero-parallel-{i}", daemon=True)
        for i in range(min(threads, len(waiting)) - 1)
    ]
    for thread in others:
        thread.start()
    loop()
    for thread in others:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in sorted(results)]
