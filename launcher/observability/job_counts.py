"""Counts what has happened to a job, as far as one agent has seen it.

Pure. All members of a world see the same worlds and rounds, so that they count the same, and a node
that comes to lead has counted since it joined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal, get_args

from elasticzero.launcher.observability.metrics import PHASES
from elasticzero.launcher.protocol.documents import Report, World

LeaveSource = Literal["aws", "gcp", "azure", "operator", "signal"]
"""Source of a node's leave: a cloud's notice, an operator's drain, or a signal."""
PREEMPTIONS: tuple[LeaveSource, ...] = ("aws", "gcp", "azure", "signal")
MAX_NODES = 64
"""Maximum number of nodes that are no members and whose interruptions are remembered."""


def leave_source(reason: str) -> LeaveSource:
    """Returns what made a node leave, from the reason of its notice."""
    word = reason.partition(" ")[0].lower()
    if word == "drained":
        return "operator"
    return next((source for source in get_args(LeaveSource) if source == word), "signal")


def interrupting(before: World, after: World) -> set[str]:
    """Returns the nodes for which one world follows another: members that are not in it any more,
    and the one whose workers failed first."""
    nodes = {node for node, drawn in before.registrations() if after.find(node, drawn) is None}
    nodes |= {
        setback.node
        for setback in after.setbacks
        if setback.generation == before.generation and setback.blame != "peer"
    }
    return nodes


class JobCounts:
    """Holds the counts."""

    def __init__(self) -> None:
        self.preemptions: Counter[str] = Counter(dict.fromkeys(PREEMPTIONS, 0))
        """Nodes that left because of a notice or a signal, by source."""
        self.drains = 0
        """Nodes that operators have drained."""
        self.recoveries: Counter[str] = Counter()
        """Recoveries that came to a first step, by cause."""
        self.recovery_s: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        """Seconds of recoveries, by phase."""
        self.steps_lost = 0
        self.interruptions: dict[str, int] = {}
        """Number of worlds that ended because of a node, by node."""
        self._leaving: set[tuple[int, str]] = set()
        """Generations and nodes whose leaving is counted."""

    def world(self, before: World | None, after: World) -> None:
        """Notes that a world follows another one."""
        interrupted = interrupting(before, after) if before is not None else set()
        for node in interrupted:
            self.interruptions[node] = self.interruptions.pop(node, 0) + 1
        members = set(after.nodes)
        for node in members:
            self.interruptions.setdefault(node, 0)
        others = [node for node in self.interruptions if node not in members]
        for node in others[: max(0, len(others) - MAX_NODES)]:
            del self.interruptions[node]
        self._leaving = {(g, node) for g, node in self._leaving if g >= after.generation - 1}

    def reports(self, generation: int, reports: Mapping[str, Report]) -> None:
        """Notes the reports of a generation."""
        for node, report in reports.items():
            if not report.leaving or not report.leave_reason or (generation, node) in self._leaving:
                continue
            self._leaving.add((generation, node))
            source = leave_source(report.leave_reason)
            if source == "operator":
                self.drains += 1
            else:
                self.preemptions[source] += 1

    def recovered(self, event: Mapping[str, object]) -> None:
        """Notes a recovery, by the fields of its event."""
        self.recoveries[str(event["kind"])] += 1
        for phase in PHASES:
            seconds = event[f"{phase}_s"]
            if isinstance(seconds, float):
                self.recovery_s[phase] += seconds
        lost = event["steps_lost"]
        self.steps_lost += lost if isinstance(lost, int) else 0
