"""Stages a worker's state: it captures the state into shared memory when due, and has it saved.

Training waits only while its state is copied into shared memory that the agent owns; the agent does
the rest. `schedule` decides when to capture, from control words that are equal on all ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Literal

from elasticzero.checkpoint.format.layout import Layout
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.shards import shard_header
from elasticzero.checkpoint.io.writer import TensorPiece
from elasticzero.checkpoint.ram.slots import SlotsInUse
from elasticzero.checkpoint.ram.staging import SharedMemoryStager
from elasticzero.comm.control import ControlWord
from elasticzero.errors import ElasticZeroError, LastSaveFailed, NotFinite, StorageError, one_line
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.messages import AbandonSave, Captured, SnapshotInterval
from elasticzero.snapshots.direct_save import (
    JOIN_S,
    check_finite,
    newest_good_checkpoint,
    write_while_waiting,
)
from elasticzero.snapshots.interval import IntervalTuner
from elasticzero.snapshots.manifest_draft import WriterInfo, as_changed, draft
from elasticzero.snapshots.memory import Reservation, Sizes, memory_shortage
from elasticzero.snapshots.schedule import CaptureSchedule, Due
from elasticzero.state.auxiliary import BoundaryCopy
from elasticzero.state.model import RankState

_POLL_S = 0.002
_TRY_AGAIN_S, _MOST_TRY_AGAIN_S = 0.5, 30.0
"""Pause in seconds before the second try of the last save, and the longest pause."""


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
        save: Callable[[Manifest, list[TensorPiece]], None] | None = None,
    ) -> None:
        """shards: number of ranks with the whole state. saving: checkpoints are written. save:
        without an agent, it writes one at once; it raises `ElasticZeroError`."""
        self._save = save
        self._link = link
        self._assignment = a = link.assignment
        self.strategy = strategy
        self._share, self._shards = share, shards
        self.replicated = shards == 1 or shards < a.world_size
        """True if this rank or node holds the whole state."""
        self.saves = saving and a.checkpoint_dir is not None
        """True if checkpoints are written."""
        overflow = Path(a.overflow_root) if a.overflow_root else None
        self._writer = SharedMemoryStager(Path(a.snapshot_root), a.local_rank, overflow)
        needed = (shards == a.world_size or a.rolls_back) and not link.standalone
        self._takes_snapshots = needed and a.snapshot_every != 0
        self._schedule = CaptureSchedule(start=0)
        self._layout: Layout | None = None
        self._trained: Collection[str] = ()
        self._reservation = Reservation(self._writer, self._warn)
        self._memory_checked = link.standalone or a.local_rank > 0
        """True once the size of shared memory was checked, or if another rank checks it."""
        self._saved_step: int | None = None
        """Newest step that was captured to be saved, or was read from storage."""
        self._submitted: int | None = None
        """Newest step that the agent was asked to save."""
        self._overdue: int | None = None
        """A step at which a checkpoint was due while another was being saved."""
        self._not_held = self._unsaved = -1
        self._save_error = ""
        self._agreed = False
        self._tuner = IntervalTuner()

    def begin(self, copy: BoundaryCopy) -> None:
        """Begins with the state of `copy`, and reserves memory for its captures meanwhile."""
        a = self._assignment
        self._schedule = CaptureSchedule(start=copy.step, every=a.snapshot_every or 0)
        if a.resume.tier == "storage":
            self._saved_step = copy.step
        if a.resume.tier != "fresh":  # an optimizer has no state before its first step
            self._reserve(copy)

    def _draft(self, copy: BoundaryCopy, writer: WriterInfo) -> tuple[Manifest, list[TensorPiece]]:
        share = self._share()
        self._trained = share.trained()
        manifest, pieces = draft(share, copy, writer, self._layout)
        self._layout = manifest.layout
        return manifest, pieces

    def _reserve(self, copy: BoundaryCopy) -> None:
        """Allocates and maps memory for captures of this size, while training goes on."""
        if not self._memory_checked:
            self._memory_checked = True
            self._check_memory(copy)
        if self._save is not None or not (self._takes_snapshots or self.saves):
            return
        manifest, _ = self._draft(copy, self._writer_info(complete=False))
        self._reservation.begin(shard_header(manifest, self._assignment.rank)[1])

    def _check_memory(self, copy: BoundaryCopy) -> None:
        """Reports to the agent if shared memory is too small for this node's snapshots."""
        a = self._assignment
        manifest, _ = self._draft(copy, self._writer_info(complete=False))
        shard = shard_header(manifest, a.rank)[1]
        whole = 0
        if self.replicated:
            manifest, _ = draft(self._share(), copy, self._writer_info(complete=True))
            whole = self._shards * shard_header(manifest, a.rank % self._shards)[1]
        short = memory_shortage(
            a,
            Sizes(shard=shard, whole=whole),
            captures=self._takes_snapshots or self.saves,
            replicas=self._takes_snapshots and a.world_size > a.local_world_size,
        )
        if short is not None:
            self._link.send(short)

    def stepped(self, seconds: float) -> None:
        """Records the time of a step."""
        schedule = self._schedule
        if schedule.saving is None and schedule.copying == self._tuner.measuring:
            self._tuner.stepped(seconds)  # no checkpoint is being saved at the same time

    def control_word(self, flags: int, *, asks: bool = False) -> ControlWord:
        """Returns this rank's word at this boundary. asks: its script asked for a checkpoint."""
        link, start, given = self._link, self._schedule.start, self._assignment
        chooses = self._takes_snapshots and given.rank == 0 and given.snapshot_every is None
        return ControlWord(
            flags=flags,
            ready=self._reservation.done,
            held=max(link.held, start - 1),
            saved=max(link.saved, self._unsaved, start - 1),
            not_held=max(link.not_held, self._not_held),
            unsaved=max(link.unsaved, self._unsaved),
            every=self._tuner.proposed_interval() if chooses else 0,
            asks=asks,
        )

    def after_exchange(self, word: ControlWord) -> None:
        """Updates the schedule with a word that all ranks have exchanged."""
        before, self._schedule = self._schedule, self._schedule.after_exchange(word)
        if not self._schedule.copying:
            self._tuner.snapshot_done()
        if before.every != self._schedule.every and self._assignment.rank == 0:
            cost = self._tuner
            self._link.send(
                SnapshotInterval(every=self._schedule.every, cost_s=cost.cost_s, step_s=cost.step_s)
            )
        saving = before.saving
        if saving is not None and word.unsaved >= saving > max(self._link.unsaved, self._unsaved):
            self._abandon(saving)

    def due(self, copy: BoundaryCopy, *, checkpoint: bool) -> Due:
        """Returns the capture that is due at a boundary. checkpoint: one falls due there."""
        if not self._reservation.begun and copy.step > self._schedule.start:
            self._reserve(copy)
        if checkpoint and self._unsaved_state(copy):
            if self._overdue is not None:
                self._warn_late(f"no checkpoint of step {self._overdue}")
            self._overdue = copy.step
        owed = self._overdue is not None
        return self._schedule.due(copy.step, checkpoint=owed, snapshots=self._takes_snapshots)

    def capture(self, copy: BoundaryCopy, kind: Due, verify: Callable[[], None]) -> None:
        """Captures a boundary's state. verify: raises if ranks differ, before a checkpoint."""
        if kind == "checkpoint":
            verify()
            owed, self._overdue = self._overdue, None
            if owed not in (None, copy.step):
                self._warn_late(f"the checkpoint due at step {owed} is taken at step {copy.step}")
        if kind != "nothing":
            self._capture(copy, checkpoint=kind == "checkpoint")

    @property
    def saving(self) -> int | None:
        """Returns the step that is being saved, the same on all ranks; None: no save runs."""
        return self._schedule.saving

    def end_save(self) -> None:
        """Records that no save runs any more on any rank."""
        self._schedule = replace(self._schedule, saving=None)

    def has_captured(self, step: int) -> bool:
        """Returns whether the state of a step was captured to be saved, or read from storage."""
        return self._saved_step is not None and step <= self._saved_step

    def _warn_late(self, text: str) -> None:
        if self._assignment.rank == 0:
            self._warn(f"{text}: the checkpoint of step {self._saved_step} was still being saved")

    def finish(self, copy: BoundaryCopy) -> None:
        """Saves the state at the end of training, and waits until no save is unfinished.

        If this process alone has the state, saves are retried for `save_timeout_s` of the
        assignment; agents save the state in memory. Raises `LastSaveFailed`.
        """
        self._await_save()
        if self._unsaved_state(copy):
            self._capture(copy, checkpoint=True)
        deadline_s, pause_s = time.monotonic() + self._assignment.save_timeout_s, _TRY_AGAIN_S
        while self._unsaved == copy.step and time.monotonic() + pause_s < deadline_s:
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _MOST_TRY_AGAIN_S)
            self._unsaved = -1
            self._capture(copy, checkpoint=True)
        self._await_save()
        self.check()
        if self.newest_save == "lost" or self._unsaved_state(copy):
            raise LastSaveFailed(
                f"the last checkpoint, of step {copy.step}, was not saved: {self.save_error}"
            )

    def check(self) -> None:
        """Raises `NotFinite` if the agent has found NaN or infinity in the captured state."""
        if (why := self._link.not_finite) is not None:
            raise NotFinite(f"{why}; {self.newest_checkpoint_text()}")

    def newest_checkpoint_text(self) -> str:
        """Describes the newest good checkpoint in words."""
        return newest_good_checkpoint(self._assignment.checkpoint_dir if self.saves else None)

    @property
    def newest_save(self) -> Literal["none", "pending", "lost"]:
        """Returns the state of this rank's newest save: ended or none, running, or failed."""
        if self._saved_step is not None and self._saved_step in (self._unsaved, self._link.unsaved):
            return "lost"
        pending = self._submitted is not None and self._link.saved < self._submitted
        return "pending" if pending else "none"

    def abandon_save(self) -> None:
        """Abandons the newest save, which has failed on some rank."""
        if self.newest_save == "pending" and self._submitted is not None:
            self._abandon(self._submitted)

    def _abandon(self, step: int) -> None:
        self._link.send(AbandonSave(step=step, generation=self._assignment.generation))

    def save_last(self, copy: BoundaryCopy) -> bool:
        """Begins to save this state unless it is saved or a save runs; returns whether it began."""
        self.end_save()
        if unsaved := self._unsaved_state(copy):
            self._capture(copy, checkpoint=True)
        return unsaved

    @property
    def save_error(self) -> str:
        """Returns the error of the newest failed save."""
        return self._link.save_error or self._save_error

    def _pause(self, pause_s: float) -> None:
        """Waits, unless the generation ends meanwhile."""
        until_s = time.monotonic() + pause_s
        while time.monotonic() < until_s:
            self._link.check()
            time.sleep(JOIN_S)

    def _unsaved_state(self, copy: BoundaryCopy) -> bool:
        return self.saves and not self.has_captured(copy.step)

    def _await_save(self) -> None:
        """Waits until this node's save in flight has ended, and its tags are written."""
        submitted = -1 if self._submitted is None else self._submitted
        while self._link.saved < submitted or self._link.tags_missing:
            self._link.check()
            time.sleep(_POLL_S)
        self.end_save()

    def _capture(self, copy: BoundaryCopy, *, checkpoint: bool) -> None:
        writer = self._writer_info(complete=False)
        if self._save is not None:
            self._save_at_once(self._save, copy)
            return
        self._reservation.wait()
        began_s = time.monotonic()
        manifest, pieces = self._draft(copy, writer)
        captured = self._captured(manifest, writer)
        pieces = as_changed(pieces) if checkpoint else pieces
        try:
            size = self._writer.write(
                manifest, writer.rank, pieces, self._states_to_keep(), trained=self._trained
            )
        except StorageError as error:
            if checkpoint or not isinstance(error, SlotsInUse):
                self._warn(f"no snapshot of step {copy.step}: {one_line(error)}")
            if checkpoint:
                self._save_error = one_line(error)
            short = checkpoint and not isinstance(error, SlotsInUse)
            written = self._write_directly(manifest, pieces) if short else None
            if written is None:
                self._mark_failed(copy.step, checkpoint=checkpoint)
                return
            self._not_held = copy.step
            captured, size = replace(captured, direct=True, manifest=written), 0
        seconds = time.monotonic() - began_s
        self._tuner.captured(None if checkpoint else seconds)
        self._schedule = self._schedule.captured(copy.step, checkpoint=checkpoint)
        if checkpoint:
            self._saved_step = self._submitted = copy.step
        message = replace(captured, checkpoint=checkpoint, seconds=seconds, bytes=size)
        self._link.send(message)

    def _save_at_once(
        self, save: Callable[[Manifest, list[TensorPiece]], None], copy: BoundaryCopy
    ) -> None:
        """Writes a checkpoint in this process; if that fails, prints the error and goes on."""
        manifest, pieces = self._draft(copy, self._writer_info(complete=False))
        check_finite(self._assignment, manifest, pieces, self._trained)
        try:
            save(manifest, pieces)
        except (ElasticZeroError, OSError) as error:
            self._save_error = one_line(error)
            self._warn(f"the checkpoint of step {copy.step} was not saved: {self._save_error}")
        else:
            self._saved_step = copy.step

    def _write_directly(self, manifest: Manifest, pieces: list[TensorPiece]) -> str | None:
        """Writes the shard to storage, for want of memory, while training waits.

        Returns its own manifest, by which rank 0's agent commits; None if it failed.
        """
        try:
            return write_while_waiting(self._link, manifest, pieces, self._trained)
        except NotFinite:
            raise
        except (ElasticZeroError, OSError) as error:
            self._save_error = one_line(error)
            self._warn(f"the checkpoint of step {manifest.step} was not saved: {self._save_error}")
            return None

    def _mark_failed(self, step: int, *, checkpoint: bool) -> None:
        """Records, for the next word, that this rank could not make a capture that is due."""
        self._schedule = self._schedule.captured(step, checkpoint=checkpoint)
        self._not_held = step
        if checkpoint:
            self._unsaved = self._saved_step = step

    def stop_agreed(self) -> None:
        """Records that all ranks leave at this boundary, each with its state."""
        self._agreed = True

    def can_stop_with_state(self) -> bool:
        """Returns whether memory is free for the state as it is now.

        After peers were lost, a divided state does not replace a snapshot in flight.
        """
        return self._agreed or self.replicated or not self._schedule.copying

    def capture_at_stop(self, copy: BoundaryCopy) -> Captured:
        """Captures the snapshot of the stop protocol: this rank's shard of the whole state."""
        began_s = time.monotonic()
        writer = self._writer_info(complete=True)
        self._reservation.wait()
        manifest, pieces = self._draft(copy, writer)
        keep = self._states_to_keep()
        if not self._agreed and self._schedule.taken is not None:
            keep = {*keep, (writer.generation, self._schedule.taken)}
        pieces = as_changed(pieces)
        size = self._writer.write(
            manifest, writer.rank, pieces, keep, extra=True, trained=self._trained
        )
        captured = self._captured(manifest, writer)
        return replace(captured, seconds=time.monotonic() - began_s, bytes=size)

    def close(self) -> None:
        """Releases this process's mappings of the memory of captures; the snapshots stay."""
        self._reservation.wait()
        self._writer.close()

    def _captured(self, manifest: Manifest, writer: WriterInfo) -> Captured:
        return Captured(
            step=manifest.step,
            generation=writer.generation,
            rank=writer.rank,
            world_size=writer.world_size,
            replicate=self._takes_snapshots,
        )

    def _states_to_keep(self) -> set[tuple[int, int]]:
        return self._schedule.states_to_keep(self._assignment.generation, self._assignment.resume)

    def _warn(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _writer_info(self, *, complete: bool) -> WriterInfo:
        return WriterInfo.of(self._assignment, self.strategy, self._shards, complete=complete)
