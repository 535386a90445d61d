"""Watches the rounds of islands, so that a fault comes in the middle of a phase of one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from elasticzero.launcher.islands.documents import Documents, RoundDocuments
from elasticzero.launcher.protocol.rounds.documents import Fragment, IslandReport
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.etcd.store import EtcdStore
from tests.support.deadlines import patience

PATIENCE_S = 60.0

Reports = Mapping[str, IslandReport]


def _trains(fragment: Fragment, reports: Reports, island: str) -> bool:
    return fragment.closing is None and reports[island].fragments[0].contribution is None


def _has_contributed(fragment: Fragment, reports: Reports, island: str) -> bool:
    return fragment.closing is None and reports[island].fragments[0].contribution is not None


def _sums(fragment: Fragment, reports: Reports) -> int:
    closing = fragment.closing
    assert closing is not None
    sums = [report.fragments[0].sum for report in reports.values()]
    return sum(one is not None and one.attempt == closing.attempt for one in sums)


def _is_summed_up(fragment: Fragment, reports: Reports, island: str) -> bool:
    return fragment.closing is not None and _sums(fragment, reports) == 0


def _is_with_one(fragment: Fragment, reports: Reports, island: str) -> bool:
    return fragment.closing is not None and _sums(fragment, reports) == 1


def _is_committed(fragment: Fragment, reports: Reports, island: str) -> bool:
    return reports[island].fragments[0].outer != fragment.outer


PHASES: dict[str, Callable[[Fragment, Reports, str], bool]] = {
    "it trains": _trains,
    "it has contributed": _has_contributed,
    "a round is summed up": _is_summed_up,
    "one island has the result": _is_with_one,
    "a round is committed that it has not taken": _is_committed,
}
"""Says for each phase whether a round is in it, as an island sees it."""


class RoundsWatch:
    """Follows the documents of the rounds of a job."""

    def __init__(self, endpoint: str, job: str) -> None:
        self._store = EtcdStore([endpoint], job_prefix(job))
        self._changed = threading.Event()
        self._documents = RoundDocuments(self._store, "watch", 2, self._changed.set, print)

    def wait(self, what: str, is_so: Callable[[Documents], bool]) -> Documents:
        """Returns the documents of the first moment at which something is so.

        Args:
            what: Names it in the error of a wait that is too long.
            is_so: Returns whether it is.
        """
        deadline_s = time.monotonic() + patience(PATIENCE_S)
        while True:
            self._changed.clear()
            read = self._documents.read()
            if is_so(read):
                return read
            assert self._changed.wait(deadline_s - time.monotonic()), f"{what}: {read}"

    def wait_for(self, phase: str, island: str, after: int) -> Documents:
        """Returns the documents once a round is in a phase.

        Args:
            phase: One of `PHASES`.
            island: The island that sees it so.
            after: Round that must be committed before.
        """

        def is_so(read: Documents) -> bool:
            if read.rounds is None or island not in read.reports:
                return False
            fragment = read.rounds.fragments[0]
            return fragment.outer.round > after and PHASES[phase](fragment, read.reports, island)

        return self.wait(phase, is_so)

    def close(self) -> None:
        self._documents.close()
        self._store.close()
