"""Defines `RunSummary`: all that the page says of one run of a job.

Times are seconds since the run began, unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from elasticzero.ops.page.charts import Point, Span

ChangeKind = Literal["start", "fault", "left", "joined", "planned"]
"""Kind of event that led to a generation."""
Outcome = Literal["finished", "stopped", "failed", "running", "unknown"]
"""How the run ended. `unknown`: the logs end before it did, and no agent was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSummary:
    """Describes one generation."""

    number: int
    began_s: float
    ended_s: float
    kind: ChangeKind
    label: str
    """Its cause, in two words."""
    cause: str
    """Its cause, in a sentence of the agents."""
    members: tuple[str, ...]
    world_size: int
    resume_step: int
    reached: int
    """Last step that it finished; `resume_step` if it finished none."""
    tier: str
    steps_redone: int
    """Steps that were finished before it and are done again in it."""
    seconds: Mapping[str, float]
    """Where its time has gone, by class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySummary:
    """Describes the way from a generation that ended to the first step of the next one."""

    generation: int
    """Generation that began."""
    at_s: float
    """Time of its first step."""
    kind: ChangeKind
    label: str
    cause: str
    steps_lost: int
    seconds: float
    phases: Mapping[str, float | None]
    """Seconds of each phase; None: no agent saw it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSummary:
    """Describes a fault that ended a generation."""

    at_s: float
    generation: int
    """Generation that it ended."""
    label: str
    cause: str
    lost: tuple[str, ...]
    """Nodes that were lost."""
    steps_lost: int
    pause_s: float | None
    """Seconds from the last step before it to the first step after it; None: there was no more."""
    survived: bool
    """False for the fault by which the job ended."""
    details: str = ""
    """Traceback of the failed worker; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentSummary:
    """Describes trouble that ended no generation by itself."""

    first_s: float
    last_s: float
    count: int
    kind: str
    nodes: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """Describes one committed checkpoint."""

    at_s: float
    step: int
    seconds: float
    """Duration of the save on the slowest node."""
    bytes: int
    """Bytes of all nodes whose logs are there."""
    nodes: int
    """Number of nodes that wrote a part, as far as their logs are there."""
    committed: bool
    """False if no log that is there says that the manifest was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSummary:
    """Describes the copies of state in memory, as one node saw them."""

    node: str
    count: int
    every: int
    """Steps from one to the next, as chosen last; 0: not known."""
    last_step: int
    mean_stall_s: float
    longest_stall_s: float
    mean_bytes: float
    """Bytes of the first worker's part."""
    failed: int
    estimated: bool
    """True if the log was thinned, so that the count is an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStepTimes:
    """Compares the step times of one node with those of all nodes at the same steps."""

    node: str
    steps: int
    """Number of steps that were compared."""
    median_s: float
    slowest_s: float
    """Time below which 95 of 100 steps were."""
    wait_s: float
    """Mean seconds of a step in which the node waited for data."""
    ratio: float
    """Median of the node's step time over the mean of all nodes at the same step."""
    compute_s: float | None
    """Median of the own time of the node's slowest worker in a step; None: it is not known."""
    compute_ratio: float | None
    """Median of that time over the median of all nodes at the same step."""
    is_slow: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLog:
    """Says how much of a node's log was there."""

    node: str
    bytes: int
    cut_bytes: int = 0
    """Bytes at the beginning that were left out."""
    every: int = 1
    """Number of steps of which one was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Describes one run of a job."""

    job: str
    outcome: Outcome
    reason: str
    """Why the run ended, in a sentence of the agents."""
    began: float
    """Unix time at which the run began."""
    wall_s: float
    final_step: int
    total_steps: int
    """Steps of the whole run; 0: not known."""
    plain: bool
    """True if the script makes no visible steps."""
    nodes: tuple[str, ...]
    """All nodes that had a part, in the order in which they came."""
    seconds: Mapping[str, float]
    """Where the time has gone, by class; adds up to `wall_s`."""
    goodput: float | None
    before_first: Mapping[str, float]
    """Where the time before the first generation has gone, by class."""
    generations: tuple[GenerationSummary, ...]
    recoveries: tuple[RecoverySummary, ...]
    faults: tuple[FaultSummary, ...]
    incidents: tuple[IncidentSummary, ...]
    checkpoints: tuple[CheckpointSummary, ...]
    snapshots: tuple[SnapshotSummary, ...]
    step_times: tuple[NodeStepTimes, ...]
    states: Mapping[str, tuple[Span, ...]]
    """Spans of each node's states, in the order of time."""
    steps: tuple[Point, ...]
    """Time and number of steps, in the order in which they were done."""
    losses: tuple[Point, ...]
    """Time and loss of the steps that count."""
    wasted_losses: tuple[Point, ...]
    """Time and loss of the steps that were done again."""
    notes: tuple[str, ...] = field(default=())
    """Sentences about the logs: parts that are missing, clocks that differ."""

    @property
    def survived(self) -> tuple[FaultSummary, ...]:
        return tuple(fault for fault in self.faults if fault.survived)

    @property
    def steps_redone(self) -> int:
        return sum(generation.steps_redone for generation in self.generations)
