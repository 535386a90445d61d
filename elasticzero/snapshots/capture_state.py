"""Holds what one rank has captured, and decides what it captures next. Pure.

`schedule` has what is equal on all ranks; here is also what differs between them: which captures
failed on this rank, and what its agent was asked to save.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from elasticzero.comm.control import ControlWord
from elasticzero.ipc.assignment import Assignment
from elasticzero.snapshots.schedule import CaptureSchedule, Due

NewestSave = Literal["none", "pending", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCaptures:
    """Holds what this node's agent has reported of steps; -1: none."""

    held: int
    """Newest step whose snapshot is held, with the replica that the node keeps."""
    not_held: int
    """Newest step whose snapshot could not be held."""
    saved: int
    """Newest step whose save has ended, with or without a checkpoint."""
    unsaved: int
    """Newest step whose save has ended without a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureState:
    """Holds the captures of a generation on one rank."""

    schedule: CaptureSchedule
    takes_snapshots: bool
    """True if the strategy has use for snapshots, and they are not switched off."""
    saves: bool
    """True if checkpoints are written."""
    replicated: bool
    """True if this rank or node holds the whole state."""
    saved_step: int | None = None
    """Newest step that was captured to be saved, or was read from storage."""
    submitted: int | None = None
    """Newest step that the agent was asked to save."""
    overdue: int | None = None
    """A step at which a checkpoint was due while another was being saved."""
    not_held: int = -1
    """Newest step of which this rank could make no snapshot."""
    unsaved: int = -1
    """Newest step of which this rank could make no checkpoint."""
    agreed: bool = False
    """True once all ranks leave at this boundary, each with its state."""

    @classmethod
    def of(cls, assignment: Assignment, *, shards: int, saving: bool, alone: bool) -> CaptureState:
        """Returns the state before the generation has loaded the one that it starts from.

        Args:
            assignment: That of this rank.
            shards: Number of ranks that hold the whole state together.
            saving: Whether checkpoints are written.
            alone: Whether there is no agent, which would hold snapshots.
        """
        useful = (
            shards == assignment.world_size
            or assignment.rolls_back
            or assignment.diloco is not None  # for an island that comes
        ) and not alone
        return cls(
            schedule=CaptureSchedule(start=0),
            takes_snapshots=useful and assignment.snapshot_every != 0,
            saves=saving and assignment.checkpoint_dir is not None,
            replicated=shards == 1 or shards < assignment.world_size,
        )

    def begun(self, step: int, assignment: Assignment) -> CaptureState:
        """Returns the state once the generation has loaded the state of this step."""
        schedule = CaptureSchedule.begun(step, assignment.snapshot_every or 0, assignment.resume)
        stored = assignment.resume.tier == "storage"
        return replace(self, schedule=schedule, saved_step=step if stored else self.saved_step)

    def entered(self, step: int, assignment: Assignment, *, shards: int) -> CaptureState:
        """Returns the state once another world was entered at a boundary, where no save runs.

        Args:
            step: The boundary's step.
            assignment: That of this rank in the world.
            shards: Number of ranks that hold the whole state together.
        """
        fresh = CaptureState.of(assignment, shards=shards, saving=self.saves, alone=False)
        return replace(
            fresh,
            schedule=self.schedule.entered(step, assignment.resume.generation),
            saved_step=self.saved_step,
            overdue=self.overdue,
            unsaved=self.unsaved,
        )

    @property
    def captures(self) -> bool:
        """Returns whether anything is ever captured."""
        return self.takes_snapshots or self.saves

    @property
    def held_step(self) -> int | None:
        """Returns the newest step of this generation that every node holds, or else the one that is
        gone back to; None: no snapshots are taken, or a node that is left holds the whole
        state."""
        if not self.takes_snapshots or self.replicated:
            return None
        return self.schedule.held_step

    def control_word(
        self, node: NodeCaptures, *, flags: int, ready: bool, every: int, asks: bool
    ) -> ControlWord:
        """Returns this rank's word at a boundary.

        Args:
            node: What this node's agent has reported.
            flags: What this rank asks of all.
            ready: Whether the memory for captures is there.
            every: The interval of snapshots that this rank proposes; 0: none.
            asks: Whether its script asked for a checkpoint.
        """
        before = self.schedule.start - 1
        return ControlWord(
            flags=flags,
            ready=ready,
            held=max(node.held, before),
            saved=max(node.saved, self.unsaved, before),
            not_held=max(node.not_held, self.not_held),
            unsaved=max(node.unsaved, self.unsaved),
            every=every,
            asks=asks,
        )

    def after_exchange(self, word: ControlWord) -> CaptureState:
        """Returns the state after the ranks have exchanged this word."""
        return replace(self, schedule=self.schedule.after_exchange(word))

    def lost_elsewhere(self, word: ControlWord, node: NodeCaptures) -> int | None:
        """Returns the step that is being saved, if that has failed on another rank alone; None: it
        has not."""
        saving = self.schedule.saving
        failed = saving is not None and word.unsaved >= saving > max(node.unsaved, self.unsaved)
        return saving if failed else None

    def owing(self, step: int) -> CaptureState:
        """Returns the state at a boundary where a checkpoint falls due."""
        return replace(self, overdue=step) if self.is_unsaved(step) else self

    def due(self, step: int) -> Due:
        """Returns the capture that is due at the boundary of `step`."""
        owed = self.overdue is not None
        return self.schedule.due(step, checkpoint=owed, snapshots=self.takes_snapshots)

    def captured(self, step: int, *, checkpoint: bool, in_memory: bool) -> CaptureState:
        """Returns the state once a step was captured.

        Args:
            step: The step.
            checkpoint: Whether it was captured to be saved.
            in_memory: Whether it lies in shared memory; else it lies on storage.
        """
        state = replace(self, schedule=self.schedule.captured(step, checkpoint=checkpoint))
        if not in_memory:
            state = replace(state, not_held=step)
        return replace(state, saved_step=step, submitted=step) if checkpoint else state

    def failed(self, step: int, *, checkpoint: bool) -> CaptureState:
        """Returns the state once this rank could not make a capture that is due; its next word says
        so."""
        schedule = self.schedule.captured(step, checkpoint=checkpoint)
        state = replace(self, schedule=schedule, not_held=step)
        return replace(state, unsaved=step, saved_step=step) if checkpoint else state

    def save_ended(self) -> CaptureState:
        """Returns the state once no save runs any more on any rank."""
        return replace(self, schedule=replace(self.schedule, saving=None))

    def has_captured(self, step: int) -> bool:
        """Returns whether the state of a step was captured to be saved, or read from storage."""
        return self.saved_step is not None and step <= self.saved_step

    def is_unsaved(self, step: int) -> bool:
        """Returns whether the state of a step is to be saved, and is not."""
        return self.saves and not self.has_captured(step)

    def newest_save(self, node: NodeCaptures) -> NewestSave:
        """Returns what has become of this rank's newest save: ended or none, running, or failed."""
        if self.saved_step is not None and self.saved_step in (self.unsaved, node.unsaved):
            return "lost"
        pending = self.submitted is not None and node.saved < self.submitted
        return "pending" if pending else "none"

    @property
    def can_stop(self) -> bool:
        """Returns whether memory is free for the state as it is now.

        After peers were lost, a divided state does not replace a snapshot in flight.
        """
        return self.agreed or self.replicated or not self.schedule.copying

    def states_to_keep(self, assignment: Assignment, *, at_stop: bool) -> set[tuple[int, int]]:
        """Returns the (generation, step) of the snapshots that a capture must leave.

        Args:
            assignment: That of this rank.
            at_stop: Whether it is the capture of the stop protocol, which without an agreement of
                all ranks leaves the newest capture too.
        """
        keep = self.schedule.states_to_keep(assignment.generation)
        if at_stop and not self.agreed and self.schedule.taken is not None:
            keep = {*keep, (assignment.generation, self.schedule.taken)}
        return keep
