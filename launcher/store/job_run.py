"""Binds what a process writes to its run of the job.

A job that is over and is begun again (`--restart`) has another run. A process of the run before may
have been away meanwhile: suspended, or cut off from the store. When it comes back it must change
nothing of the run that has taken the place of its own.

Rules:
 1. The key `run` holds the number of the present run. Where it does not exist the run is the first
    one. `--restart` raises it, in the transaction that deletes the documents of the run before. It
    is never deleted.
 2. A process belongs to the run that the store held when the process began. It never changes runs.
 3. Each write of a process is conditioned on the key being as the process read it, with a number
    that is not higher than its own. So the store itself refuses what an earlier run writes.
 4. Where the key is gone, or its number is lower, the store has lost its data. Writes are possible
    then, and `recovery` writes the higher number.
 5. Each document states its run, for readers compare it before anything else
    (`documents.compare_runs`).
 6. While the key cannot be read, no world and no end is written. Registrations, alarms and reports
    are, as long as the key stays as it is: by these the nodes hand their state over and leave. No
    process begins then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elasticzero.errors import RunEnded, StoreUnavailable
from elasticzero.launcher.protocol.documents import (
    FIRST_RUN,
    Run,
    compare_runs,
    to_bytes,
)
from elasticzero.launcher.store.api import (
    Condition,
    Entry,
    Lease,
    PrefixState,
    Store,
    Watch,
    unchanged,
)
from elasticzero.launcher.store.data_loss import History
from elasticzero.launcher.store.decoding import document, unreadable_text
from elasticzero.launcher.store.watch_cache import ALARM, CONTROL, DONE, NEXT, REPORTS, WORLD
from elasticzero.serialization import RecordError

RUN = "run"
TRIES = 8
"""Number of times that a write is tried while the key changes from one lower number to another."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Holds the number of the run that the store has, and the key as it was read."""

    number: int
    entry: Entry | None

    def unchanged(self) -> Condition:
        """Returns a condition that holds as long as the key is as it was read."""
        return unchanged(RUN, self.entry)


def stored_run(store: Store) -> StoredRun:
    """Returns the present run of the job, as the store has it.

    Raises `StoreUnavailable` if the store does not answer, or its key is not readable.
    """
    entry = store.read(RUN, limit=1).entries.get(RUN)
    return StoredRun(number_in(entry), entry)


def number_in(entry: Entry | None) -> int:
    """Returns the number that an entry holds; raises `StoreUnavailable` if it is not readable."""
    if entry is None:
        return FIRST_RUN
    try:
        return document(Run, entry.value).number
    except RecordError as error:
        raise StoreUnavailable(
            f"the key `{RUN}` of the job in etcd is not readable ({error}); nothing is written "
            "before it holds the number of the job's run again"
        ) from None


def check_run(run: int, stored: int) -> None:
    """Raises `RunEnded` where the store has a later run than the process's.

    Args:
        run: Number of the process's run.
        stored: Number of the run in the store, or in a document of it.
    """
    if compare_runs(stored, run) > 0:
        raise RunEnded(run, stored)


def begin_next_run(store: Store, over: Condition) -> bool:
    """Begins the job's next run: raises its number, and deletes the documents of the one before.

    Args:
        store: The job's part of etcd.
        over: Condition that holds as long as the end of the job is the one that was read.

    Returns:
        False if another node was faster, or the write had taken effect before.

    Raises:
        StoreUnavailable: The store did not answer in time; another try does no harm.
    """
    before = stored_run(store)
    revision = store.write(
        {RUN: to_bytes(Run(number=before.number + 1))},
        deletes=[DONE, WORLD, CONTROL, ALARM, REPORTS, NEXT],
        conditions=[over, before.unchanged()],
    )
    return revision is not None


def _ignore(line: str) -> None:
    return


class RunStore:
    """Is the store of one run of the job: it refuses every write once a later run has begun."""

    def __init__(
        self, store: Store, stored: StoredRun, log_line: Callable[[str], None] = _ignore
    ) -> None:
        """Creates the store of the run that was read.

        Args:
            store: The job's part of etcd.
            stored: The run, as it was read there.
            log_line: Receives a line that begins with the key, once, where it cannot be read.
        """
        self._store = store
        self._stored = stored
        self._log_line = log_line
        self._named = False
        """True once the key was named because it cannot be read."""
        self.number = stored.number
        """Number of the run."""
        self.unreadable = False
        """True if the key could not be read when a write last met it: this node leaves (rule 6)."""

    def write(
        self,
        puts: Mapping[str, bytes],
        *,
        deletes: Sequence[str] = (),
        conditions: Sequence[Condition] = (),
        lease: Lease | None = None,
    ) -> int | None:
        """Writes in one transaction, on the further condition that no later run has begun.

        Args:
            puts: Values to put, by name.
            deletes: Names to delete; one that ends in "/" deletes every key under it.
            conditions: What must hold besides.
            lease: Lease with which the keys end; None: they stay.

        Returns:
            The revision of the write, or None when one of the other conditions did not hold, or a
                world or an end would be written while the key of the run cannot be read.

        Raises:
            RunEnded: A later run has begun; nothing was written.
            LeaseLost: The lease is gone.
            StoreUnavailable: It is not known whether the write took place.
        """
        ends = WORLD in puts or DONE in puts
        for _ in range(TRIES):
            if ends and self.unreadable and self._is_still_unreadable():
                return None
            fenced = [*conditions, self._stored.unchanged()]
            revision = self._store.write(puts, deletes=deletes, conditions=fenced, lease=lease)
            if revision is not None or not self._has_changed():
                return revision
        return None

    def _has_changed(self) -> bool:
        """Reads the key anew; returns whether it has changed since it was read last."""
        before, entry = self._stored, self._store.read(RUN, limit=1).entries.get(RUN)
        try:
            number = document(Run, entry.value).number if entry is not None else FIRST_RUN
        except RecordError as error:
            self.unreadable, number = True, self.number
            if not self._named:
                self._named = True
                self._log_line(unreadable_text(Run, RUN, error))
        else:
            self.unreadable = False
        self._stored = StoredRun(number, entry)
        check_run(self.number, number)
        return before.unchanged() != self._stored.unchanged()

    def _is_still_unreadable(self) -> bool:
        self._has_changed()
        return self.unreadable

    @property
    def reachable(self) -> bool:
        """Returns whether the last request to the store was answered."""
        return self._store.reachable

    @property
    def last_outage_end_s(self) -> float:
        """Returns when the store last came back after an outage; 0.0 if it had none."""
        return self._store.last_outage_end_s

    @property
    def history(self) -> History:
        """Returns how often the store was found to have lost its data."""
        return self._store.history

    def read(self, prefix: str, *, limit: int = 0) -> PrefixState:
        """Returns entries whose key begins with `prefix`: see `Store`."""
        return self._store.read(prefix, limit=limit)

    def count(self, prefix: str, revision: int) -> int:
        """Returns how many entries existed under `prefix` at a revision."""
        return self._store.count(prefix, revision)

    def watch(self, prefix: str, changed: Callable[[PrefixState], None]) -> Watch:
        """Calls `changed` with the whole of `prefix` now and after every change."""
        return self._store.watch(prefix, changed)

    def lease(self, ttl_s: int, *, on_lost: Callable[[], None] | None = None) -> Lease:
        """Returns a new lease."""
        return self._store.lease(ttl_s, on_lost=on_lost)

    def close(self) -> None:
        """Ends all watches and keepalives."""
        self._store.close()
