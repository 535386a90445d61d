"""Holds the captures of a node's workers, and saves those that are to become checkpoints.

A worker waits only until its state is in shared memory. All that follows happens in threads that
the agent's loop never waits for. Those of `SnapshotReplicator` seal and replicate every capture;
the thread `saving` copies the sealed shards of a checkpoint to storage, one save at a time. The
node of rank 0 commits, and has the manifest's tags name the step before anything is removed. The
others wait until the step is committed; then `SaveFinished` is reported. A node that stood still
for longer than its lease lasts commits nothing and removes nothing, for others may have gone on
without it. Nor does one whose directory another job, or a later run of this one, has taken; that
one begins no save either. A save from memory for a job that ends is tried again, less and less
often, until the step is committed or the save is abandoned; each try that fails is reported as
`SaveFailed`. It does not wait for the retention of another save, nor for a save of an older step
that has not begun.

If space is short, leftovers of failed saves are removed first. A save may be requested twice, stop
anywhere, and be begun again: the files show what is done.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from elasticzero.checkpoint.format.manifest import Manifest, from_json
from elasticzero.checkpoint.format.names import step_directory, token_of_file
from elasticzero.checkpoint.ram.store import Seal, ShardName, SnapshotStore
from elasticzero.checkpoint.ram.transfer import await_commit, persist
from elasticzero.checkpoint.steps import catalog, commit
from elasticzero.checkpoint.steps import owner as owner_record
from elasticzero.checkpoint.steps.owner import OwnerRecord
from elasticzero.checkpoint.steps.retention import (
    CleanupResult,
    PendingSave,
    RetentionPolicy,
    apply_retention,
    is_of_newer_generation,
    make_room,
)
from elasticzero.checkpoint.steps.tags import set_tags
from elasticzero.checkpoint.storage.base import Directory, Storage, out_of_space, within
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.concurrency import run_parallel
from elasticzero.errors import ElasticZeroError, StorageError, one_line
from elasticzero.ipc.messages import Captured, Tagged, TagStep
from elasticzero.launcher.snapshots.replicator import SnapshotReplicator
from elasticzero.launcher.snapshots.roles import CapturedStep, SnapshotRole
from elasticzero.launcher.snapshots.save_events import (
    SaveEvent,
    SaveFailed,
    SaveFinished,
    finished_event,
)
from elasticzero.launcher.snapshots.standstill import StandstillCounter
from elasticzero.text import count_text

COMMIT_WAIT_S = 600.0
"""Seconds that a save waits for the parts of other nodes."""
SUPERSEDED_WAIT_S = 10.0
"""Seconds that a save waits for them once its generation is over: a node that has not written by
then may be lost. If a save of the next generation waits, it is 0."""
CLOSE_WAIT_S = 20.0
"""Seconds for which a node that leaves may go on to write its part of a save."""
SEAL_POLL_S = 0.005
TRY_AGAIN_S, MOST_TRY_AGAIN_S = 0.5, 30.0
"""Shortest and longest pause between two tries of a save, in seconds."""
PAUSE_POLL_S = 0.1
END_S = 5.0
"""Seconds in which the record of the job in the checkpoint directory is written at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Describes one save, or the tags that a saved step is to have."""

    role: SnapshotRole
    step: int
    shards: tuple[ShardName, ...]
    """Shards that are to be copied from memory."""
    manifests: Mapping[int, str] = field(default_factory=dict)
    """Manifests of the shards that workers wrote to storage themselves, by rank."""
    retry: bool = False
    """True if it is tried again until the step is committed or the save is abandoned."""
    notes: list[str] = field(default_factory=list)
    """Notes on what this node has removed from storage for it."""
    tags: tuple[str, ...] = ()
    """Tags that are to name the step; empty: this is a save."""
    standstills: int = 0
    """How often this node had stood still when the save was requested."""
    abandoned: threading.Event = field(default_factory=threading.Event)
    """Set once the save is abandoned."""

    @property
    def commits(self) -> bool:
        """Returns whether this node creates the manifest, because it has rank 0's part."""
        return 0 in self.manifests or any(shard.rank == 0 for shard in self.shards)


