"""What an agent does with the captures of its workers: seal, replicate, save.

A worker waits only until its state is in shared memory. All that follows happens here, in three
threads that the agent's loop never waits for:

 sealing   each shard gets its checksums and its manifest.
 keeping   once all of this node's shards of a step are sealed, the replicas of another node's are
           pulled, and `Kept` is told: what this node is to hold of that step, it holds.
 saving    sealed shards of a checkpoint are copied to storage; the node of rank 0 commits, the
           others wait until the step stands; and `SaveOver` is told. One save at a time.

Either may be told the same thing twice, stop anywhere, and be begun again: what is done is seen in
the files. A capture that is overtaken, by a newer one or by a new generation, is no longer pulled.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from elasticzero.channel import Captured, Kept
from elasticzero.checkpoint import commit
from elasticzero.checkpoint.http_storage import HttpStorage
from elasticzero.checkpoint.manifest import Manifest, from_json, step_directory
from elasticzero.checkpoint.persist import await_commit, persist
from elasticzero.checkpoint.replica import pull
from elasticzero.checkpoint.retention import Keep, tidy
from elasticzero.checkpoint.slots import Slots
from elasticzero.checkpoint.snapshot import Seal, ShardName, SnapshotStore
from elasticzero.checkpoint.storage import Directory, open_directory
from elasticzero.errors import StorageError, one_line

COMMIT_WAIT_S = 600.0
"""How long a save waits for the parts of other nodes."""
SUPERSEDED_WAIT_S = 10.0
"""The same once its generation is over: who has not written by then may be lost. A save of the next
generation does not wait even that long."""
PULL_LIMIT_S = 30.0
"""A replica that has not come by then is given up, and training's next snapshot may begin."""
PULL_POLL_S = 0.005
PULL_SILENCE_S = 5.0
"""A node that sends nothing for so long is not pulled from any more."""
CLOSE_WAIT_S = 20.0
"""How long a leaving node stays to write its part of a save."""
SEALS_KEPT = 64
THREADS = 4
"""Shards sealed, pulled or written at a time."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Another node, whose shards this one keeps replicas of."""

    address: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """This node's part in the snapshots and checkpoints of one generation."""

    generation: int
    token: str
    world_size: int
    ranks: tuple[int, ...]
    charge: Charge | None = None
    bad_steps: frozenset[int] = frozenset()
    """Checkpoints found damaged: a save of such a step replaces what stands there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOver:
    """A save has ended on this node."""

    step: int
    generation: int
    """Whose workers asked for it."""
    seconds: float
    bytes: int
    committed: bool
    """The manifest was created here."""
    error: str | None = None
    notes: tuple[str, ...] = ()
    """What else there is to say: what retention did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One save."""

    post: Post
    step: int
    shards: tuple[ShardName, ...]
    """To be copied from memory."""
    manifests: Mapping[int, str] = field(default_factory=dict)
    """Of the shards that workers wrote to storage themselves, by rank."""
    dropped: threading.Event = field(default_factory=threading.Event)
    """Nobody waits for it any more."""

    @property
    def commits(self) -> bool:
        """Whether this node creates the manifest: it has rank 0's part."""
        return 0 in self.manifests or any(shard.rank == 0 for shard in self.shards)


@dataclass(slots=True)
class _Step:
    """The captures of one step on this node."""

    captured: dict[int, Captured] = field(default_factory=dict)
    """By rank."""
    over: bool = False
    """Kept, or given up."""


