"""Writes what an agent knows of its job into a store that has lost its data.

Rules:
 1. Of two histories of a job, the one whose world outranks the other's goes on
    (`documents.outranks`), with its alarm, its end, and what operators asked in either. So nodes
    that came to the emptied store, and may have begun a world there, join the nodes that were there
    before.
 2. All of it is written in one transaction, on condition that everything is as it was just read.
    Of two agents that write at once, one reads what the other wrote, and finds nothing missing.
 3. The members of the world write one after another, the first of them at once, nodes without a
    place last: mostly one agent writes, and the others only read.
 4. Until then, what was known counts on for this agent, and its workers train as before.
 5. The record of the job's token stays in the store for the whole life of the job. Where the lease
    or the world is gone, but no revision tells of a loss, that record shows whether there was one.
    So does a world, or an alarm of its generation, that is gone while this node is registered: no
    job is begun again (--restart) before its nodes are gone. An alarm that went with a later world
    is no loss; the world is read anew before that is decided, for its watch may tell late.
 6. A release without runs may have begun the job again before this node came back. So a world
    without a run that is gone, or is another one, shows a loss only where this node's registration
    is older than the last look at that world.
 7. The key of the job's run is read before anything else. If it is of a later run, this agent
    writes nothing and ends (`job_run`). If it is gone, or of an earlier run, the store has lost its
    data, and the number of this agent's run is written with all else.
 8. A registration in a restored backup may be that of a node that is gone since. For twice a TTL
    and a second no registration brings a node into a world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Protocol

from elasticzero.errors import StoreUnavailable
from elasticzero.launcher.protocol.documents import Run, to_bytes
from elasticzero.launcher.store.api import Entry, Store, unchanged
from elasticzero.launcher.store.job_run import RUN, check_run, number_in
from elasticzero.launcher.store.job_token import KEY, Agreed, is_record_of
from elasticzero.launcher.store.membership import Membership
from elasticzero.launcher.store.watch_cache import ALARM, CONTROL, DONE, WORLD, WatchCache

AGAIN_S = 0.3
"""Seconds until the next try, where the store did not answer or another agent wrote first."""
TURN_S, LAST_TURN_S = 0.02, 2.0
"""Seconds by which each member of the world writes later than the one before it, and the longest
such wait, which is also that of nodes without a place."""


class DataLossListener(Protocol):
    """Receives that the store has lost its data: see `ClusterObserver`."""

    def lost_data(self, now_s: float) -> None: ...

    def restored(self, so: bool) -> None: ...


class StoreRecovery:
    """Finds that the store has lost its data, and writes one agent's part of them anew."""

    def __init__(
        self,
        store: Store,
        observer: WatchCache,
        membership: Membership,
        listener: DataLossListener | None,
        agreed: Agreed | None,
        log_line: Callable[[str], None],
    ) -> None:
        """Begins in the history of the store in which the token was agreed on, or else in the
        present one.

        Args:
            store: The store that may lose its data.
            observer: What was read of it.
            membership: Registration of this node.
            listener: Called when a loss is noticed; None: nothing is.
            agreed: The job's token and its record in the store; None: there is no such record.
            log_line: Receives a sentence on what was lost, and one on what was written anew.
        """
        self._store = store
        self._observer = observer
        self._membership = membership
        self._listener = listener
        self._agreed = agreed
        self._log_line = log_line
        self._history = store.history.number if agreed is None else agreed.history
        self._lapses = membership.lapses
        self._due_s: float | None = None
        """Time at which this agent writes what it has; None: nothing is to be written."""
        self._loss_suspected = False
        self._check_record_after_s = 0.0
        """Time before which the token's record is not read."""

    @property
    def due_s(self) -> float:
        """Returns the time at which `poll` has something to do again; infinite: it has nothing to
        do until something changes."""
        changed = self._membership.lapses != self._lapses or self._is_another_history()
        if changed:
            return 0.0
        if self._due_s is not None:
            return self._due_s
        suspected = self._loss_suspected or self._observer.retained
        return self._check_record_after_s if suspected else inf

    def adopt(self, agreed: Agreed) -> None:
        """Replaces the job's token by another one from now on."""
        self._agreed = agreed

    def poll(self, now_s: float) -> None:
        """Checks whether the store has lost its data; where it has, writes what is missing.

        Raises `RunEnded` where a later run of the job has begun.
        """
        if self._membership.lapses != self._lapses:
            self._lapses, self._loss_suspected = self._membership.lapses, True
        loss_suspected = self._loss_suspected or bool(self._observer.retained)
        unknown = loss_suspected and self._due_s is None and not self._is_another_history()
        if unknown and now_s >= self._check_record_after_s:
            self._check_record(now_s)
        if self._is_another_history():
            self._begin(now_s)
        if self._due_s is not None and now_s >= self._due_s:
            self._due_s = now_s + AGAIN_S
            try:
                if self._restore():
                    self._due_s, self._loss_suspected = None, False
            except StoreUnavailable:
                pass  # the next try is due soon; what was known counts until then

    def _is_another_history(self) -> bool:
        """Returns whether the store has lost its data since this agent began to restore them."""
        return self._store.history.number != self._history

    def _begin(self, now_s: float) -> None:
        """Notes that another history has begun."""
        self._history = self._store.history.number
        world, _ = self._observer.world()
        me = self._membership.me
        index = world.find(me.node, me.incarnation) if world is not None else None
        self._due_s = now_s + (LAST_TURN_S if index is None else min(LAST_TURN_S, TURN_S * index))
        self._membership.lost_data(now_s)
        if self._listener is not None:
            self._listener.lost_data(now_s)
        on = "" if world is None else f"; generation {world.generation} goes on"
        self._log_line(f"etcd lost its data ({self._store.history.reason}){on}")

    def _check_record(self, now_s: float) -> None:
        """Reports a loss that no revision shows: the token's record, or a document, is gone."""
        self._check_record_after_s = now_s + AGAIN_S
        agreed = self._agreed
        try:
            check_run(self._membership.me.run, number_in(self._read(RUN)))
            record = self._read(KEY) if agreed is not None else None
            if self._observer.retained:  # an alarm may have gone with a world that is told later
                self._observer.put(WORLD, self._store.read(WORLD))
        except StoreUnavailable:
            return
        lapsed = self._loss_suspected or not self._membership.is_registered
        lapsed |= not self._observer.is_retained_since(self._membership.revision)
        self._loss_suspected = False
        same = record is not None and agreed is not None and record.mod_revision == agreed.revision
        if agreed is not None and not same:
            what = "is gone" if record is None else "was written anew"
            self._store.history.begin(f"the record of the job's token {what}", self._history)
        elif self._observer.retained and agreed is not None and not lapsed:
            self._store.history.begin("what it held is gone", self._history)
        else:
            self._observer.drop_retained()

    def _read(self, key: str) -> Entry | None:
        return self._store.read(key).entries.get(key)

    def _restore(self) -> bool:
        """Writes what is missing; returns False where that is to be tried again."""
        stored = self._reread()
        if self._is_another_history():
            return False
        record = stored.get(KEY)
        if self._listener is not None:
            self._listener.restored(record is not None and self._is_mine(record))
        puts, deletes = self._missing(stored)
        if puts or deletes:
            keys = sorted({WORLD, CONTROL, DONE, KEY, RUN, *puts})
            conditions = [unchanged(key, stored.get(key)) for key in keys]
            if self._store.write(puts, deletes=deletes, conditions=conditions) is None:
                return False
            self._log_line(
                f"this agent wrote anew what etcd had lost: {', '.join(_described(puts))}"
            )
            record = self._reread().get(KEY)
        if record is not None and self._agreed is not None and self._is_mine(record):
            self._agreed = self._agreed.at(record.mod_revision)
        self._observer.drop_retained()
        return True

    def _reread(self) -> dict[str, Entry]:
        """Returns what the store holds now, by key, with the run and the record of the token."""
        stored: dict[str, Entry] = {}
        run = self._read(RUN)
        check_run(self._membership.me.run, number_in(run))
        if run is not None:
            stored[RUN] = run
        for prefix in (WORLD, CONTROL, DONE, ALARM):
            snapshot = self._store.read(prefix)
            self._observer.put(prefix, snapshot)
            stored |= snapshot.entries
        record = self._read(KEY) if self._agreed is not None else None
        return stored if record is None else {**stored, KEY: record}

    def _is_mine(self, record: Entry) -> bool:
        return self._agreed is not None and is_record_of(record, self._agreed)

    def _missing(self, stored: Mapping[str, Entry]) -> tuple[dict[str, bytes], list[str]]:
        """Returns what is to be written, and deleted, so that the store holds what is known
        here."""
        observer, retained = self._observer, self._observer.retained
        world, _ = observer.world()
        wins = observer.lost_world() is not None
        puts: dict[str, bytes] = {WORLD: retained[WORLD].value} if wins else {}
        run = self._membership.me.run
        behind = run > number_in(stored.get(RUN))
        if behind:
            puts[RUN] = to_bytes(Run(number=run))
        of_run = {DONE: observer.done() is not None}
        if world is not None:
            of_run[f"{ALARM}{world.generation}"] = observer.alarm(world.generation) is not None
        for key, counts in of_run.items():
            if counts and key in retained and (behind or key not in stored):
                puts[key] = retained[key].value
        old = [key for key in stored if key == DONE or (behind and key.startswith(ALARM))]
        gone = [key for key in old if key not in puts and (behind or key not in retained)]
        deletes = gone if wins or behind else []
        control = to_bytes(observer.control())
        if CONTROL in retained and (CONTROL not in stored or stored[CONTROL].value != control):
            puts[CONTROL] = control
        if self._agreed is not None:
            record = stored.get(KEY)
            if record is None or (wins and not self._is_mine(record)):
                puts[KEY] = to_bytes(self._agreed.record)
        return puts, deletes


def _described(puts: Mapping[str, bytes]) -> list[str]:
    """Returns what was written, in words."""
    descriptions = {
        WORLD: "the generation and its members",
        CONTROL: "what operators asked",
        DONE: "the end of the job",
        KEY: "the record of the job's token",
        RUN: "the number of the job's run",
    }
    return [descriptions.get(key, "the alarm of the generation") for key in puts]
