"""Reads parts in several threads: one for each spare core, and more while they wait for a disk or a
network."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

MAX_THREADS = 4
"""Maximum number of parts that are read at the same time, each in a thread."""
_WAITING = 0.5
"""Share of its time that a thread waits for bytes, above which one more thread is started."""

P = TypeVar("P")


def spare_cores() -> int:
    """Returns the cores for each rank of this node (`LOCAL_WORLD_SIZE`, which launchers set), at
    least one."""
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(local_ranks) if local_ranks.isdecimal() else 1
    return max(1, len(os.sched_getaffinity(0)) // max(1, ranks))


def _busy_s() -> float:
    """Returns how many seconds this thread has run on a core, or has queued for one."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            ran_ns, queued_ns, _ = file.read().split()
    except OSError:
        return time.thread_time()
    return (int(ran_ns) + int(queued_ns)) / 1e9


def run_adaptive(parts: Iterator[P], begin: Callable[[], Callable[[P], None]], most: int) -> None:
    """Reads every part once.

    The first error stops every thread at its next part, and is raised.

    Args:
        parts: What is read, in the order in which the threads take it.
        begin: Is called once in each thread, and returns the function that reads a part there.
        most: Maximum number of threads.
    """
    if most <= 1:
        read = begin()
        for part in parts:
            read(part)
        return
    with ThreadPoolExecutor(most, thread_name_prefix="checkpoint-read") as pool:
        readers = _Pool(parts, begin, most, pool)
        try:
            for _ in range(min(most, spare_cores())):
                readers.start_thread()
            for reader in readers.running:  # the list grows meanwhile
                reader.result()
        finally:
            readers.stop()


class _Pool(Generic[P]):
    def __init__(
        self,
        parts: Iterator[P],
        begin: Callable[[], Callable[[P], None]],
        most: int,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.running: list[Future[None]] = []
        self._parts = parts
        self._begin = begin
        self._most = most
        self._pool = pool
        self._lock = threading.Lock()
        self._stopped = False

    def start_thread(self) -> None:
        """Starts one more thread, unless `most` are running or the pool is stopped."""
        with self._lock:
            if len(self.running) < self._most and not self._stopped:
                self.running.append(self._pool.submit(self._run))

    def stop(self) -> None:
        with self._lock:
            self._stopped = True

    def _run(self) -> None:
        """Reads part after part until none is left or another thread has failed."""
        try:
            read = self._begin()
            while (part := self._take()) is not None:
                began_s, busy_s = time.perf_counter(), _busy_s()
                read(part)
                took_s, busy_s = time.perf_counter() - began_s, _busy_s() - busy_s
                if took_s - busy_s > _WAITING * took_s:
                    self.start_thread()
        except BaseException:
            self.stop()
            raise

    def _take(self) -> P | None:
        with self._lock:
            return None if self._stopped else next(self._parts, None)
