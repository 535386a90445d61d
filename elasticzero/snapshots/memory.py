"""Checks and reserves the shared memory for a node's snapshots."""

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
from elasticzero.memory_estimate import node_snapshot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Holds the sizes of one capture, in bytes."""

    shard: int
    """Size of one rank's shard."""
    whole: int = 0
    """Size of the complete state if the node has all of it; else 0."""


def memory_shortage(
    assignment: Assignment, sizes: Sizes, *, captures: bool, replicas: bool
) -> MemoryShort | None:
    """Compares shared memory with what this node's snapshots need.

    Args:
        assignment: This rank's place and settings.
        sizes: The sizes of one capture.
        captures: Whether captures are taken during training.
        replicas: Whether the node keeps replicas of other nodes' shards.

    Returns:
        The message for the agent if memory is too small; None: it is large enough, or its size
        cannot be read.
    """
    needed = node_snapshot_bytes(
        sizes.shard,
        sizes.whole,
        workers=assignment.local_world_size,
        captures=captures,
        replicas=replicas,
        mirrors=bool(assignment.mirrors),
    )
    root = Path(assignment.snapshot_root)
    with suppress(OSError):
        free = free_bytes(root) + allocated_bytes(root)
        if needed > free:
            return MemoryShort(needed_bytes=needed, free_bytes=free)
    return None


class Reservation:
    """Reserves memory for captures in a thread, which allocates and maps it while training goes
    on."""

    def __init__(
        self,
        writer: SharedMemoryStager,
        warn: Callable[[str], None],
        earlier: Reservation | None = None,
    ) -> None:
        """Reserves nothing yet.

        Args:
            writer: Reserves the memory.
            warn: Is called by the thread with a message if there is none.
            earlier: A reservation of the same writer, which may still run.
        """
        self._writer = writer
        self._warn = warn
        self._earlier = earlier
        self._thread: threading.Thread | None = None
        self.done = False
        """True once the memory is reserved."""

    @property
    def begun(self) -> bool:
        return self._thread is not None

    def begin(self, size: int) -> None:
        """Begins to reserve memory for captures of `size` bytes each."""

        def reserve() -> None:
            try:
                self._wait_for_earlier()
                self._writer.reserve(size)
                self.done = True
            except ElasticZeroError as error:
                self._warn(
                    f"no snapshots are taken, and training waits for saves: {one_line(error)}"
                )

        self._thread = threading.Thread(target=reserve, name="elasticzero-reserve", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits for the thread if it runs, and for that of an earlier reservation."""
        if self._thread is not None:
            self._thread.join()
        else:
            self._wait_for_earlier()

    def _wait_for_earlier(self) -> None:
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            earlier.wait()
