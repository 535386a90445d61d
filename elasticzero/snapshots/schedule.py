"""Decides when the state is captured: for the RAM tier, or to become a checkpoint. Pure.

All ranks decide alike, from the step and from control words that are equal on all of them.

Rules, at each boundary:
 P1  One capture is in flight at a time: until every node holds its part of it (and of its buddy's),
     and, if it is to become a checkpoint, until that checkpoint is committed.
 P2  A checkpoint falls due at every multiple of `checkpoint_every`, and at the end. One that falls
     due while another is being saved is taken at the first boundary at which the other is known to
     be over; of several such the last counts. Training waits for a save only at its end. A snapshot
     in flight gives way to a checkpoint.
 P3  A snapshot falls due `snapshot_every` steps after the capture before it, and at once in a new
     generation. While a capture is in flight no snapshot is taken; the next boundary decides anew.
 P4  A capture that some node could not hold is abandoned: what was held before stays.
 P5  A checkpoint that a script asks for is captured whatever else is due (`requests`, rules J).
Invariant: the newest snapshot that every node holds is never overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from elasticzero.comm.control import ControlWord
from elasticzero.ipc.assignment import Resume

Due = Literal["nothing", "snapshot", "checkpoint"]
State = tuple[int, int]
"""Names the state of a generation at a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSchedule:
    """Records the captures of a generation; equal on all ranks."""

    start: int
    """The step the generation started from."""
    every: int = 0
    """Number of steps from one snapshot to the next; 0: none are taken."""
    taken: int | None = None
    """Newest captured step; None: none in this generation."""
    held: int | None = None
    """Newest step that every node holds; None: none of this generation."""
    saving: int | None = None
    """The step that is being saved; None: no save runs."""
    ready: bool = False
    """True once every rank has its memory."""
    before: State | None = None
    """The newest snapshot that every node held when the generation began; None: there was none."""
    back: int | None = None
    """The step of that state, or of the one that the generations before this one have begun with,
    where this one has begun without a stop; None: it has begun from a state at `start`."""

    @classmethod
    def begun(cls, step: int, every: int, resume: Resume) -> CaptureSchedule:
        """Returns the schedule of a generation that has loaded the state that it starts from.

        Args:
            step: The step of that state.
            every: Number of steps from one snapshot to the next; 0: none are taken.
            resume: Where that state was.
        """
        before = (resume.generation, resume.step) if resume.tier == "ram" else None
        return cls(start=step, every=every, before=before)

    def entered(self, step: int, generation: int) -> CaptureSchedule:
        """Returns the schedule of the generation that follows this one without a stop.

        Args:
            step: The boundary at which it was entered.
            generation: The generation of this schedule.
        """
        before = self.before if self.held is None else (generation, self.held)
        return CaptureSchedule(start=step, every=self.every, before=before, back=self.held_step)

    @property
    def held_step(self) -> int:
        """Returns the newest step that every node holds, or else the one that is gone back to."""
        if self.held is not None:
            return self.held
        return self.start if self.back is None else self.back

    @property
    def copying(self) -> bool:
        """Returns whether a snapshot is in flight."""
        return self.taken is not None and self.taken != self.held

    def after_exchange(self, word: ControlWord) -> CaptureSchedule:
        """Returns the schedule after the ranks have exchanged this word."""
        schedule = replace(self, ready=self.ready or word.ready, every=word.every or self.every)
        if schedule.taken is not None and word.held >= schedule.taken:
            schedule = replace(schedule, held=schedule.taken)
        elif schedule.copying and schedule.taken is not None and word.not_held >= schedule.taken:
            schedule = replace(schedule, taken=schedule.held)
        if schedule.saving is not None and word.saved >= schedule.saving:
            schedule = replace(schedule, saving=None)
        return schedule

    def due(self, step: int, *, checkpoint: bool, snapshots: bool) -> Due:
        """Returns the capture at the boundary of `step`.

        Args:
            step: The boundary's step.
            checkpoint: Whether a checkpoint is due.
            snapshots: Whether the strategy has use for snapshots.
        """
        if checkpoint:
            return "checkpoint" if self.saving is None else "nothing"
        if not snapshots or not self.ready or self.copying or self.saving is not None:
            return "nothing"
        if self.taken is None:
            return "snapshot"
        return "snapshot" if 0 < self.every <= step - self.taken else "nothing"

    def states_to_keep(self, generation: int) -> set[State]:
        """Returns the snapshots that a capture must leave: the newest one that every node holds,
        and the one that is being saved.

        Args:
            generation: The generation of this schedule.
        """
        keep = {(generation, self.saving)} if self.saving is not None else set()
        if self.held is not None:
            return keep | {(generation, self.held)}
        return keep if self.before is None else keep | {self.before}

    def captured(self, step: int, *, checkpoint: bool) -> CaptureSchedule:
        return replace(self, taken=step, saving=step if checkpoint else self.saving)
