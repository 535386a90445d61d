"""Seals the captures of a node's workers in memory, and pulls replicas of another node's shards.

Two threads do the work, and the agent's loop never waits for them:

 sealing      gives each shard its checksums and its manifest.
 replicating  pulls the replicas of a step once all of this node's shards of the step are sealed.
              Then it reports `SnapshotHeld`: this node holds all that it must hold of that step.

A request may come twice, and the work may stop anywhere and be begun again: the files show what is
done. A capture is no longer pulled once a newer one, or a new generation, has superseded it. A new
generation does not wait for the old one's pulls, for their source may have left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elasticzero.checkpoint.ram.slots import Slots
from elasticzero.checkpoint.ram.store import Seal, ShardName, SnapshotStore
from elasticzero.checkpoint.ram.transfer import pull
from elasticzero.checkpoint.storage.http import HttpStorage
from elasticzero.concurrency import run_parallel
from elasticzero.errors import NotFinite, StorageError, one_line
from elasticzero.ipc.messages import SnapshotHeld
from elasticzero.launcher.snapshots.roles import CapturedStep, ReplicaSource

PULL_LIMIT_S = 30.0
"""Seconds after which a pull is given up, so that training's next snapshot may begin."""
PULL_POLL_S = 0.005
PULL_SILENCE_S = 5.0
"""Seconds without data after which a pull from a node ends."""
SEALS_KEPT = 64