class CheckpointSaver:
    """Passes what workers capture to the replicator, and saves checkpoints to storage."""

    def __init__(
        self,
        snapshots: SnapshotStore,
        checkpoint_dir: str | None,
        keep: RetentionPolicy,
        wake: Callable[[], None],
        lease_s: float = math.inf,
        owner: OwnerRecord | None = None,
    ) -> None:
        """Starts the thread `saving`.

        Args:
            snapshots: Holds the captures of this node.
            checkpoint_dir: Path or URL of the checkpoints; None: nothing is saved.
            keep: Which checkpoints stay after a commit.
            wake: Called when there is an event.
            lease_s: Seconds for which the node's lease lasts without being renewed.
            owner: Names the job in the checkpoint directory; None: no record is kept there.
        """
        self._owner = owner
        self._standstills = StandstillCounter(lease_s)
        self._snapshots = snapshots
        self._checkpoint_dir = checkpoint_dir
        self._retention = keep
        self._wake = wake
        self._lock = threading.Lock()
        self._closed = False
        self._writing = threading.Lock()
        """Held while this node's own part of a save is written."""
        self._role: SnapshotRole | None = None
        self._role_since_s = 0.0
        self._steps: dict[int, CapturedStep] = {}
        self._never_saved: set[int] = set()
        """Steps of this generation whose save was abandoned before it began."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._open: list[_Job] = []
        self._events: queue.SimpleQueue[SaveEvent] = queue.SimpleQueue()
        self._replicator = SnapshotReplicator(snapshots, self._add_event)
        self._thread = threading.Thread(target=self._save, name="elasticzero-saving", daemon=True)
        self._thread.start()

    def begin(self, role: SnapshotRole) -> None:
        """Begins a new generation, and ends the pulls of the one before."""
        with self._lock:
            self._role, self._role_since_s = role, time.monotonic()
            self._steps.clear()
            self._never_saved.clear()
            self._replicator.begin()

    def captured(self, message: Captured) -> None:
        """Records that a worker's shard is in memory."""
        with self._lock:
            role = self._role
            if role is None or message.generation != role.generation:
                self._replicator.unsealed()  # of a generation that other workers have left by now
                return
            if message.world_size == role.world_size:
                self._record_capture(role, message)
            self._replicator.captured(self._steps[max(self._steps)] if self._steps else None)

    def _record_capture(self, role: SnapshotRole, message: Captured) -> None:
        recorded = self._steps.get(message.step, CapturedStep(role=role, number=message.step))
        step = replace(recorded, captured={**recorded.captured, message.rank: message})
        self._steps[message.step] = step
        for old in [other for other in self._steps if other < message.step]:
            del self._steps[old]
        if step.complete and message.checkpoint and message.step not in self._never_saved:
            parts = step.captured.values()
            written = {part.rank: part.manifest for part in parts if part.direct}
            self._put(role, message.step, step.shards, written)

    def save_held(self, shards: Iterable[ShardName]) -> None:
        """Saves shards of one snapshot whose workers have exited.

        The save is tried again until the step is committed, or a newer save or generation begins.
        Earlier saves that are not over are abandoned: what they wait for may never come.
        """
        with self._lock:
            role, chosen = self._role, tuple(shards)
            if role is not None and chosen:
                for job in self._open:
                    job.abandoned.set()
                self._put(role, chosen[0].step, chosen, {}, retry=True)

    def _put(
        self,
        role: SnapshotRole,
        step: int,
        shards: tuple[ShardName, ...],
        manifests: Mapping[int, str],
        *,
        retry: bool = False,
    ) -> None:
        self._add(
            _Job(
                role=role,
                step=step,
                shards=shards,
                manifests=manifests,
                retry=retry,
                standstills=self._standstills.tick(),
            )
        )

    def _add(self, job: _Job) -> None:
        self._open.append(job)
        self._jobs.put(job)

    def tag(self, message: TagStep) -> None:
        """Has tags name a step, once the saves that were requested before have ended."""
        with self._lock:
            role = self._role
            if role is not None and message.generation == role.generation:
                self._add(_Job(role=role, step=message.step, shards=(), tags=message.tags))

    @property
    def saving(self) -> bool:
        """Returns whether a save is under way, or a tag is to be written."""
        return bool(self._open)

    def abandon(self, generation: int, step: int) -> None:
        """Abandons a save of which another node cannot write its part.

        A worker may ask for it before it or another has captured the state.
        """
        with self._lock:
            for job in self._open:
                if (job.role.generation, job.step) == (generation, step):
                    job.abandoned.set()
            role, captured = self._role, self._steps.get(step)
            if role is None or role.generation != generation or step in self._never_saved:
                return
            if captured.complete if captured else max(self._steps, default=step) > step:
                return
            self._never_saved.add(step)
            error = "a worker could not write its part"
            self._add_event(finished_event(generation, step, error))

    def unsealed(self) -> bool:
        """Returns whether a shard in memory is not sealed yet; if so, has it sealed."""
        return self._replicator.unsealed()

    def events(self) -> list[SaveEvent]:
        """Returns what has happened since the last call."""
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def close(self, *, at_once: bool = False, job_ended: bool = False) -> None:
        """Stops the threads; waits up to `CLOSE_WAIT_S` for the part of a save that is written.

        Args:
            at_once: True: what is not written yet is abandoned, for the job's run is over.
            job_ended: True: another job may have the checkpoint directory at once.
        """
        if not at_once and self._writing.acquire(timeout=CLOSE_WAIT_S):
            self._writing.release()
        self._closed = True
        self._jobs.put(None)
        self._replicator.close()
        self._thread.join(1.0)
        self._standstills.close()
        if job_ended and self._checkpoint_dir is not None and self._owner is not None:
            directory, job = open_directory(self._checkpoint_dir), self._owner
            with suppress(ElasticZeroError, OSError):
                within(END_S, directory.where, lambda: owner_record.end(directory, job))

    def _add_event(self, event: SaveEvent) -> None:
        self._events.put(event)
        self._wake()

    def _save(self) -> None:
        """Runs the thread `saving`."""
        while (job := self._jobs.get()) is not None:
            self._add_event(self._tag(job) if job.tags else self._try_until_over(job))
            with self._lock:  # after the event: its outcome is known once no save is under way
                self._open.remove(job)

    def _tag(self, job: _Job) -> Tagged:
        assert self._checkpoint_dir is not None
        done = Tagged(step=job.step, generation=job.role.generation, tags=job.tags)
        try:
            directory = open_directory(self._checkpoint_dir)
            self._check_not_taken(directory, f"step {job.step} gets no tag")
            set_tags(directory, job.step, job.tags)
        except Exception as error:  # noqa: BLE001 - the top of a thread's work: told
            return replace(done, error=one_line(error))
        return done

    def _try_until_over(self, job: _Job) -> SaveFinished:
        if (reason := self._reason_not_to_begin(job)) is not None:
            return finished_event(job.role.generation, job.step, reason)
        began_s = time.monotonic()
        finished = self._try(job)
        pause_s = TRY_AGAIN_S
        while finished.error is not None and job.retry and self._reason_to_abandon(job) is None:
            self._add_event(self._failed(job, finished.error, pause_s))
            self._pause(job, pause_s)
            pause_s = min(2 * pause_s, MOST_TRY_AGAIN_S)
            finished = self._try(replace(job, standstills=self._standstills.tick()))
        seconds, notes = time.monotonic() - began_s, (*job.notes, *finished.notes)
        return replace(finished, seconds=seconds, notes=notes)

    def _try(self, job: _Job) -> SaveFinished:
        """Runs a save; once more if space was short and leftovers could be removed."""
        for last in (False, True):
            try:
                return self._run_save(job, again=job.retry or last)
            except Exception as error:  # noqa: BLE001 - the top of a thread's work: told
                failed = finished_event(job.role.generation, job.step, one_line(error))
                if last or not out_of_space(error) or not self._make_room(job):
                    break
        return failed

    def _make_room(self, job: _Job) -> bool:
        """Removes what failed saves have left on storage; returns whether there was any of it."""
        assert self._checkpoint_dir is not None
        for shard in job.shards:
            with suppress(FileNotFoundError):
                token = token_of_file(self._snapshots.file_of(shard)) or ""
                save = PendingSave(
                    step=shard.step,
                    generation=shard.generation,
                    token=token,
                    run=self._owner.run if self._owner is not None else 1,
                )
                done = make_room(open_directory(self._checkpoint_dir), save)
                if done.files:
                    job.notes.append(f"{_removed(done)}, for want of space")
                return bool(done.files)
        return False

    def _pause(self, job: _Job, pause_s: float) -> None:
        """Waits for the next try, or until there is a reason to abandon the save."""
        until_s = time.monotonic() + pause_s
        while self._reason_to_abandon(job) is None and time.monotonic() < until_s:
            time.sleep(PAUSE_POLL_S)

    def _failed(self, job: _Job, error: str, pause_s: float) -> SaveFailed:
        newest = None
        with suppress(ElasticZeroError, OSError):
            assert self._checkpoint_dir is not None
            newest = catalog.newest_good(open_directory(self._checkpoint_dir), job.role.bad_steps)
        return SaveFailed(
            step=job.step,
            generation=job.role.generation,
            error=error,
            newest=newest,
            pause_s=pause_s,
        )

    def _run_save(self, job: _Job, *, again: bool) -> SaveFinished:
        assert self._checkpoint_dir is not None
        directory = open_directory(self._checkpoint_dir)
        self._check_not_taken(directory, f"step {job.step} is not saved")
        storage = directory.step(step_directory(job.step))
        replacing = job.step in job.role.bad_steps and not self._is_superseded(job)
        known_bad = self._known_bad(job, directory, storage) if replacing else None
        replacing = known_bad is not None
        written: dict[int, tuple[Manifest, int]] = {}

        def write(shard: ShardName) -> None:
            written[shard.rank] = persist(
                self._snapshots,
                shard,
                directory,
                lambda: self._await_seal(job, shard),
                replacing=replacing,
                again=again,
            )

        with self._writing:
            run_parallel(job.shards, write)
        for rank, text in job.manifests.items():
            written[rank] = from_json(text.encode(), f"the manifest of rank {rank}"), 0
        notes: list[str] = []
        tags: tuple[str, ...] = ()
        committed = False
        if job.commits:
            draft = replace(written[0][0], files=())
            committed = self._commit(job, directory, draft, known_bad)
            tags, notes = self._set_own_tags(directory, draft)
            if committed:
                notes += self._apply_retention(directory, draft, job)
        else:
            token = next(manifest.token for manifest, _ in written.values())
            await_commit(storage, token, lambda: self._reason_to_abandon(job), wait_s=COMMIT_WAIT_S)
        return replace(
            finished_event(job.role.generation, job.step, None),
            bytes=sum(size for _, size in written.values()),
            committed=committed,
            notes=tuple(notes),
            tags=tags,
        )

    def _known_bad(self, job: _Job, directory: Directory, storage: Storage) -> bytes | None:
        """Returns the contents of the manifest that a save replaces, whose step was found damaged;
        None: there is none, or a newer generation has replaced it.

        Args:
            job: The save.
            directory: Directory of the checkpoints.
            storage: The step's files.
        """
        if (data := catalog.manifest_bytes(storage)) is None:
            return None
        role = job.role
        save = PendingSave(
            step=job.step, generation=role.generation, token=role.token, run=role.run
        )
        since_s = owner_record.since(directory)
        return None if is_of_newer_generation(directory, data, save, since_s=since_s) else data

    def _commit(
        self, job: _Job, directory: Directory, draft: Manifest, known_bad: bytes | None
    ) -> bool:
        """Commits the step; returns False if another save was committed first.

        Args:
            job: The save.
            directory: Directory of the checkpoints.
            draft: Manifest of the step, without `files`.
            known_bad: Contents of the manifest that is replaced, for its step is known to be
                damaged; None: none is.
        """
        storage = directory.step(step_directory(job.step))
        return commit.commit(
            storage,
            draft,
            wait_s=COMMIT_WAIT_S,
            replacing=known_bad if known_bad is not None else False,
            give_up=lambda: self._reason_to_abandon(job),
            may_not=lambda: self._reason_not_to_commit(job) or self._taken_by(directory),
        )

    def _set_own_tags(
        self, directory: Directory, saved: Manifest
    ) -> tuple[tuple[str, ...], list[str]]:
        """Writes the tags of a step that is saved now, by this save or an earlier one.

        Args:
            directory: Directory of the checkpoints.
            saved: Manifest of the step.

        Returns:
            The tags that are written, and notes on what prevented it.
        """
        try:
            reason = self._taken_by(directory) if saved.tags else None
            if reason is None:
                set_tags(directory, saved.step, saved.tags)
        except (ElasticZeroError, OSError) as error:
            reason = one_line(error)
        if reason is not None:
            return (), [f"step {saved.step} has no tag {', '.join(saved.tags)}: {reason}"]
        return saved.tags, []

    def _apply_retention(self, directory: Directory, committed: Manifest, job: _Job) -> list[str]:
        """Removes the checkpoints that need not stay; returns notes on that.

        It ends early if the save is abandoned: what a job that ends saves from memory waits for it.

        Args:
            directory: Directory of the checkpoints.
            committed: Manifest of the checkpoint that was just committed.
            job: The save that committed it.
        """
        try:
            reason = self._reason_not_to_commit(job) or self._taken_by(directory)
        except (ElasticZeroError, OSError) as error:
            reason = one_line(error)
        if reason is not None:
            return [f"old checkpoints and leftovers stay this time: {reason}"]
        since_s = 0.0
        if self._owner is not None:
            with suppress(ElasticZeroError, OSError):  # the next commit renews it
                since_s = owner_record.renew(directory, self._owner)
        done = apply_retention(
            directory,
            committed,
            self._retention,
            bad_steps=job.role.bad_steps,
            since_s=since_s,
            go_on=lambda: not (self._closed or job.abandoned.is_set()),
        )
        notes = [f"not removed: {problem}" for problem in done.problems[:3]]
        if job.abandoned.is_set():
            notes.append("old checkpoints and leftovers may stay this time: another save waits")
        if done.files:
            notes.append(_removed(done))
        return notes

    def _await_seal(self, job: _Job, shard: ShardName) -> Seal:
        while (seal := self._replicator.seal_of(shard)) is None:
            if not self._snapshots.has(shard):
                raise StorageError(f"the snapshot of step {shard.step} is gone from memory")
            if reason := self._reason_to_abandon(job):
                raise StorageError(f"step {shard.step} is not saved: {reason}")
            time.sleep(SEAL_POLL_S)
        return seal

    def _reason_not_to_commit(self, job: _Job) -> str | None:
        if self._standstills.tick() == job.standstills:
            return None
        return (
            "this node stood still for longer than its lease lasts, and others may have gone on "
            "without it"
        )

    def _taken_by(self, directory: Directory) -> str | None:
        return owner_record.taken_by(directory, self._owner) if self._owner is not None else None

    def _check_not_taken(self, directory: Directory, what: str) -> None:
        """Raises `StorageError` where another job, or a later run, has the directory.

        Args:
            directory: Directory of the checkpoints.
            what: What is not done then.
        """
        if reason := self._taken_by(directory):
            raise StorageError(f"{what}: {reason}")

    def _reason_not_to_begin(self, job: _Job) -> str | None:
        """Returns why a save is not begun; None: it is.

        A save from memory of the same step, or of a newer one, has abandoned it, and needs the
        time. An older one needs this save: parts of a newer step that other nodes have written may
        be all that is left of it.
        """
        with self._lock:
            waiting = [other.step for other in self._open if other.retry and other is not job]
        if not job.abandoned.is_set() or max(waiting, default=-1) < job.step:
            return None
        return "the state in memory is saved instead"

    def _is_superseded(self, job: _Job) -> bool:
        with self._lock:
            return self._role is not None and self._role.generation != job.role.generation

    def _reason_to_abandon(self, job: _Job) -> str | None:
        with self._lock:
            if self._closed:
                return "this node leaves"
            if job.abandoned.is_set():
                return "another part of it cannot be written"
            superseded = self._role is not None and self._role.generation != job.role.generation
            late = time.monotonic() - self._role_since_s > SUPERSEDED_WAIT_S
            late |= sum(not other.tags for other in self._open) > 1
        return "its generation ended before all parts were written" if superseded and late else None


def _removed(done: CleanupResult) -> str:
    return f"{count_text(len(done.files), 'file')} of saves that failed removed"
