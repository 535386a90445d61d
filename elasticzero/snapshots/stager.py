"""Stages a worker's state: it captures the state into shared memory when due, and has it saved.

Training waits only while its state is copied into shared memory that the agent owns, or into an
image on its GPU; a thread and the agent do the rest. `capture_state` decides when to capture, from
control words that are equal on all ranks, and `capture_writer` writes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.io.writer import TensorPiece
from elasticzero.checkpoint.ram.slots import SlotsInUse
from elasticzero.comm.control import ControlWord
from elasticzero.comm.worlds.entering import KnownCaptures
from elasticzero.errors import ElasticZeroError, LastSaveFailed, NotFinite, StorageError, one_line
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.assignment import Assignment
from elasticzero.ipc.messages import AbandonSave, Captured, SnapshotInterval
from elasticzero.snapshots.capture_state import CaptureState, NewestSave, NodeCaptures
from elasticzero.snapshots.capture_writer import CaptureWriter, Drafted
from elasticzero.snapshots.copy_beside import CopyBeside
from elasticzero.snapshots.direct_save import JOIN_S, newest_good_checkpoint
from elasticzero.snapshots.interval import IntervalTuner
from elasticzero.snapshots.memory import memory_shortage
from elasticzero.snapshots.schedule import Due
from elasticzero.state.auxiliary import BoundaryCopy
from elasticzero.state.model import RankState

log = logging.getLogger(__name__)

_POLL_S = 0.002
_SETTLE_S = 1.0
"""Seconds for which a worker that ends waits for a copy under way."""
_SLOT_WAIT_S = 10.0
"""Seconds for which a checkpoint waits for a slot whose snapshot it replaces, while the agent still
reads that: until it is sealed, or saved."""
_TRY_AGAIN_S, _MOST_TRY_AGAIN_S = 0.5, 30.0
"""Pause in seconds before the second try of the last save, and the longest pause."""

Save = Callable[[Manifest, list[TensorPiece]], None]
"""Writes a checkpoint at once, without an agent; raises `ElasticZeroError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """Says where a capture lies."""

    size: int = 0
    """Number of its bytes in shared memory."""
    manifest: str = ""
    """This rank's own manifest of a shard on storage; empty: it lies in shared memory."""
    finish: Callable[[], None] | None = None
    """Finishes it while training goes on; None: all of it lies there."""

    @property
    def direct(self) -> bool:
        """Returns whether it lies on storage."""
        return bool(self.manifest)


class StateStager:
    """Takes the snapshots and checkpoints of one generation on one rank."""

    def __init__(
        self,
        link: AgentClient,
        strategy: str,
        share: Callable[[], RankState],
        *,
        shards: int,
        saving: bool,
        save: Save | None = None,
    ) -> None:
        """Begins before the state is loaded.

        Args:
            link: The client of the agent.
            strategy: The strategy's name.
            share: Returns this rank's parameters and optimizer state.
            shards: Number of ranks that hold the whole state together.
            saving: Whether checkpoints are written.
            save: Writes a checkpoint without an agent; None: an agent has it saved.
        """
        self.strategy = strategy
        self._link = link
        self._save = save
        self._state = CaptureState.of(
            link.assignment, shards=shards, saving=saving, alone=link.standalone
        )
        self._writer = CaptureWriter(link, strategy, share, shards, self._warn)
        self._memory_checked = link.standalone or link.assignment.local_rank > 0
        """True once the size of shared memory was checked in this world, or found to be too small,
        or if another rank checks it."""
        self._is_short = False
        """Shared memory was found to be too small."""
        self._for_others: tuple[int, int] | None = None
        """The state that was captured last for ranks that came in."""
        self._save_error = ""
        self._late = 0
        """Number of checkpoints that came late, or not at all."""
        self._tuner = IntervalTuner()
        self._beside = CopyBeside()
        self._captured_s = 0.0
        """Time on the monotonic clock at which the last capture was begun."""

    @property
    def _assignment(self) -> Assignment:
        return self._link.assignment

    @property
    def saves(self) -> bool:
        """Returns whether checkpoints are written."""
        return self._state.saves

    @property
    def replicated(self) -> bool:
        """Returns whether this rank or node holds the whole state."""
        return self._state.replicated

    @property
    def held_step(self) -> int | None:
        """Returns the newest step that is gone back to where a node is lost, as far as snapshots
        decide it; None: they do not."""
        return self._state.held_step

    def known_alike(self) -> KnownCaptures:
        """Returns what a rank that comes into this world must know of its captures."""
        schedule = self._state.schedule
        return KnownCaptures(every=schedule.every, back=schedule.held_step)

    # Memory.

    def begin(self, copy: BoundaryCopy, others: KnownCaptures | None = None) -> None:
        """Begins with the state of `copy`, and reserves memory for its captures meanwhile.

        Args:
            copy: The small state.
            others: What the others know of captures, whose boundary it is; None: all begin.
        """
        self._state = self._state.begun(copy.step, self._assignment)
        if others is not None:
            schedule = replace(self._state.schedule, every=others.every, back=others.back)
            self._state = replace(self._state, schedule=schedule)
        if self._assignment.resume.tier != "fresh":  # an optimizer has no state before a step
            self._reserve(copy)

    def _reserve(self, copy: BoundaryCopy) -> None:
        self._beside.join()  # a slot that is being filled looks free
        if not self._memory_checked:
            self._memory_checked = True
            self._check_memory(copy)
        if self._save is None and self._state.captures:
            self._writer.reserve(copy)

    def _check_memory(self, copy: BoundaryCopy) -> None:
        """Reports to the agent if shared memory is too small for this node's snapshots."""
        a, state = self._assignment, self._state
        short = memory_shortage(
            a,
            self._writer.sizes(copy, whole=state.replicated),
            captures=state.captures,
            replicas=state.takes_snapshots and a.world_size > a.local_world_size,
        )
        if short is not None:
            self._is_short = True
            self._link.send(short)

    def enter_world(self, step: int, shards: int) -> None:
        """Goes on in another world.

        Args:
            step: The boundary at which it was entered.
            shards: Number of its ranks that hold the whole state together.
        """
        self._beside.wait()
        self._state = self._state.entered(step, self._assignment, shards=shards)
        self._writer.enter_world(shards)
        self._memory_checked = self._is_short or self._assignment.local_rank > 0

    def close(self) -> None:
        """Releases this process's mappings of the memory of captures; the snapshots stay."""
        self._beside.join()
        self._writer.close()

    # What is due.

    def stepped(self, seconds: float) -> None:
        """Records the time of a step."""
        schedule = self._state.schedule
        if schedule.saving is None and schedule.copying == self._tuner.measuring:
            self._tuner.stepped(seconds)  # no checkpoint is being saved at the same time

    def control_word(self, flags: int, *, asks: bool = False) -> ControlWord:
        """Returns this rank's word at this boundary.

        Args:
            flags: What this rank asks of all.
            asks: Whether its script asked for a checkpoint.
        """
        self._beside.check()
        a = self._assignment
        chooses = self._state.takes_snapshots and a.rank == 0 and a.snapshot_every is None
        lost_every_s = (time.time() - a.running_since) / a.returns if a.returns else math.inf
        every = self._tuner.proposed_interval(max(1.0, lost_every_s)) if chooses else 0
        return self._state.control_word(
            self._node(), flags=flags, ready=self._writer.ready, every=every, asks=asks
        )

    def _node(self) -> NodeCaptures:
        link = self._link
        return NodeCaptures(
            held=link.held, not_held=link.not_held, saved=link.saved, unsaved=link.unsaved
        )

    def after_exchange(self, word: ControlWord) -> None:
        """Updates what is due with a word that all ranks have exchanged."""
        before, self._state = self._state, self._state.after_exchange(word)
        schedule, cost = self._state.schedule, self._tuner
        if not schedule.copying:
            held_s = self._link.held_s - self._captured_s
            cost.snapshot_done(held_s if held_s > 0.0 else None)
        if before.schedule.every != schedule.every and self._assignment.rank == 0:
            self._link.send(
                SnapshotInterval(every=schedule.every, cost_s=cost.cost_s, step_s=cost.step_s)
            )
        if (step := before.lost_elsewhere(word, self._node())) is not None:
            self._abandon(step)

    def due(self, copy: BoundaryCopy, *, checkpoint: bool) -> Due:
        """Returns the capture that is due at a boundary.

        Args:
            copy: The small state at the boundary.
            checkpoint: Whether a checkpoint falls due there.
        """
        if not self._writer.reserving and copy.step > self._state.schedule.start:
            self._reserve(copy)
        if checkpoint:
            if self._state.is_unsaved(copy.step) and self._state.overdue is not None:
                self._warn_late(f"no checkpoint of step {self._state.overdue}")
            self._state = self._state.owing(copy.step)
        return self._state.due(copy.step)

    def _warn_late(self, text: str) -> None:
        """Warns at the first time, the second, the fourth, the eighth and so on."""
        self._late += 1
        if self._assignment.rank == 0 and self._late.bit_count() == 1:
            saved_step, times = self._state.saved_step, f" ({self._late} times so far)"
            self._warn(
                f"{text}: the checkpoint of step {saved_step} was still being saved"
                f"{times if self._late > 1 else ''}"
            )

    def is_idle(self) -> bool:
        """Returns whether the memory for captures is there, and no capture is in flight here."""
        state, link = self._state, self._link
        if not state.captures:
            return True
        taken = state.schedule.taken
        return self._writer.ready and (taken is None or max(link.held, link.not_held) >= taken)

    def has_captured(self, step: int) -> bool:
        """Returns whether the state of a step was captured to be saved, or read from storage."""
        return self._state.has_captured(step)

    # A capture.

    def capture(self, copy: BoundaryCopy, kind: Due, verify: Callable[[], None]) -> None:
        """Captures a boundary's state.

        Args:
            copy: The boundary's small state.
            kind: What is captured; nothing, for example.
            verify: Raises if ranks differ; it is called before a checkpoint.
        """
        if kind == "checkpoint":
            verify()
            overdue = self._state.overdue
            self._state = replace(self._state, overdue=None)
            if overdue not in (None, copy.step):
                self._warn_late(
                    f"the checkpoint due at step {overdue} is taken at step {copy.step}"
                )
        if kind != "nothing":
            self._capture(copy, checkpoint=kind == "checkpoint")

    def _capture(self, copy: BoundaryCopy, *, checkpoint: bool) -> None:
        if self._save is not None:
            self._save_at_once(self._save, copy)
            return
        self._beside.wait()
        self._writer.await_memory()
        self._captured_s = time.monotonic()
        drafted = self._writer.draft(copy)
        written = self._write(drafted, checkpoint=checkpoint)
        if written is None:
            self._state = self._state.failed(copy.step, checkpoint=checkpoint)
            return
        seconds = time.monotonic() - self._captured_s
        self._tuner.captured(None if checkpoint else seconds)
        self._state = self._state.captured(
            copy.step, checkpoint=checkpoint, in_memory=not written.direct
        )
        captured = self._captured(drafted, written, checkpoint=checkpoint, seconds=seconds)
        if written.finish is None:
            self._link.send(captured)
            return
        self._beside.begin(written.finish, lambda: self._link.send(captured))

    def _write(self, drafted: Drafted, *, checkpoint: bool) -> _Written | None:
        """Writes a capture into shared memory; for want of that a checkpoint goes to storage, while
        training waits. Returns None if it lies nowhere."""
        step = drafted.manifest.step
        deadline_s = time.monotonic() + (_SLOT_WAIT_S if checkpoint else 0.0)
        try:
            return self._write_to_memory(drafted, deadline_s, checkpoint=checkpoint)
        except StorageError as error:
            in_use = isinstance(error, SlotsInUse)
            if checkpoint:
                self._save_error = one_line(error)
            if checkpoint or not in_use:
                self._warn(f"no snapshot of step {step}: {one_line(error)}")
        return self._write_directly(drafted) if checkpoint and not in_use else None

    def _write_to_memory(
        self, drafted: Drafted, deadline_s: float, *, checkpoint: bool
    ) -> _Written:
        """Writes a capture into shared memory; waits for a slot until `deadline_s` on the monotonic
        clock. Raises `StorageError`."""
        state = self._state
        while True:
            try:
                staged = self._writer.begin_into_memory(
                    drafted,
                    state.states_to_keep(self._assignment, at_stop=False),
                    every_byte=checkpoint,
                    extra=False,
                    # What a step takes of a device is known after the first.
                    beside=drafted.manifest.step > state.schedule.start,
                )
                return _Written(size=staged.size, finish=staged.finish)
            except SlotsInUse:
                if time.monotonic() >= deadline_s:
                    raise
            self._link.check()
            time.sleep(_POLL_S)

    def _write_directly(self, drafted: Drafted) -> _Written | None:
        """Writes this rank's shard to storage; returns None if that failed."""
        try:
            return _Written(manifest=self._writer.onto_storage(drafted))
        except NotFinite:
            raise
        except (ElasticZeroError, OSError) as error:
            self._mark_unsaved(drafted.manifest.step, error)
            return None

    def _save_at_once(self, save: Save, copy: BoundaryCopy) -> None:
        """Writes a checkpoint in this process; if that fails, prints the error and goes on."""
        drafted = self._writer.draft(copy)
        self._writer.check_finite(drafted)
        try:
            save(drafted.manifest, drafted.pieces)
        except (ElasticZeroError, OSError) as error:
            self._mark_unsaved(copy.step, error)
        else:
            self._state = replace(self._state, saved_step=copy.step)

    def _mark_unsaved(self, step: int, error: Exception) -> None:
        self._save_error = one_line(error)
        self._warn(f"the checkpoint of step {step} was not saved: {self._save_error}")

    def _captured(
        self, drafted: Drafted, written: _Written, *, checkpoint: bool, seconds: float
    ) -> Captured:
        writer = drafted.writer
        return Captured(
            step=drafted.manifest.step,
            generation=writer.generation,
            rank=writer.rank,
            world_size=writer.world_size,
            replicate=self._state.takes_snapshots,
            checkpoint=checkpoint,
            seconds=seconds,
            bytes=written.size,
            direct=written.direct,
            manifest=written.manifest,
        )

    # The stop protocol.

    def stop_agreed(self) -> None:
        """Records that all ranks leave at this boundary, each with its state."""
        self._state = replace(self._state, agreed=True)

    @property
    def has_agreed(self) -> bool:
        """Returns whether all ranks leave at this boundary."""
        return self._state.agreed

    def can_stop_with_state(self) -> bool:
        """Returns whether memory is free for the state as it is now."""
        return self._state.can_stop

    def settle(self) -> None:
        """Lets a copy that is under way come to its end where the state is not handed over."""
        self._beside.join(_SETTLE_S)

    def capture_at_stop(self, copy: BoundaryCopy) -> Captured:
        """Captures the snapshot of the stop protocol: this rank's shard of the whole state."""
        began_s = time.monotonic()
        self._beside.join()
        self._writer.await_memory()
        drafted = self._writer.draft(copy, complete=True)
        keep = self._state.states_to_keep(self._assignment, at_stop=True)
        if self._for_others is not None and self._for_others[1] == copy.step:
            keep = {*keep, self._for_others}  # whole, also where one has not come in after all
        staged = self._writer.begin_into_memory(
            drafted, keep, every_byte=True, extra=True, beside=False
        )
        written, seconds = _Written(size=staged.size), time.monotonic() - began_s
        return self._captured(drafted, written, checkpoint=False, seconds=seconds)

    @property
    def copies(self) -> bool:
        """Returns whether a snapshot is in flight, the same on all ranks."""
        return self._state.schedule.copying

    def capture_for_others(self, copy: BoundaryCopy) -> None:
        """Captures what ranks that come into the next world begin with: this rank's shard of the
        whole state. No node replicates it."""
        self._for_others = (self._assignment.generation, copy.step)
        captured = self.capture_at_stop(copy)
        self._link.send(replace(captured, replicate=False))

    # Saves that run, and the last one.

    @property
    def saving(self) -> int | None:
        """Returns the step that is being saved, the same on all ranks; None: no save runs."""
        return self._state.schedule.saving

    def end_save(self) -> None:
        """Records that no save runs any more on any rank."""
        self._state = self._state.save_ended()

    @property
    def newest_save(self) -> NewestSave:
        """Returns the state of this rank's newest save: ended or none, running, or failed; raises
        if its capture could not be finished."""
        self._beside.check()
        return self._state.newest_save(self._node())

    @property
    def save_error(self) -> str:
        """Returns the error of the newest failed save."""
        return self._link.save_error or self._save_error

    def abandon_save(self) -> None:
        """Abandons the newest save, which has failed on some rank."""
        submitted = self._state.submitted
        if self.newest_save == "pending" and submitted is not None:
            self._abandon(submitted)

    def _abandon(self, step: int) -> None:
        self._link.send(AbandonSave(step=step, generation=self._assignment.generation))

    def save_last(self, copy: BoundaryCopy) -> bool:
        """Begins to save this state unless it is saved or a save runs; returns whether it began."""
        self.end_save()
        if unsaved := self._state.is_unsaved(copy.step):
            self._capture(copy, checkpoint=True)
        return unsaved

    def finish(self, copy: BoundaryCopy) -> None:
        """Saves the state at the end of training, and waits until no save is unfinished.

        If this process alone has the state, saves are retried for `save_timeout_s` of the
        assignment; agents save the state in memory. A process without an agent does not wait.
        Raises `LastSaveFailed`.
        """
        self._await_save()
        if self._state.is_unsaved(copy.step):
            self._capture(copy, checkpoint=True)
        deadline_s, pause_s = time.monotonic() + self._assignment.save_timeout_s, _TRY_AGAIN_S
        while self._state.unsaved == copy.step and time.monotonic() + pause_s < deadline_s:
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _MOST_TRY_AGAIN_S)
            self._state = replace(self._state, unsaved=-1)
            self._capture(copy, checkpoint=True)
        self._await_save()
        self.check()
        if self.newest_save == "lost" or self._state.is_unsaved(copy.step):
            raise LastSaveFailed(
                f"the last checkpoint, of step {copy.step}, was not saved: {self.save_error}"
            )

    def _await_save(self) -> None:
        """Waits until this node's save in flight has ended, and its tags are written."""
        self._beside.wait()
        submitted = -1 if self._state.submitted is None else self._state.submitted
        while self._link.saved < submitted or self._link.tags_missing:
            self._link.check()
            time.sleep(_POLL_S)
        self.end_save()

    def _pause(self, pause_s: float) -> None:
        """Waits, unless the generation ends meanwhile."""
        until_s = time.monotonic() + pause_s
        while time.monotonic() < until_s:
            self._link.check()
            time.sleep(JOIN_S)

    def check(self) -> None:
        """Raises `NotFinite` if the agent has found NaN or infinity in the captured state."""
        if (why := self._link.not_finite) is not None:
            raise NotFinite(f"{why}; {self.newest_checkpoint_text()}; {NotFinite.ADVICE}")

    def newest_checkpoint_text(self) -> str:
        """Describes the newest good checkpoint in words."""
        return newest_good_checkpoint(self._assignment.checkpoint_dir if self.saves else None)

    def _warn(self, text: str) -> None:
        log.warning(text)
