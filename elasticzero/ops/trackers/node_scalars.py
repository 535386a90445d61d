"""Keeps what the workers of one node have logged, until the leading agent has fetched it.

A step's values are kept open while a worker of the node may still log for it, and are joined to one
entry then: sums and counts, from which the leader makes the mean over all nodes. Entries have
serial numbers, so that a leader asks for those after the last one that it has, and a new leader for
all. The agent's loop writes, threads of its server read.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from elasticzero.ipc.messages import Finished, Logged, Message, Stepped
from elasticzero.launcher.workers.group import Ended

MOST_ENTRIES = 4096
"""Maximum number of steps that are kept; a leader that asks every few seconds needs far fewer."""
MOST_BYTES = 1 << 20
"""Bytes of an answer beyond which the rest waits for the next question."""


@dataclass(slots=True)
class StepEntry:
    """Holds the values of one step of one generation."""

    generation: int
    step: int
    at: float
    """Unix time of the last value."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """Sum and number of the values of each name."""


class NodeScalars:
    """Collects what workers log, by step."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._generation = 0
        self._open: dict[int, StepEntry] = {}
        """Entries by step, to which workers may add."""
        self._steps: dict[int, int] = {}
        """Newest step of each worker that runs, by rank."""
        self._closed: deque[StepEntry] = deque(maxlen=MOST_ENTRIES)
        self._serial = 0
        """Number of entries that were ever closed; the last one has this serial number."""
        self.asked_s: float | None = None
        """Time at which a leader asked last (monotonic clock); None: none has."""
        self.drained = threading.Event()
        """Set once all workers have ended and a leader has received all that they logged."""

    def begin(self, generation: int, step: int, ranks: Iterable[int]) -> None:
        """Notes that the workers of a generation start.

        Args:
            generation: number of the generation.
            step: step of the state that they start from.
            ranks: ranks of this node's workers.
        """
        with self._lock:
            self._close_through(None)
            self._generation = generation
            self._steps = dict.fromkeys(ranks, step)
            self.drained.clear()

    def received(self, rank: int, message: Message | Ended) -> None:
        """Notes a message of a worker of the present generation, or its end."""
        with self._lock:
            match message:
                case Logged(step=step, scalars=scalars):
                    entry = self._open.setdefault(step, StepEntry(self._generation, step, 0.0))
                    entry.at = self._clock()
                    for name, value in scalars.items():
                        held = entry.values.setdefault(name, [0.0, 0])
                        held[0] += value
                        held[1] += 1
                    return
                case Stepped(step=step):
                    if rank in self._steps:
                        self._steps[rank] = step
                case Finished() | Ended():
                    self._steps.pop(rank, None)
                case _:
                    return
            self._close_through(self._through())

    def since(self, serial: int) -> dict[str, Any]:
        """Returns the entries after that of a serial number, and to which step they are complete.

        `through` is the last step for which no worker of this node will log any more; None: none
        will log at all. `more` says that the answer does not hold all entries.
        """
        with self._lock:
            oldest = self._serial - len(self._closed)
            begin = max(serial, oldest) if serial <= self._serial else oldest
            rows: list[list[Any]] = []
            size = 0
            for entry in list(self._closed)[begin - oldest :]:
                row = [entry.generation, entry.step, entry.at, entry.values]
                size += len(json.dumps(row))
                if rows and size > MOST_BYTES:
                    break
                rows.append(row)
            has_more = begin + len(rows) < self._serial
            through = self._through()
            return {
                "generation": self._generation,
                "through": through,
                "serial": begin + len(rows),
                "left_out": begin - serial if serial <= begin else 0,
                "more": has_more,
                "rows": rows,
            }

    def answer(self, serial: int) -> dict[str, Any]:
        """Returns `since` to the leading agent, and notes that it has asked."""
        answer = self.since(serial)
        self.asked_s = time.monotonic()
        if answer["through"] is None and not answer["more"]:
            self.drained.set()
        return answer

    def _through(self) -> int | None:
        """Returns the last step for which no worker will log any more; None: none logs at all."""
        return min(self._steps.values()) - 1 if self._steps else None

    def _close_through(self, step: int | None) -> None:
        """Closes the entries up to a step; None: all."""
        for entry_step in sorted(s for s in self._open if step is None or s <= step):
            self._closed.append(self._open.pop(entry_step))
            self._serial += 1
