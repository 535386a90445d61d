"""Strikes islands in the middle of a phase of a round."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from elasticzero.launcher.islands.documents import Documents, RoundDocuments
from elasticzero.launcher.local.cluster import Cluster, Node
from elasticzero.launcher.protocol.rounds.documents import Fragment, IslandReport
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.etcd.store import EtcdStore
from elasticzero.processes import descendants
from tests.support.deadlines import patience

PATIENCE_S = 60.0
FAULTS = ("kill", "kill a worker", "freeze", "drain", "join")
ROLES = ("lead", "another")
"""Roles of the island that is struck."""

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


def cells() -> Iterator[tuple[str, str, str]]:
    """Yields each fault in each phase, to an island of each role. Of one that comes, nobody has a
    role yet."""
    for fault in FAULTS:
        for phase in PHASES:
            for role in ROLES[: 1 if fault == "join" else 2]:
                yield fault, phase, role


def send_all(node: Node, number: signal.Signals) -> None:
    """Sends a signal to all processes of a node."""
    for pid in (node.process.pid, *descendants(node.process.pid)):
        os.kill(pid, number)


def strike(cluster: Cluster, victim: str, fault: str, hold: Path) -> bool:
    """Strikes an island; returns whether it is to come to the end with the others.

    Args:
        cluster: The nodes.
        victim: The island.
        fault: One of `FAULTS`.
        hold: The file for whose end a newcomer waits.
    """
    node = cluster.nodes[victim]
    match fault:
        case "kill":
            cluster.kill_node(node)
        case "kill a worker":
            cluster.kill_worker(node)
        case "freeze":
            send_all(node, signal.SIGSTOP)
        case "drain":
            cluster.drain(node)
        case "join":
            hold.unlink()
    return fault in ("kill a worker", "join")


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

    def wait_for_victim(self, phase: str, role: str, after: int, newcomer: str) -> str:
        """Returns the island to strike, once a round is in a phase for it.

        Args:
            phase: One of `PHASES`.
            role: One of `ROLES`.
            after: Round that must be committed before.
            newcomer: An island that is no candidate.
        """
        reports = self.wait("three islands", lambda read: len(read.reports) >= 3).reports
        lead, other, *_ = [name for name in reports if name != newcomer]
        victim = lead if role == "lead" else other
        self.wait_for(phase, victim, after)
        return victim

    def close(self) -> None:
        self._documents.close()
        self._store.close()
