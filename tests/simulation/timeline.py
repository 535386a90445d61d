"""Virtual time: events in order, and tasks that wait among them.

A task is a greenlet: real code that waits, for an answer or for time to pass, gives way to the
events due before then. One thread, no clock, no randomness: the same events run the same way.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import greenlet


class Timeline:
    """The events to come; `now_s` is the time of the one that runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        """How many have run."""
        self.most_events: int | None = None
        """More than that are a loop that gets nowhere; None: any number may run."""
        self._queue: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._count = 0
        self._hub = greenlet.getcurrent()

    def after(self, delay_s: float, call: Callable[..., Any], *arguments: Any) -> None:
        """Have `call(*arguments)` run so much later."""
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, call, arguments))

    def run(self, until_s: float, over: Callable[[], bool]) -> bool:
        """Run events until `over()`; False if that was not so by `until_s`."""
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= until_s:
            self.now_s, _, call, arguments = pop(queue)
            self.events += 1
            if self.events == self.most_events:
                return False
            call(*arguments)
            if over():
                return True
        self.now_s = max(self.now_s, until_s)
        return over()

    def wait(self) -> None:
        """Called in a task: give way until somebody switches back to it."""
        self._hub.switch()

    def sleep(self, seconds: float) -> None:
        """Called in a task: let so much time pass."""
        self.after(seconds, greenlet.getcurrent().switch)
        self._hub.switch()

    def task(self, run: Callable[[], None]) -> greenlet.greenlet:
        """A task that begins now."""
        started = greenlet.greenlet(run, self._hub)
        self.after(0.0, started.switch)
        return started
