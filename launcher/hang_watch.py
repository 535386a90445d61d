"""Follows the progress of a node's workers: since when each has made no step, and a look at those
that are past their time.

What too long means is decided elsewhere (`hangs`); here is counted and looked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticzero.launcher.hangs import blame, due_s
from elasticzero.launcher.stall_look import StallLook, Subject, find_py_spy, process_state
from elasticzero.launcher.world import Failure
from elasticzero.messages import (
    Attached,
    Busy,
    Failed,
    Finished,
    Located,
    Looped,
    Message,
    Restored,
    Stepped,
    Stopping,
)

STEPS_REMEMBERED = 20
"""The longest of so many says how long a step may take."""
FROZEN_EVERY_S = 1.0
"""So often is looked for workers that a signal has stopped."""


@dataclass(slots=True)
class Pace:
    """How one worker gets on."""

    rank: int
    pid: int
    log: Path
    ask: Callable[[], None]
    """Have it asked where it is."""
    expected: bool = False
    """It is to train: it obeys requests, and has not said that it is at an end."""
    step: int = 0
    """The last one it finished."""
    progress_s: float = 0.0
    """When it last said something that shows progress."""
    in_loop: bool = False
    """It has made a step, and is in the loop over batches."""
    busy: bool = False
    frozen_since_s: float | None = None
    """Since when it is seen stopped by a signal."""


@dataclass(slots=True)
class HangWatch:
    """The progress of the workers of one node in one generation."""

    guilty: set[int] = field(default_factory=set)
    """Ranks that a look found to blame for a hang."""
    deaf: set[int] = field(default_factory=set)
    """Ranks that could not obey, as a look has found."""
    _paces: dict[int, Pace] = field(default_factory=dict)
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))
    _look: StallLook | None = None
    _judged: bool = False
    _stalled: Failure | None = None
    _frozen_looked_s: float = 0.0

    def add(self, pace: Pace) -> None:
        self._paces[pace.rank] = pace

    @property
    def looking(self) -> bool:
        """A look is under way."""
        return self._look is not None and not self._judged

    def seen(self, now_s: float) -> dict[str, Any]:
        """The fields of `Workers` that tell of progress."""
        paces = [pace for pace in self._paces.values() if pace.expected]
        due = [pace for pace in paces if not pace.busy]
        silent = [now_s - pace.progress_s for pace in due if pace.in_loop]
        before = [now_s - pace.progress_s for pace in due if not pace.in_loop]
        frozen = [now_s - p.frozen_since_s for p in paces if p.frozen_since_s is not None]
        look = "none" if self._look is None else "over" if self._judged else "open"
        return {
            "silent_s": max(silent, default=0.0),
            "before_step_s": max(before, default=0.0),
            "frozen_s": max(frozen, default=0.0),
            "longest_step_s": max(self._steps_s, default=0.0),
            "look": look,
            "stalled": self._stalled,
        }

    def note(self, rank: int, message: Message, now_s: float) -> None:
        """Take in what a worker said."""
        pace = self._paces[rank]
        match message:
            case Located():
                if self._look is not None:
                    self._look.located(rank, message)
                return
            case Stepped():
                self._steps_s.append(now_s - pace.progress_s)
                pace.step, pace.in_loop = message.step, True
            case Looped():
                pace.in_loop = False
            case Busy():
                pace.busy = message.doing is not None
            case Attached():
                pace.expected = True
            case Finished() | Stopping() | Failed():
                pace.expected = False
            case Restored():
                pass
            case _:
                return
        self._moved(pace, now_s)

    def gone(self, rank: int, now_s: float) -> None:
        """Its process has ended."""
        pace = self._paces[rank]
        pace.expected, pace.frozen_since_s = False, None
        self._moved(pace, now_s)

    def _moved(self, pace: Pace, now_s: float) -> None:
        """It shows progress, or is at an end: what a look found is so no more."""
        pace.progress_s = now_s
        if self._look is not None:
            self._look.moved(pace.rank)
            if self._judged:
                self._look, self._stalled = None, None

    def look_into(self, limit_s: float | None, now_s: float) -> None:
        """Find out where those are that make no step, and have their stacks dumped.

        limit_s: seconds without a step that are too many in the loop; None: none are.
        """
        subjects = [
            Subject(
                rank=pace.rank,
                pid=pace.pid,
                log=pace.log,
                step=pace.step,
                silent_since_s=pace.progress_s,
                due_s=due_s(limit_s, in_loop=pace.in_loop),
                ask=pace.ask,
            )
            for pace in self._paces.values()
            if pace.expected and (not pace.busy or pace.frozen_since_s is not None)
        ]
        self._look, self._judged = StallLook(subjects, now_s, py_spy=find_py_spy()), False

    def poll(self, now_s: float) -> list[Failure]:
        """Go on with a look; what it found about each worker, when it is over. Now and then see
        which workers a signal has stopped."""
        if now_s - self._frozen_looked_s >= FROZEN_EVERY_S:
            self._frozen_looked_s = now_s
            for pace in self._paces.values():
                frozen = pace.expected and process_state(pace.pid) == "T"
                since_s = now_s if pace.frozen_since_s is None else pace.frozen_since_s
                pace.frozen_since_s = since_s if frozen else None
        if self._look is None or self._judged or not self._look.poll(now_s):
            return []
        self._judged = True
        silences = self._look.findings(now_s)
        found = [blame(silence) for silence in silences]
        self.deaf |= {silence.rank for silence in silences if silence.deaf}
        self.guilty |= {failure.rank for failure in found if failure.blame == "hung"}
        all_wait = len(found) == sum(pace.expected for pace in self._paces.values())
        self._stalled = found[0] if found and all_wait and not self.guilty else None
        return found

    def close(self) -> None:
        """Leave no program running."""
        if self._look is not None:
            self._look.close()
