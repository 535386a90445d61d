"""Caches what one agent has read from the store: the newest state of each prefix it follows.

Store threads put states in; the agent's loop takes frozen values out. Times are this machine's
monotonic clock, taken when a thing was first seen here. A document that cannot be read is named
once, and ends nothing: see `decoding`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from elasticzero.launcher.protocol.documents import (
    UNSTATED,
    Alarm,
    Control,
    Done,
    Member,
    Proposal,
    Report,
    World,
    compare_runs,
    merged,
    outranks,
)
from elasticzero.launcher.store.api import Entry, PrefixState, Store, Watch
from elasticzero.launcher.store.decoding import (
    check_followed,
    check_place,
    document,
    member_at,
    unreadable_text,
)
from elasticzero.serialization import RecordError
from elasticzero.spans import STRATEGIES

T = TypeVar("T")

WORLD, CONTROL, DONE, ALARM, MEMBERS, REPORTS, NEXT = (
    "world",
    "control",
    "done",
    "alarm/",
    "members/",
    "reports/",
    "next",
)
NO_REQUESTS = Control()
MAX_NAMED = 32
"""Maximum number of documents that are named because they cannot be read."""
RETAINED = (WORLD, CONTROL, DONE, ALARM)
"""Prefixes whose documents stay valid although the store has lost them."""


def _ignore(line: str) -> None:
    return


class WatchCache:
    """Follows prefixes of the store and reads documents out of their newest snapshots.

    If the store has lost its data, the documents that it held before stay valid until
    `drop_retained` is called: of two worlds the one that outranks the other, with its alarm and its
    end. A document of another run of the job than the agent's counts as absent.
    """

    def __init__(
        self,
        store: Store,
        changed: Callable[[], None],
        read_document: Callable[[type[Any], bytes], Any] = document,
        *,
        run: int = UNSTATED,
        log_line: Callable[[str], None] = _ignore,
        strategies: Collection[str] = STRATEGIES,
    ) -> None:
        """Creates a cache that follows no prefix yet.

        Args:
            store: The job's part of etcd.
            changed: Called after each change, in a thread of the store.
            read_document: Returns a document of the class from its stored bytes; raises
                `RecordError` if they are none.
            run: Number of the agent's run of the job.
            log_line: Receives a line that begins with the key, once for each key whose document
                cannot be read.
            strategies: Names of the strategies of worlds that can be followed; any other world
                cannot be read.
        """
        self._strategies = strategies
        self._store = store
        self._read = read_document
        self._log_line = log_line
        self._changed = changed
        self._run = run
        self.later_run = UNSTATED
        """Highest number of a later run that a document has stated."""
        self._lock = threading.Lock()
        self._latest: dict[str, PrefixState] = {}
        self._subscriptions: dict[str, Watch] = {}
        self._decoded: dict[str, tuple[Entry, Any]] = {}
        """Entry of each key, with the document that it held; None where it cannot be read."""
        self._named: set[str] = set()
        """Keys of documents that cannot be read, and were named."""
        self._worlds: tuple[tuple[Entry, World | None], ...] = ()
        """Entries of the last two worlds, with what they hold; None: it cannot be read."""
        self._last_world: World | None = None
        """Newest world that could be read."""
        self._world_unread = False
        """True if the store has held one since that cannot be read: this node leaves."""
        self._retained: dict[str, Entry] = {}
        """Entry of each key in the store before it lost its data."""
        self._retained_at: int | None = None
        """Lowest revision of a state from which an entry was retained, though no other history has
        begun; None: there is none."""
        self._suspected_history: int | None = None
        """History in which the world shrank: what the store said after that is of another one."""
        self._without_alarm: World | None = None
        """World whose alarm is gone, where nothing else tells of a loss. A later world, of which
        this agent is about to be told, would have taken the alarm along."""
        self._gathered: dict[str, tuple[PrefixState, dict[str, Any]]] = {}
        """State of each prefix, with its documents by node."""

    def follow(self, prefixes: Iterable[str]) -> None:
        """Follows exactly these prefixes from now on."""
        requested = set(prefixes)
        if requested == self._subscriptions.keys():
            return
        for prefix in sorted(self._subscriptions.keys() - requested):
            self._subscriptions.pop(prefix).close()
            with self._lock:
                self._latest.pop(prefix, None)
            self._gathered.pop(prefix, None)
            for key in [key for key in self._decoded if key.startswith(prefix)]:
                del self._decoded[key]
        for prefix in sorted(requested - self._subscriptions.keys()):
            self._subscriptions[prefix] = self._store.watch(prefix, self._take(prefix))

    def _take(self, prefix: str) -> Callable[[PrefixState], None]:
        def take(snapshot: PrefixState) -> None:
            self.put(prefix, snapshot)
            self._changed()

        return take

    def put(self, prefix: str, snapshot: PrefixState) -> None:
        """Takes in the state of a prefix, unless a newer one is here."""
        with self._lock:
            previous = self._latest.get(prefix)
            if previous is None:
                self._latest[prefix] = snapshot
            elif (previous.history, previous.revision) <= (snapshot.history, snapshot.revision):
                self._latest[prefix] = snapshot
                if prefix in RETAINED:
                    self._note_loss(prefix, previous, snapshot)

    def _note_loss(self, prefix: str, previous: PrefixState, current: PrefixState) -> None:
        """Retains what the store held, where it has lost its data, or may have.

        In one history an alarm goes with its generation, but the world stays, and only ever grows.

        Args:
            prefix: The followed prefix.
            previous: State of the prefix before.
            current: State of the prefix now.
        """
        if previous.history != current.history:
            if previous.history != self._suspected_history:
                self._retain(previous.entries)
            return
        world = self._missed_alarm_of(previous, current) if prefix == ALARM else None
        if world is not None or (prefix == WORLD and self._has_shrunk(previous, current)):
            self._without_alarm = world if not self._retained else None
            self._retain(previous.entries)
            if self._may_be_restarted(previous, current):
                at = self._retained_at
                self._retained_at = previous.revision if at is None else min(at, previous.revision)
            for other in (CONTROL, DONE, ALARM):
                if other in self._latest:
                    self._retain(self._latest[other].entries)
            self._suspected_history = previous.history
        elif prefix == WORLD and self._took_alarm_along(current):
            self._drop_retained()

    def _missed_alarm_of(self, previous: PrefixState, current: PrefixState) -> World | None:
        """Returns the present world, as far as it is known, if its alarm is gone."""
        entry = self._entry(WORLD, WORLD)
        world = self._world_in(entry) if entry is not None else None
        if world is None:
            return None
        key = f"{ALARM}{world.generation}"
        return world if key in previous.entries and key not in current.entries else None

    def _took_alarm_along(self, current: PrefixState) -> bool:
        """Returns whether the store holds a world after the one whose alarm is gone."""
        before, entry = self._without_alarm, current.entries.get(WORLD)
        after = self._world_in(entry) if entry is not None else None
        return before is not None and after is not None and outranks(after, before)

    def _has_shrunk(self, previous: PrefixState, current: PrefixState) -> bool:
        """Returns whether the data have shrunk: a world is gone, or is there at another revision,
        or is another one that does not follow it."""
        before, after = previous.entries.get(WORLD), current.entries.get(WORLD)
        if before is None or before == after:
            return False
        if after is None:
            return self._world_in(before) is not None
        one, other = self._world_in(before), self._world_in(after)
        if one is None or other is None:
            return False
        return one.token == other.token or outranks(one, other)

    def _world_in(self, entry: Entry) -> World | None:
        """Returns the world that an entry holds, decoded once; None if it cannot be read.

        Any thread may ask.
        """
        for other, world in self._worlds:
            if other is entry or other == entry:
                return world
        read: World | None = None
        with suppress(RecordError):
            read = self._read(World, entry.value)
        self._worlds = ((entry, read), *self._worlds[:1])
        return read

    def _may_be_restarted(self, previous: PrefixState, current: PrefixState) -> bool:
        """Returns whether a job that was begun again could look like data that have shrunk.

        It cannot where the key of the run would tell, nor where the same world is there at another
        revision.
        """
        latest = self._latest.get(WORLD)
        of_alarms = latest.entries.get(WORLD) if latest is not None else None
        before, after = previous.entries.get(WORLD) or of_alarms, current.entries.get(WORLD)
        if before is None:
            return True
        world = self._world_in(before)
        following = self._world_in(after) if after is not None else None
        if world is None:
            return True
        same = following is not None and following.token == world.token
        return world.run == UNSTATED and not same

    def _retain(self, entries: Mapping[str, Entry]) -> None:
        before = self._retained.get(WORLD)
        retained = {**self._retained, **entries}
        if WORLD in entries:
            kept = self._world_in(before) if before is not None else None
            world = self._world_in(entries[WORLD])
            if before is not None and kept is not None and (world is None or outranks(kept, world)):
                retained[WORLD] = before
            elif world is None:
                del retained[WORLD]
        self._retained = retained

    @property
    def retained(self) -> Mapping[str, Entry]:
        """Returns what the store held, by key, before it lost its data, or may have lost them."""
        return self._retained

    def is_retained_since(self, revision: int) -> bool:
        """Returns whether the store held what is retained at this revision or after it."""
        return self._retained_at is None or self._retained_at >= revision

    def drop_retained(self) -> None:
        """Makes the store's documents alone valid from now on: it holds what was retained, or
        better."""
        with self._lock:
            self._drop_retained()

    def _drop_retained(self) -> None:
        self._retained = {}
        self._retained_at = self._suspected_history = self._without_alarm = None

    def get(self, prefix: str) -> PrefixState | None:
        """Returns the newest state of a followed prefix; None before the first."""
        return self._latest.get(prefix)

    def world(self) -> tuple[World | None, int]:
        """Returns the world, and the revision of the store's document (0: there is none).

        Where the store's cannot be read, the newest one that could be is the world.
        """
        entry = self._entry(WORLD, WORLD)
        read = self._document(entry, World) if entry is not None else None
        stored = self._of_run(read)
        revision = entry.mod_revision if entry is not None else 0
        if stored is not None:
            self._last_world, self._world_unread = stored, False
        elif read is None and (entry is not None or self._world_unread):
            self._world_unread = True
            return self._last_world, revision
        return (self._retained_world(stored) or stored), revision

    def unreadable(self, kind: type[World] | type[Done]) -> Entry | None:
        """Returns the world, or the end, that the store holds and that cannot be read; None: it can
        be read, or there is none."""
        key = WORLD if kind is World else DONE
        entry = self._entry(key, key)
        return entry if entry is not None and self._document(entry, kind) is None else None

    def lost_world(self) -> World | None:
        """Returns the world that the store has lost, where it outranks the one that the store holds
        now; None also where that one cannot be read."""
        entry = self._entry(WORLD, WORLD)
        read = self._document(entry, World) if entry is not None else None
        return self._retained_world(self._of_run(read)) if read or entry is None else None

    def _retained_world(self, stored: World | None) -> World | None:
        entry = self._retained.get(WORLD)
        if entry is None:
            return None
        retained = self._of_run(self._document(entry, World, "kept"))
        return retained if retained is not None and outranks(retained, stored) else None

    def done(self) -> Done | None:
        retained = self._retained.get(DONE)
        if retained is not None:
            return self._of_run(self._document(retained, Done))
        entry, ended, world = self._entry(DONE, DONE), self.get(DONE), self.get(WORLD)
        if entry is None or ended is None:
            return None
        if world is not None and world.history < ended.history:
            return None  # which world has ended is about to be told
        return self._of_run(self._document(entry, Done)) if self.lost_world() is None else None

    def control(self) -> Control:
        entry, retained = self._entry(CONTROL, CONTROL), self._retained.get(CONTROL)
        stored = self._of_run(self._document(entry, Control)) if entry is not None else None
        before = self._document(retained, Control, "kept") if retained is not None else None
        before = self._of_run(before)
        if before is None:
            return stored or NO_REQUESTS
        return merged(before, stored or NO_REQUESTS)

    def proposal(self, world: World | None) -> Proposal | None:
        """Returns the proposal of this very world; None: there is none that can be read."""
        entry = self._entry(NEXT, NEXT)
        read = self._of_run(self._document(entry, Proposal)) if entry is not None else None
        return read if read is not None and world is not None and read.of == world.token else None

    def alarm(self, generation: int) -> Alarm | None:
        """Returns the alarm of a generation; one that cannot be read is an alarm too."""
        key = f"{ALARM}{generation}"
        entry = self._entry(ALARM, key) or self._retained.get(key)
        if entry is None:
            return None
        unknown = f"the alarm of generation {generation} in etcd cannot be read"
        odd = Alarm(node="", kind="other", reason=unknown, run=self._run)
        return self._of_run(self._document(entry, Alarm) or odd)

    def reports(self, generation: int) -> Mapping[str, Report] | None:
        """Returns reports by node; None while they are not followed. The object is the same as long
        as nothing changes."""
        return self._gather(reports_of(generation), Report)

    def members(self) -> Mapping[str, Member] | None:
        """Returns members by node, the oldest registration first; None while they are not followed.
        The object is the same as long as nothing changes."""
        return self._gather(MEMBERS, Member)

    def member(self, key: str) -> Member | None:
        """Returns the registration at a key that is followed by itself; None: there is none that
        can be read."""
        entry = self._entry(key, key)
        return self._of_run(self._document(entry, Member)) if entry is not None else None

    def _gather(self, prefix: str, kind: type[T]) -> Mapping[str, T] | None:
        """Returns the documents of a followed folder by node, the oldest first."""
        snapshot = self.get(prefix)
        if snapshot is None:
            return None
        cached = self._gathered.get(prefix)
        if cached is not None and cached[0] is snapshot:
            return cached[1]
        before, last = (cached[0].entries, cached[1]) if cached is not None else ({}, {})
        documents: dict[str, T] = {}
        for entry in sorted(snapshot.entries.values(), key=lambda entry: entry.create_revision):
            name = entry.key[len(prefix) :]
            if before.get(entry.key) is entry:  # of a thousand documents one has changed
                value = last.get(name)
            else:
                value = self._of_run(self._document(entry, kind))
            if value is not None:
                documents[name] = value
        self._gathered[prefix] = (snapshot, documents)
        return documents

    def _entry(self, prefix: str, key: str) -> Entry | None:
        snapshot = self.get(prefix)
        return snapshot.entries.get(key) if snapshot is not None else None

    def _of_run(self, document: T | None) -> T | None:
        """Returns a document of the agent's run; None for one of another run, and a later one is
        noted; None also for none."""
        if document is None:
            return None
        run: int = getattr(document, "run", UNSTATED)
        order = compare_runs(run, self._run)
        if order > 0:
            self.later_run = max(self.later_run, run)
        return document if order == 0 else None

    def _document(self, entry: Entry, kind: type[T], place: str = "") -> T | None:
        """Returns the document of an entry, decoded once as long as it does not change; None if it
        cannot be read.

        Args:
            entry: The stored bytes.
            kind: The document's class.
            place: Where the document is held, if not in the store.
        """
        key = f"{entry.key} {place}" if place else entry.key
        cached = self._decoded.get(key)
        if cached is None or (cached[0] is not entry and cached[0] != entry):
            cached = self._decoded[key] = (entry, self._decode(entry, kind))
        result: T | None = cached[1]
        return result

    def _decode(self, entry: Entry, kind: type[T]) -> T | None:
        world: Any = self._world_in(entry) if kind is World else None
        try:
            read: T = world if world is not None else self._read(kind, entry.value)
            check_place(entry, read)
            check_followed(read, self._strategies)
        except RecordError as error:
            if entry.key not in self._named and len(self._named) < MAX_NAMED:
                self._named.add(entry.key)
                self._log_line(unreadable_text(kind, entry.key, error))
            return None
        return read


def reports_of(generation: int) -> str:
    """Returns the prefix of a generation's reports."""
    return f"{REPORTS}{generation}/"


def members_of(
    snapshot: PrefixState, log_line: Callable[[str], None] = _ignore
) -> dict[str, Member]:
    """Returns the registrations in a state of `members/`, oldest first.

    Args:
        snapshot: The state.
        log_line: Receives a line on each registration that cannot be read.
    """
    members = {}
    for entry in sorted(snapshot.entries.values(), key=lambda entry: entry.create_revision):
        try:
            member = member_at(entry)
        except RecordError as error:
            log_line(unreadable_text(Member, entry.key, error))
        else:
            members[member.node] = member
    return members


class FirstSeen:
    """Remembers the time at which each key first appeared."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}

    def update(self, keys: Iterable[str], now_s: float) -> dict[str, float]:
        """Returns the present keys, each with the time it was first seen in an unbroken row."""
        first = self._first
        self._first = {key: first.get(key, now_s) for key in keys}
        return self._first

    def since(self, generation: int, holds: bool, now_s: float) -> float | None:
        """Returns since when a state has lasted in this generation; None if it does not hold.

        Args:
            generation: Number of the generation.
            holds: Whether the state holds now.
            now_s: Present time.
        """
        if not holds:
            self._first = {}
            return None
        key = str(generation)
        return self.update((key,), now_s)[key]
