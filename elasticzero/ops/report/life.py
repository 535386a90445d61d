"""Defines what an agent's event log says of one life of the agent, from its start to its end."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticzero.launcher.goodput import TimeAccount, TimeSpent

MOST_FAILURES = 200
"""Maximum number of failures of workers that one life keeps: the newest ones."""
MOST_INCIDENTS = 100
"""Maximum number of kinds of incidents that one life keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenWorld:
    """Holds one generation as an agent read it."""

    at_s: float
    """Unix time by the clock of the agent's machine, as all times of a life."""
    generation: int
    members: tuple[str, ...]
    world_size: int
    resume_step: int
    tier: str
    reason: str
    spent: TimeSpent | None
    """Account of the job's time up to the writing of the world."""

    @property
    def key(self) -> tuple[object, ...]:
        """Returns what distinguishes this world from all others, also from those of other runs."""
        until = self.spent.until if self.spent is not None else None
        return (self.generation, self.members, self.resume_step, self.reason, until)


@dataclass(frozen=True, slots=True)
class SeenRound:
    """Holds the end of a generation as an agent saw it."""

    at_s: float
    kind: str
    reason: str


@dataclass(slots=True)
class OwnPart:
    """Holds what an agent's own workers did in one generation."""

    started_s: float | None = None
    restored_s: float | None = None
    first_step_s: float | None = None
    last_step_s: float | None = None
    last_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenFailure:
    """Holds a failure of a worker."""

    at_s: float
    generation: int
    node: str
    rank: int
    step: int
    blame: str
    message: str
    traceback: str


@dataclass(slots=True)
class SeenSave:
    """Holds one node's part of the saves of one step."""

    at_s: float
    step: int
    seconds: float
    bytes: int
    committed: bool


@dataclass(slots=True)
class SeenIncident:
    """Counts how often a trouble was noted that ended no generation by itself."""

    first_s: float
    last_s: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class SeenContribution:
    """Holds an island's contribution to a committed round."""

    island: str
    samples: int
    late: int
    """Number of rounds that were committed since the one that it differs from."""


@dataclass(slots=True)
class SnapshotTotals:
    """Adds up the copies of state that an agent's workers have made; of thinned logs, estimates."""

    count: float = 0.0
    stall_s: float = 0.0
    longest_s: float = 0.0
    bytes: float = 0.0
    last_step: int = 0
    every: int = 0
    """Steps from one snapshot to the next, as rank 0 chose it last; 0: it did not choose."""
    failed: int = 0
    """Number of snapshots that the node could not take."""


@dataclass(slots=True, eq=False)
class AgentLife:
    """Collects what the log says of one life of an agent."""

    node: str
    began_s: float
    ended_s: float
    """Time of the last event."""
    registered_s: float | None = None
    generation: int = 0
    """Generation that the agent has read last."""
    total_steps: int = 0
    worlds: dict[int, SeenWorld] = field(default_factory=dict)
    rounds: dict[int, SeenRound] = field(default_factory=dict)
    averaged: dict[tuple[int, int, int], tuple[SeenContribution, ...]] = field(default_factory=dict)
    """Committed rounds of the job's islands, by history, fragment and number."""
    parts: dict[int, OwnPart] = field(default_factory=dict)
    recoveries: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    failures: deque[SeenFailure] = field(default_factory=lambda: deque(maxlen=MOST_FAILURES))
    saves: dict[int, SeenSave] = field(default_factory=dict)
    snapshots: SnapshotTotals = field(default_factory=SnapshotTotals)
    incidents: dict[tuple[str, str], SeenIncident] = field(default_factory=dict)
    plain: bool = False
    """True if the script trains without calling `elasticzero.run`, so that no steps are seen."""
    steps: array[float] = field(default_factory=lambda: array("d"))
    """Rows of generation, step, end of the step, its seconds and those that it waited for data."""
    losses: array[float] = field(default_factory=lambda: array("d"))
    """Rows of generation, step, time and loss."""
    unread: int = 0
    """Number of lines that could not be read."""
    account: TimeAccount | None = None
    """Account of the job's time, as far as this agent saw it."""
    exit: Mapping[str, Any] | None = None
    """The event with which the agent ended."""
    error: str = ""
    """Error with which the agent ended."""

    @property
    def outcome(self) -> str | None:
        """Returns how the job ended; None: it went on, or the log does not say."""
        return self.exit.get("outcome") if self.exit is not None else None


STEP_ROW = 6
"""Numbers in a row of `AgentLife.steps`: generation, step, time of its end, duration, wait for
data, own time of the node's slowest worker (not a number: not known)."""
LOSS_ROW = 4
"""Numbers in a row of `AgentLife.losses`."""


def rows_of(numbers: array[float], length: int) -> list[tuple[float, ...]]:
    """Returns the rows of so many numbers each that an array holds."""
    columns = [numbers[i::length] for i in range(length)]
    return list(zip(*columns, strict=True))