class Saver:
    """Owns this node's snapshots in memory, and brings them to storage."""

    def __init__(
        self,
        snapshots: SnapshotStore,
        checkpoint_dir: str | None,
        keep: Keep,
        wake: Callable[[], None],
    ) -> None:
        """`keep`: which checkpoints stay after a commit. `wake`: called when there is news."""
        self._snapshots = snapshots
        self._checkpoint_dir = checkpoint_dir
        self._keep_rule = keep
        self._wake = wake
        self._lock = threading.Lock()
        self._unsealed, self._dirty = threading.Event(), threading.Event()
        self._closed = False
        self._writing = threading.Lock()
        """Held while this node's own part of a save is written."""
        self._post: Post | None = None
        self._post_since_s = 0.0
        self._steps: dict[int, _Step] = {}
        self._seals: dict[ShardName, Seal] = {}
        """The newest: a save may need one whose snapshot has made room for another."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._open: list[_Job] = []
        self._news: queue.SimpleQueue[Kept | SaveOver] = queue.SimpleQueue()
        self._replica_slots: dict[int, Slots] = {}
        self._threads = [
            threading.Thread(target=work, name=f"elasticzero-{name}", daemon=True)
            for name, work in (
                ("sealing", self._seal),
                ("keeping", self._keep),
                ("saving", self._save),
            )
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, post: Post) -> None:
        """A new generation: captures of the one before are no longer pulled."""
        with self._lock:
            self._post, self._post_since_s = post, time.monotonic()
            self._steps.clear()
        self._dirty.set()

    def captured(self, message: Captured) -> None:
        """A worker's shard is in memory."""
        with self._lock:
            post = self._post
            if post is None or message.generation != post.generation:
                return
            if message.world_size == post.world_size:
                self._take(post, message)
        self._unsealed.set()

    def _take(self, post: Post, message: Captured) -> None:
        step = self._steps.setdefault(message.step, _Step())
        step.captured[message.rank] = message
        step.over = False
        for old in [other for other in self._steps if other < message.step]:
            del self._steps[old]
        if len(step.captured) == len(post.ranks) and message.checkpoint:
            parts = step.captured.values()
            shards = tuple(
                ShardName(post.generation, message.step, part.rank, post.world_size)
                for part in parts
                if not part.direct
            )
            written = {part.rank: part.manifest for part in parts if part.direct}
            self._put(post, message.step, shards, written)

    def save_held(self, shards: Iterable[ShardName]) -> None:
        """Save shards of one snapshot though the workers that wrote them are gone.

        A save of theirs that is not over is given up: what it waits for may never come.
        """
        with self._lock:
            post, chosen = self._post, tuple(shards)
            if post is not None and chosen:
                for job in self._open:
                    job.dropped.set()
                self._put(post, chosen[0].step, chosen, {})

    def _put(
        self, post: Post, step: int, shards: tuple[ShardName, ...], manifests: Mapping[int, str]
    ) -> None:
        job = _Job(post=post, step=step, shards=shards, manifests=manifests)
        self._open.append(job)
        self._jobs.put(job)

    @property
    def saving(self) -> bool:
        """Whether a save is not over."""
        return bool(self._open)

    def give_up(self, generation: int, step: int) -> None:
        """Another node cannot write its part of this save."""
        with self._lock:
            for job in self._open:
                if (job.post.generation, job.step) == (generation, step):
                    job.dropped.set()
            known, post = self._steps.get(step), self._post
            if known is None or post is None or post.generation != generation:
                return
            if len(known.captured) < len(post.ranks):
                error = "a worker of this node could not write its part"
                self._tell(_over(generation, step, error))

    def unsealed(self) -> bool:
        """Whether a shard in memory is not sealed yet; that is being done."""
        if not self._snapshots.drafts():
            return False
        self._unsealed.set()
        return True

    def news(self) -> list[Kept | SaveOver]:
        """What has happened since the last call."""
        found = []
        while not self._news.empty():
            found.append(self._news.get())
        return found

    def close(self) -> None:
        """Stop; a part of a save that is being written is finished first, if that is soon done."""
        if self._writing.acquire(timeout=CLOSE_WAIT_S):
            self._writing.release()
        self._closed = True
        self._unsealed.set()
        self._dirty.set()
        self._jobs.put(None)
        for thread in self._threads:
            thread.join(1.0)
        for slots in self._replica_slots.values():
            slots.close()

    def _tell(self, news: Kept | SaveOver) -> None:
        self._news.put(news)
        self._wake()

    def _seal(self) -> None:
        """The thread `sealing`."""
        while True:
            self._unsealed.wait()
            self._unsealed.clear()
            if self._closed:
                return
            _each(self._snapshots.drafts(), self._seal_one)
            self._dirty.set()

    def _seal_one(self, shard: ShardName) -> None:
        try:
            seal = self._snapshots.seal(shard)
            if seal is not None:
                with self._lock:
                    self._seals[shard] = seal
                    for old in sorted(self._seals)[:-SEALS_KEPT]:
                        del self._seals[old]
        except FileNotFoundError:
            self._snapshots.drop_draft(shard)  # overtaken: a newer snapshot has taken its place
        except Exception as error:  # noqa: BLE001 - the top of a thread's work: told
            self._snapshots.drop_draft(shard)
            self._tell(_kept(shard.generation, shard.step, error))

    def _keep(self) -> None:
        """The thread `keeping`."""
        while True:
            self._dirty.wait()
            self._dirty.clear()
            if self._closed:
                return
            with self._lock:
                post = self._post
                number, step = max(self._steps.items(), default=(-1, _Step(over=True)))
            if post is not None and not step.over and len(step.captured) == len(post.ranks):
                here = [r for r, part in step.captured.items() if not part.direct]
                shards = [ShardName(post.generation, number, r, post.world_size) for r in here]
                if all(self._snapshots.sealed(shard) for shard in shards):
                    self._keep_step(post, number, step)

    def _keep_step(self, post: Post, number: int, step: _Step) -> None:
        """Pull what belongs to a step that is sealed here, and say that it is kept."""
        error: BaseException | None = None
        if any(part.direct for part in step.captured.values()):
            error = StorageError("memory was short")
        elif post.charge is not None and all(p.replicate for p in step.captured.values()):
            deadline_s = time.monotonic() + PULL_LIMIT_S

            def over() -> bool:
                return self._dirty.is_set() or time.monotonic() > deadline_s

            try:
                _each(post.charge.ranks, lambda rank: self._pull(post, number, rank, over))
            except Exception as lost:  # noqa: BLE001 - the top of a thread's work: told
                error = lost
            if self._dirty.is_set():
                return
        step.over = True
        self._tell(_kept(post.generation, number, error))

    def _pull(self, post: Post, step: int, rank: int, over: Callable[[], bool]) -> None:
        """Pull one rank's shard once its owner has sealed it."""
        assert post.charge is not None
        shard = ShardName(post.generation, step, rank, post.world_size)
        slot = post.charge.ranks.index(rank)
        with self._lock:
            if slot not in self._replica_slots:
                self._replica_slots[slot] = Slots(self._snapshots.root, f"replica-{slot}")
            slots = self._replica_slots[slot]
        url = f"http://{post.charge.address}/snapshots/{post.generation}/{step}"
        source = HttpStorage(url, post.token, timeout_s=PULL_SILENCE_S)
        try:
            while not self._snapshots.sealed(shard):
                try:
                    pull(source, self._snapshots, slots, shard, over)
                except FileNotFoundError:
                    time.sleep(PULL_POLL_S)
                if over() and not self._snapshots.sealed(shard):
                    raise StorageError(f"{url}: the shard of rank {rank} did not come in time")
        finally:
            source.close()

    def _save(self) -> None:
        """The thread `saving`."""
        while (job := self._jobs.get()) is not None:
            began_s = time.monotonic()
            try:
                over = self._carry_out(job)
            except Exception as error:  # noqa: BLE001 - the top of a thread's work: told
                over = _over(job.post.generation, job.step, one_line(error))
            with self._lock:
                self._open.remove(job)
            self._tell(replace(over, seconds=time.monotonic() - began_s))

    def _carry_out(self, job: _Job) -> SaveOver:
        assert self._checkpoint_dir is not None
        directory = open_directory(self._checkpoint_dir)
        storage = directory.step(step_directory(job.step))
        replacing = job.step in job.post.bad_steps
        written: dict[int, tuple[Manifest, int]] = {}

        def write(shard: ShardName) -> None:
            written[shard.rank] = persist(
                self._snapshots,
                shard,
                directory,
                lambda: self._await_seal(job, shard),
                replacing=replacing,
            )

        def give_up() -> str | None:
            return self._reason_to_give_up(job)

        with self._writing:
            _each(job.shards, write)
        for rank, text in job.manifests.items():
            written[rank] = from_json(text.encode(), f"the manifest of rank {rank}"), 0
        notes: list[str] = []
        committed = False
        if job.commits:
            draft = replace(written[0][0], files=())
            committed = commit.commit(
                storage, draft, wait_s=COMMIT_WAIT_S, replacing=replacing, give_up=give_up
            )
            if committed:
                notes = self._tidy(directory, draft, job)
        else:
            token = next(manifest.token for manifest, _ in written.values())
            await_commit(storage, token, give_up, wait_s=COMMIT_WAIT_S)
        return replace(
            _over(job.post.generation, job.step, None),
            bytes=sum(size for _, size in written.values()),
            committed=committed,
            notes=tuple(notes),
        )

    def _tidy(self, directory: Directory, committed: Manifest, job: _Job) -> list[str]:
        """Remove what need not stay; what is to be said of that."""
        done = tidy(directory, committed, self._keep_rule, bad_steps=job.post.bad_steps)
        notes = [f"not removed: {problem}" for problem in done.problems[:3]]
        if done.files:
            count = len(done.files)
            notes.append(f"{count} file{'s' * (count > 1)} of saves that failed removed")
        return notes

    def _await_seal(self, job: _Job, shard: ShardName) -> Seal:
        while True:
            with self._lock:
                known = self._seals.get(shard)
            if known is not None:
                return known
            if self._snapshots.sealed(shard):
                return self._snapshots.read_seal(shard)
            if not self._snapshots.has(shard):
                raise StorageError(f"the snapshot of step {shard.step} is gone from memory")
            if reason := self._reason_to_give_up(job):
                raise StorageError(f"step {shard.step} is not saved: {reason}")
            time.sleep(PULL_POLL_S)

    def _reason_to_give_up(self, job: _Job) -> str | None:
        with self._lock:
            if self._closed:
                return "this node leaves"
            if job.dropped.is_set():
                return "another part of it cannot be written"
            superseded = self._post is not None and self._post.generation != job.post.generation
            late = time.monotonic() - self._post_since_s > SUPERSEDED_WAIT_S
            late |= len(self._open) > 1
        return "its generation ended before all parts were written" if superseded and late else None


def _kept(generation: int, step: int, error: BaseException | None) -> Kept:
    text = None if error is None else one_line(error)
    return Kept(generation=generation, step=step, error=text)


def _over(generation: int, step: int, error: str | None) -> SaveOver:
    return SaveOver(
        generation=generation, step=step, seconds=0.0, bytes=0, committed=False, error=error
    )


def _each(items: Iterable[Item], work: Callable[[Item], None]) -> None:
    """`work` on every item, some at a time; raises the first error once all have ended.

    By threads of its own: those of an executor are waited for at exit, and one whose storage hangs
    would keep the agent from ending.
    """
    waiting = list(items)
    errors: list[BaseException] = []

    def loop() -> None:
        while waiting and not errors:
            try:
                item = waiting.pop(0)
            except IndexError:
                return
            try:
                work(item)
            except BaseException as error:  # noqa: BLE001 - the top of a thread: handed on
                errors.append(error)

    threads = [
        threading.Thread(target=loop, name=f"elasticzero-copy-{i}", daemon=True)
        for i in range(min(THREADS, len(waiting)) - 1)
    ]
    for thread in threads:
        thread.start()
    loop()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