class SnapshotReplicator:
    """Holds in memory this node's own shards, sealed, and the replicas of another node's."""

    def __init__(
        self,
        snapshots: SnapshotStore,
        on_event: Callable[[SnapshotHeld], None],
        *,
        silence_s: float = PULL_SILENCE_S,
    ) -> None:
        """Starts the two threads.

        Args:
            snapshots: Holds the captures of this node, and the replicas.
            on_event: Called by the threads.
            silence_s: Seconds without data after which a pull ends.
        """
        self._snapshots = snapshots
        self._on_event = on_event
        self._silence_s = silence_s
        self._lock = threading.Lock()
        """Guards the seals, the slots and the sources."""
        self._unsealed, self._dirty = threading.Event(), threading.Event()
        self._closed = False
        self._newest: CapturedStep | None = None
        self._finished_step: CapturedStep | None = None
        """Last step that is held or was given up; only the thread `replicating` uses it."""
        self._seals: dict[ShardName, Seal] = {}
        """Newest seals; a save may need one whose snapshot was replaced by another."""
        self._failed: dict[ShardName, str] = {}
        """Errors of the shards of this generation that could not be sealed."""
        self._replica_slots: dict[int, Slots] = {}
        self._sources: set[HttpStorage] = set()
        """Sources of the pulls under way."""
        self._pulled: dict[int, HttpStorage] = {}
        """Last source of each slot, whose connection serves for the next step."""
        self._threads = [
            threading.Thread(target=work, name=f"elasticzero-{name}", daemon=True)
            for name, work in (("sealing", self._seal), ("replicating", self._replicate))
        ]
        for thread in self._threads:
            thread.start()

    def begin(self) -> None:
        """Begins a new generation, and ends the pulls of the one before."""
        self._newest = None
        self._failed = {}
        self._end_pulls()

    def captured(self, newest: CapturedStep | None) -> None:
        """Records that a worker's shard is in memory.

        Args:
            newest: The step that this node is to hold.
        """
        self._newest = newest
        self._unsealed.set()

    def unsealed(self) -> bool:
        """Returns whether a shard in memory is not sealed yet; if so, has it sealed."""
        if not self._snapshots.drafts():
            return False
        self._unsealed.set()
        return True

    def seal_of(self, shard: ShardName) -> Seal | None:
        """Returns a shard's seal; None: it has none yet. Raises `StorageError` if it gets none."""
        with self._lock:
            seal = self._seals.get(shard)
        if seal is not None:
            return seal
        if self._snapshots.sealed(shard):
            return self._snapshots.read_seal(shard)
        if (why := self._failed.get(shard)) is not None:
            raise StorageError(f"the snapshot of step {shard.step} cannot be sealed: {why}")
        return None

    def close(self) -> None:
        """Stops the threads, and closes the slots of replicas."""
        self._closed = True
        self._unsealed.set()
        self._end_pulls()
        for thread in self._threads:
            thread.join(1.0)
        for slots in self._replica_slots.values():
            slots.close()
        for source in [*self._pulled.values()]:
            source.close()

    def _end_pulls(self) -> None:
        """Ends the pulls under way; those about to begin end when they find a newer capture."""
        self._dirty.set()
        with self._lock:
            for source in self._sources:
                source.abandon()

    def _seal(self) -> None:
        """Runs the thread `sealing`."""
        while True:
            self._unsealed.wait()
            self._unsealed.clear()
            if self._closed:
                return
            run_parallel(self._snapshots.drafts(), self._seal_one)
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
            self._snapshots.drop_draft(shard)  # a newer snapshot has replaced it
        except Exception as error:  # noqa: BLE001 - the top of a thread's work: told
            self._on_event(
                _held_event(shard.generation, shard.step, error)
            )  # before a save fails for it
            self._failed[shard] = one_line(error)
            self._snapshots.drop_draft(shard)

    def _replicate(self) -> None:
        """Runs the thread `replicating`."""
        while True:
            self._dirty.wait()
            self._dirty.clear()
            if self._closed:
                return
            step = self._newest
            if step is None or step is self._finished_step or not step.complete:
                continue
            if all(self._snapshots.sealed(shard) for shard in step.shards):
                self._replicate_step(step)

    def _replicate_step(self, step: CapturedStep) -> None:
        """Pulls the replicas of a step whose own shards are sealed, and reports that it is held."""
        error: BaseException | None = None
        source = step.role.replica_source
        if any(part.direct for part in step.captured.values()):
            error = StorageError("memory was short")
        elif source is not None and all(part.replicate for part in step.captured.values()):
            deadline_s = time.monotonic() + PULL_LIMIT_S

            def expired() -> bool:
                return self._dirty.is_set() or time.monotonic() > deadline_s

            try:
                run_parallel(source.ranks, lambda rank: self._pull(step, source, rank, expired))
            except Exception as lost:  # noqa: BLE001 - the top of a thread's work: told
                error = lost
            if self._dirty.is_set():
                return
        self._finished_step = step
        self._on_event(_held_event(step.role.generation, step.number, error))

    def _pull(
        self,
        step: CapturedStep,
        replica_source: ReplicaSource,
        rank: int,
        expired: Callable[[], bool],
    ) -> None:
        """Pulls one rank's shard once its owner has sealed it.

        Args:
            step: The step whose capture is replicated.
            replica_source: The node that has the shard.
            rank: The rank that owns the shard.
            expired: Returns whether to give up.
        """
        role = step.role
        shard = ShardName(role.generation, step.number, rank, role.world_size)
        slot = replica_source.ranks.index(rank)
        with self._lock:
            if slot not in self._replica_slots:
                root, overflow = self._snapshots.root, self._snapshots.overflow
                self._replica_slots[slot] = Slots(root, f"replica-{slot}", overflow)
            slots = self._replica_slots[slot]
        source = self._source(step, replica_source.address, slot)
        try:
            while not self._snapshots.sealed(shard):
                if expired():
                    raise StorageError(
                        f"{source.where}: the shard of rank {rank} did not come in time"
                    )
                try:
                    pull(source, self._snapshots, slots, shard, expired)
                except FileNotFoundError:
                    time.sleep(PULL_POLL_S)
        finally:
            with self._lock:
                self._sources.discard(source)

    def _source(self, step: CapturedStep, address: str, slot: int) -> HttpStorage:
        """Returns another node's files of a step.

        Its connection is that of the step before where it can be. Steps follow each other fast, and
        with TLS a connection costs more than a small shard.

        Args:
            step: The step.
            address: Address of the node's agent.
            slot: The slot that is filled from there.
        """
        role = step.role
        scheme, tls = ("http", None) if role.tls is None else ("https", role.tls.client())
        source = HttpStorage(
            f"{scheme}://{address}/snapshots/{role.generation}/{step.number}",
            role.password,
            timeout_s=self._silence_s,
            run=role.run,
            tls=tls,
            proofs=role.proofs,
        )
        with self._lock:
            earlier, self._pulled[slot] = self._pulled.get(slot), source
            self._sources.add(source)
        if earlier is not None:
            source.take_over(earlier)
        return source


def _held_event(generation: int, step: int, error: BaseException | None) -> SnapshotHeld:
    text = None if error is None else one_line(error)
    not_finite = isinstance(error, NotFinite)
    return SnapshotHeld(generation=generation, step=step, error=text, not_finite=not_finite)
