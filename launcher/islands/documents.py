"""Reads and writes the documents of the rounds in the store, and keeps this island registered.

Keys: `rounds/state` has the one document, and `rounds/islands/<name>` each island's report, under
its lease. What cannot be read counts as absent, and is named once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from elasticzero.errors import StoreUnavailable
from elasticzero.launcher.protocol.documents import to_bytes
from elasticzero.launcher.protocol.rounds.documents import IslandReport, Rounds
from elasticzero.launcher.store.api import (
    Condition,
    Entry,
    Lease,
    LeaseLost,
    PrefixState,
    Store,
    is_before,
    unchanged,
)
from elasticzero.serialization import RecordError, decode, parse_json
from elasticzero.text import shown

STATE, REPORTS = "rounds/state", "rounds/islands/"
PREFIX = "rounds/"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Holds the documents of the rounds as of one moment."""

    rounds: Rounds | None
    """None: there is none."""
    reports: Mapping[str, IslandReport]
    """Reports of islands by name, in the order of their registrations."""
    basis: Mapping[str, Entry]
    """The entries that they were read from, by key."""


def forget_past_rounds(store: Store) -> None:
    """Deletes the rounds of a job that is begun again, unless islands have begun others already.

    Args:
        store: The part of etcd that all islands of the job share.

    Raises:
        StoreUnavailable: The store does not answer.
    """
    entries = store.read(PREFIX).entries
    state, living = entries.get(STATE), [key for key in entries if key.startswith(REPORTS)]
    if state is not None and not living:
        store.write({}, deletes=[STATE], conditions=[unchanged(STATE, state)])


class Followed:
    """Follows a part of the store. What cannot be read counts as absent, and is named once."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        changed: Callable[[], None],
        log_line: Callable[[str], None],
    ) -> None:
        """Begins to follow it.

        Args:
            store: The store.
            prefix: What the keys begin with.
            changed: Called after each change, in a thread of the store.
            log_line: Receives a line about a document that cannot be read.
        """
        self._changed, self._log_line = changed, log_line
        self._lock = threading.Lock()
        self._newest: PrefixState | None = None
        self._read: dict[str, tuple[int, Any]] = {}
        """Document of each key, with the revision at which it was written."""
        self._watch = store.watch(prefix, self._take)

    def _take(self, state: PrefixState) -> None:
        with self._lock:
            self._newest = state
        self._changed()

    @property
    def state(self) -> PrefixState | None:
        """Returns what the store has said last; None: nothing yet."""
        with self._lock:
            return self._newest

    def document(self, kind: type[T], entry: Entry) -> T | None:
        """Returns what an entry says; None: that cannot be read."""
        before = self._read.get(entry.key)
        if before is None or before[0] != entry.mod_revision:
            self._read[entry.key] = before = entry.mod_revision, self._decoded(kind, entry)
        value: T | None = before[1]
        return value

    def _decoded(self, kind: type[T], entry: Entry) -> T | None:
        try:
            value: T = decode(kind, parse_json(entry.value, entry.key), entry.key)
        except RecordError as error:
            self._log_line(f"{shown(entry.key)} cannot be read, and counts as absent: {error}")
            return None
        return value

    def close(self) -> None:
        """Ends the watch."""
        self._watch.close()


class RoundDocuments:
    """Follows the documents of the rounds, and writes this island's."""

    def __init__(
        self,
        store: Store,
        island: str,
        ttl_s: int,
        changed: Callable[[], None],
        log_line: Callable[[str], None],
    ) -> None:
        """Begins to follow; nothing is written yet.

        Args:
            store: The part of etcd that all islands of the job share.
            island: Name of this island.
            ttl_s: Seconds after which its registration lapses if it is not renewed.
            changed: Called after each change, in a thread of the store.
            log_line: Receives a line about a document that cannot be read.
        """
        self._store = store
        self._key = REPORTS + island
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        self._written: bytes | None = None
        """Report that was written last, under the present lease."""
        self._written_at = 0, 0
        """History and revision of that write."""
        self._followed = Followed(store, PREFIX, changed, log_line)

    @property
    def is_known(self) -> bool:
        """Returns whether the store has said what there is."""
        return self._followed.state is not None

    def read(self) -> Documents:
        """Returns what the store has said last."""
        state, document = self._followed.state, self._followed.document
        entries = {} if state is None else state.entries
        ordered = sorted(
            (entry for key, entry in entries.items() if key.startswith(REPORTS)),
            key=lambda entry: entry.create_revision,
        )
        read = ((e.key.removeprefix(REPORTS), document(IslandReport, e)) for e in ordered)
        entry = entries.get(STATE)
        return Documents(
            rounds=None if entry is None else document(Rounds, entry),
            reports={name: report for name, report in read if report is not None},
            basis=entries,
        )

    def put_report(self, report: IslandReport) -> None:
        """Writes this island's report, and renews its registration where that has lapsed; raises
        `StoreUnavailable`."""
        if self._lease is None or self._lease.lost:
            self._lease, self._written = self._store.lease(self._ttl_s), None
        data = to_bytes(report)
        state = self._followed.state
        entry = None if state is None else state.entries.get(self._key)
        is_unseen = state is None or is_before(state, self._written_at)
        if data == self._written and (is_unseen or (entry is not None and entry.value == data)):
            return
        try:
            revision = self._store.write({self._key: data}, lease=self._lease)
            self._written_at = 0 if state is None else state.history, revision or 0
            self._written = data
        except LeaseLost:
            self._lease = None

    def put_rounds(self, rounds: Rounds, read: Documents) -> bool:
        """Writes the document of the rounds if it is as it was read, and this island is registered
        still.

        Args:
            rounds: What is written.
            read: What it was decided from.

        Returns:
            Whether it was written.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        entries = read.basis
        own_entry = entries.get(self._key)
        if own_entry is None:
            return False
        registered = Condition(key=self._key, create_revision=own_entry.create_revision)
        conditions = [unchanged(STATE, entries.get(STATE)), registered]
        return self._store.write({STATE: to_bytes(rounds)}, conditions=conditions) is not None

    def forget(self) -> None:
        """Ends this island's registration, as it begins anew; raises `StoreUnavailable`."""
        self._written = None
        self._store.write({}, deletes=[self._key])

    def leave(self) -> None:
        """Ends the registration, if there is one; another report may begin another one."""
        lease, self._lease, self._written = self._lease, None, None
        if lease is not None:
            with suppress(StoreUnavailable):
                lease.close(revoke=True)

    def close(self) -> None:
        """Ends the watch and the registration."""
        self._followed.close()
        self.leave()
