"""Counts how often this process stood still for longer than its node's lease lasts."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable


def _boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class StandstillCounter:
    """Counts how often this process stood still for longer than its lease lasts.

    A thread notes that the process runs. The clock goes on while the machine is suspended.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = _boot_s) -> None:
        """Counts from now on.

        Args:
            lease_s: Seconds for which the node's lease lasts without being renewed; infinite: there
                is none.
            clock: Returns the seconds since the machine was started.
        """
        self._lease_s = lease_s
        self._clock = clock
        self._lock = threading.Lock()
        self._last_s = clock()
        self._count = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if lease_s < math.inf:
            self._thread = threading.Thread(
                target=self._run, name="elasticzero-standstill", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Stops the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._lease_s / 4):
            self.tick()

    def tick(self) -> int:
        """Notes that the process runs; returns how often it has stood still so far."""
        with self._lock:
            now_s = self._clock()
            self._count += now_s - self._last_s > self._lease_s
            self._last_s = now_s
            return self._count
