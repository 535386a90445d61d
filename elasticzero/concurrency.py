"""Work on several items at a time, by threads that nothing waits for when the process ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

THREADS = 4
"""Items worked on at a time."""

Item = TypeVar("Item")


def each(items: Iterable[Item], work: Callable[[Item], None]) -> None:
    """`work` on every item, some at a time; raises the first error once all have ended.

    By threads of its own: those of an executor are waited for at exit, and one whose storage hangs
    would keep the agent from ending.
    """
    waiting = list(items)
    errors: list[BaseException] = []

    def loop() -> None:
        while waiting and not errors:
            try:
                item = waiting.pop(0)
            except IndexError:
                return
            try:
                work(item)
            except BaseException as error:  # noqa: BLE001 - the top of a thread: handed on
                errors.append(error)

    threads = [
        threading.Thread(target=loop, name=f"elasticzero-copy-{i}", daemon=True)
        for i in range(min(THREADS, len(waiting)) - 1)
    ]
    for thread in threads:
        thread.start()
    loop()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
