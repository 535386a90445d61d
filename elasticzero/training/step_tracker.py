"""Holds the state of the step that a rank works on, for all of its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from elasticzero.training.step_machine import StepEvent, StepState


class StepTracker:
    """Holds the present `StepState`, and moves it.

    A loop that the script left open is closed by Python's garbage collector, in any thread and
    perhaps amid another move of that thread: a move that another came between is made anew, from
    the state that the other left. Any thread may read the state.
    """

    def __init__(self) -> None:
        self.now = StepState()
        self._lock = threading.RLock()

    def move(self, change: Callable[[StepState], StepState]) -> StepState:
        """Makes what `change` returns of the present state the present one, and returns it.

        Args:
            change: Must be pure, because it may be called several times.
        """
        while True:
            before = self.now
            after = change(before)
            with self._lock:
                if self.now is before:
                    self.now = after
                    return after

    def note_optimizers(self, *, named: bool) -> None:
        """Notes whether a backward of this generation was for some of the script's optimizers, on
        another rank, before this one came into it."""
        self.move(lambda state: replace(state, names_optimizers=named))

    def record(self, event: StepEvent) -> None:
        """Moves the state by an event without arguments."""
        self.move(lambda state: state.after(event))
