"""Has what a node needs for its island's part in the rounds, be it the island's head or not."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elasticzero.ipc.rounds import IslandAt, JoinRounds, RoundNews, SamplesLeft
from elasticzero.launcher.protocol.rounds.documents import Outer

RETRY_S = 0.5
"""Seconds after which a transfer that has failed is tried again."""
QUIET_S = 10.0
"""Seconds for which no line about a failed transfer follows another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOutlets:
    """Holds what is called on every node."""

    tell: Callable[[RoundNews], None]
    """Sends news to this node's workers."""
    wake: Callable[[], None]
    """Wakes the agent's loop; called from other threads."""
    log_line: Callable[[str], None]
    """Receives lines for people."""
    count_bytes: Callable[[int], None]
    """Counts bytes that were fetched from another node; called in another thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtHand:
    """Holds what a node knows of rounds that its island takes part in, with the files at hand."""

    outers: Sequence[Outer]
    """The newest outer state of each fragment that its workers were told of."""
    left: SamplesLeft
    """Samples with which rounds would go on that begin with these."""


class NodeWorkers:
    """Puts together what the workers of a node say: all of them say the same, one after the
    other."""

    def __init__(self, count: int) -> None:
        """Begins before a worker has said anything.

        Args:
            count: Number of the node's workers.
        """
        self._count = count
        self._joined: set[int] = set()
        self._at: dict[int, deque[IslandAt]] = {}
        """Messages of each worker that others have not sent yet."""

    @property
    def are_there(self) -> bool:
        """Returns whether all workers of the present generation have their state."""
        return len(self._joined) == self._count

    def begin_anew(self) -> None:
        """Forgets what workers of the generation before have said."""
        self._joined, self._at = set(), {}

    def take(self, rank: int, message: object) -> JoinRounds | IslandAt | None:
        """Takes in a message, and returns it once all workers have sent it; None: not all have, or
        it is not of the rounds.

        Args:
            rank: Local rank of the worker.
            message: The message.
        """
        if isinstance(message, JoinRounds):
            self._joined.add(rank)
            return message if self.are_there else None
        if not isinstance(message, IslandAt):
            return None
        self._at.setdefault(rank, deque()).append(message)
        if len(self._at) < self._count or not all(self._at.values()):
            return None
        first, *_ = [waiting.popleft() for waiting in self._at.values()]
        return first


class RareLine:
    """Logs lines of one kind, but not every time."""

    def __init__(self, log_line: Callable[[str], None]) -> None:
        """Begins with a line that is logged at once.

        Args:
            log_line: Receives the lines.
        """
        self._log_line, self._until_s = log_line, 0.0

    def log(self, text: str) -> None:
        """Logs a line, unless one was logged a moment ago."""
        if (now_s := time.monotonic()) >= self._until_s:
            self._until_s = now_s + QUIET_S
            self._log_line(text)
