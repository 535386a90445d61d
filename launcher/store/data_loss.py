"""Finds from a store's answers that its data are not those that were there before.

etcd can lose its data: its directory is wiped, a backup is restored, another cluster stands behind
the same address. From then on the store tells another history, and what was known of it says
nothing about revisions, leases or keys any more.

Rules:
 1. An answer of another cluster begins another history.
 2. So does a linearizable answer at a lower revision than one that was known when it was asked for,
    and that of a write at no higher one.
 3. So does what a caller knows better (`begin`): revisions of a store that others use too may have
    passed the old ones before anything was asked of it.
 4. An answer to what was asked in an earlier history counts for nothing: it may be of either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["same", "lost", "late"]
"""Either the history goes on, or another one begins with this answer, or the answer is of an
earlier one."""


@dataclass(frozen=True, slots=True)
class HistoryPosition:
    """Holds what was known of the store when a request was sent."""

    number: int
    revision: int


def _ignore() -> None:
    return


class History:
    """Tracks the history that one connection sees; any thread may call it."""

    def __init__(self, on_loss: Callable[[], object] = _ignore) -> None:
        """Begins with history 0; `on_loss` is called each time that another one has begun, by the
        thread that has found it."""
        self._on_loss = on_loss
        self.number = 0
        """Number of the present history: how often the data were found to be others."""
        self.reason = ""
        """Sign by which that was found, the last time."""
        self._cluster = 0
        self._revision = 0
        self._lock = threading.Lock()

    @property
    def cluster(self) -> int:
        """Returns the id of the cluster that answered last; 0: none has."""
        with self._lock:
            return self._cluster

    def position(self) -> HistoryPosition:
        """Returns what is known now; take it before a request, and pass it with the answer."""
        with self._lock:
            return HistoryPosition(self.number, self._revision)

    def judge_response(
        self, position: HistoryPosition, cluster: int, revision: int = 0, *, wrote: bool = False
    ) -> Verdict:
        """Returns the verdict on an answer.

        Args:
            position: What was known when the request was sent.
            cluster: Id of the cluster that answered; 0 if it is not stated.
            revision: Revision of the answer; 0 if the answer was not linearizable.
            wrote: Whether the request was to put something, and it did.
        """
        with self._lock:
            if position.number != self.number:
                return "late"
            if cluster and self._cluster and cluster != self._cluster:
                reason = f"cluster {cluster:x} answers in the place of {self._cluster:x}"
            elif revision and revision < position.revision + wrote:
                reason = f"revision {position.revision} was followed by {revision}"
            else:
                self._cluster = cluster or self._cluster
                self._revision = max(self._revision, revision)
                return "same"
            self._begin(reason)
            self._cluster, self._revision = cluster, revision
        self._on_loss()
        return "lost"

    def begin(self, reason: str, number: int) -> bool:
        """Begins another history, as a caller has found in history `number`; returns False if it
        has begun already."""
        with self._lock:
            if number != self.number:
                return False
            self._begin(reason)
            self._revision = 0
        self._on_loss()
        return True

    def _begin(self, reason: str) -> None:
        self.number += 1
        self.reason = reason
