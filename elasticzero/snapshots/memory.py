"""Shared memory for a node's snapshots: whether there is enough of it, and its reservation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elasticzero.checkpoint.ram.slots import allocated_bytes, free_bytes
from elasticzero.checkpoint.ram.staging import SharedMemoryStager
from elasticzero.errors import ElasticZeroError, one_line
from elasticzero.ipc.assignment import Assignment
from elasticzero.ipc.messages import MemoryShort


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What one capture takes, in bytes."""

    shard: int
    """Of one rank."""
    whole: int = 0
    """Of all state in one, where each rank has all of it; else 0."""


def node_bytes(sizes: Sizes, *, workers: int, captures: bool, replicas: bool) -> int:
    """Memory that a node of so many workers needs for its snapshots: two slots a rank where there
    are captures while it trains, two for each replica, and what a stop leaves."""
    while_training = 2 * sizes.shard * workers * (captures + replicas)
    return while_training + (sizes.whole or sizes.shard * workers)


def memory_shortage(
    assignment: Assignment, sizes: Sizes, *, captures: bool, replicas: bool
) -> MemoryShort | None:
    """What to tell the agent where shared memory is too small for its node's snapshots; None: it is
    large enough, or its size cannot be read."""
    needed = node_bytes(
        sizes, workers=assignment.local_world_size, captures=captures, replicas=replicas
    )
    root = Path(assignment.snapshot_root)
    with suppress(OSError):
        free = free_bytes(root) + allocated_bytes(root)
        if needed > free:
            return MemoryShort(needed_bytes=needed, free_bytes=free)
    return None


class Reservation:
    """Memory for captures, which a thread allocates and maps while training goes on."""

    def __init__(self, writer: SharedMemoryStager, say: Callable[[str], None]) -> None:
        """say: tells people, from the thread, that there is no memory."""
        self._writer = writer
        self._say = say
        self._thread: threading.Thread | None = None
        self.done = False
        """The memory is there."""

    @property
    def begun(self) -> bool:
        return self._thread is not None

    def begin(self, size: int) -> None:
        """Reserve memory for captures of so many bytes each."""

        def reserve() -> None:
            try:
                self._writer.reserve(size)
                self.done = True
            except ElasticZeroError as error:
                self._say(
                    f"no snapshots are taken, and training waits for saves: {one_line(error)}"
                )

        self._thread = threading.Thread(target=reserve, name="elasticzero-reserve", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the thread, where there is one."""
        if self._thread is not None:
            self._thread.join()
