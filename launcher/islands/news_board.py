"""Passes what the head of an island tells its workers on to the island's other nodes.

The key `rounds/news`, in the island's part of the store, has the last news. A node writes it only
over what it has seen, so that a head of before cannot write over what a later one has written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from elasticzero.ipc.rounds import RoundNews
from elasticzero.launcher.islands.documents import Followed
from elasticzero.launcher.protocol.documents import to_bytes
from elasticzero.launcher.store.api import Store, is_before, unchanged

NEWS = "rounds/news"


RECENT = 4
"""Number of the last news that are kept: all nodes see most of them, and their ranks then agree on
one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandNews:
    """Says what the workers of an island are to know."""

    run: int
    """The island's run, and its generation, in which it was written."""
    generation: int
    recent: tuple[RoundNews, ...]
    """The last news, the newest one last."""

    @property
    def place(self) -> tuple[int, int]:
        """Returns the run and the generation."""
        return self.run, self.generation

    def followed_by(self, news: RoundNews) -> IslandNews:
        """Returns what there is once there is further news."""
        return replace(self, recent=(*self.recent, news)[-RECENT:])


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
        self._store = store
        self._written = 0, 0
        """History and revision of this node's last write."""
        self._followed = Followed(store, NEWS, changed, log_line)

    def read(self) -> IslandNews | None:
        """Returns what was written last; None: there is nothing that can be read."""
        state = self._followed.state
        entry = None if state is None else state.entries.get(NEWS)
        return None if entry is None else self._followed.document(IslandNews, entry)

    def keep(self, doc: IslandNews) -> None:
        """Has a document be there, unless a later generation has written its own; what is not
        written now is written by a later call.

        Args:
            doc: The document.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        state = self._followed.state
        if state is None or is_before(state, self._written):
            return  # what was written is not seen yet
        present = self.read()
        if present == doc or (present is not None and present.place > doc.place):
            return
        conditions = [unchanged(NEWS, state.entries.get(NEWS))]
        revision = self._store.write({NEWS: to_bytes(doc)}, conditions=conditions)
        self._written = state.history, revision or 0

    def close(self) -> None:
        """Ends the watch."""
        self._followed.close()
