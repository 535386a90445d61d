"""What a watch told, for tests that wait until it told something."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elasticzero.launcher.store.api import PrefixState

DEADLINE_S = 20.0
"""Generous: only a test that fails waits so long."""


class Told:
    """A callback for `Store.watch` that keeps every snapshot, in order."""

    def __init__(self) -> None:
        self.snapshots: list[PrefixState] = []
        self.threads: set[int] = set()
        self._changed = threading.Condition()

    def __call__(self, snapshot: PrefixState) -> None:
        with self._changed:
            self.snapshots.append(snapshot)
            self.threads.add(threading.get_ident())
            self._changed.notify_all()

    def until(self, so: Callable[[PrefixState], bool]) -> PrefixState:
        """The first snapshot told, already or from now on, that satisfies `so`."""
        with self._changed:
            self._changed.wait_for(lambda: any(map(so, self.snapshots)), DEADLINE_S)
            for snapshot in self.snapshots:
                if so(snapshot):
                    return snapshot
            last = self.snapshots[-1] if self.snapshots else None
        raise AssertionError(f"never told what was waited for; told last: {last}")

    def values(self) -> list[dict[str, bytes]]:
        return [{k: e.value for k, e in s.entries.items()} for s in self.snapshots]


def has(**values: bytes) -> Callable[[PrefixState], bool]:
    """A snapshot that holds exactly these keys (`a__b` stands for a/b) and values."""
    expected = {key.replace("__", "/"): value for key, value in values.items()}
    return lambda snapshot: {k: e.value for k, e in snapshot.entries.items()} == expected
