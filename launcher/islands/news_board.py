"""Passes what the head of an island tells its workers on to the island's other nodes.

The key `rounds/news`, in the island's part of the store, has the newest news. A node writes it only
over what it has seen, so that a head of before cannot write over what a later one has written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from elasticzero.ipc.rounds import RoundNews
from elasticzero.launcher.protocol.documents import to_bytes
from elasticzero.launcher.store.api import PrefixState, Store, unchanged
from elasticzero.serialization import RecordError, decode, parse_json
from elasticzero.text import shown

NEWS = "rounds/news"


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandNews:
    """Says what the workers of an island are to know."""

    generation: int
    """The island's generation in which it was written."""
    news: RoundNews


class NewsBoard:
    """Reads and writes the news of one island."""

    def __init__(
        self, store: Store, changed: Callable[[], None], log_line: Callable[[str], None]
    ) -> None:
        """Begins to follow it.

        Args:
            store: The island's part of etcd.
            changed: Called after each change, in a thread of the store.
            log_line: Receives a line where it cannot be read.
        """
        self._store, self._changed, self._log_line = store, changed, log_line
        self._lock = threading.Lock()
        self._newest: PrefixState | None = None
        self._read: tuple[int, IslandNews | None] = 0, None
        """Revision of the entry that was read last, and what it says."""
        self._watch = store.watch(NEWS, self._take)

    def _take(self, state: PrefixState) -> None:
        with self._lock:
            self._newest = state
        self._changed()

    def read(self) -> IslandNews | None:
        """Returns the newest news; None: there is none that can be read."""
        with self._lock:
            entry = None if self._newest is None else self._newest.entries.get(NEWS)
        if entry is None:
            return None
        if entry.mod_revision != self._read[0]:
            try:
                doc = decode(IslandNews, parse_json(entry.value, entry.key), entry.key)
            except RecordError as error:
                doc = None
                self._log_line(f"{shown(NEWS)} cannot be read, and counts as absent: {error}")
            self._read = entry.mod_revision, doc
        return self._read[1]

    def put(self, doc: IslandNews) -> bool:
        """Writes news over what was read last; returns whether it is written, or a later generation
        has written its own.

        Args:
            doc: The news.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        with self._lock:
            state = self._newest
        if state is None:
            return False
        before = self.read()
        if before is not None and before.generation > doc.generation:
            return True
        conditions = [unchanged(NEWS, state.entries.get(NEWS))]
        return self._store.write({NEWS: to_bytes(doc)}, conditions=conditions) is not None

    def close(self) -> None:
        """Ends the watch."""
        self._watch.close()
