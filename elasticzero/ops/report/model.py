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
    """Cause of the generation, in two words such as `worker killed`."""
    cause: str
    """Cause of the generation, as the agents have said it in a sentence."""
    members: tuple[str, ...]
    world_size: int
    resume_step: int
    reached: int
    """Last step that the generation finished; `resume_step` if it finished none."""
    tier: str
    steps_redone: int
    """Number of steps that the generation before had finished and that are done again."""
    seconds: Mapping[str, float]
    """Seconds of the generation by class of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySummary:
    """Describes the way from a generation that ended to the first step of the next one."""

    generation: int
    """Number of the generation that began."""
    at_s: float
    """Time at which that generation finished its first step, or began if no step was seen."""
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
    """Number of the generation that the fault ended."""
    label: str
    cause: str
    lost: tuple[str, ...]
    """Nodes that were lost."""
    steps_lost: int
    pause_s: float | None
    """Seconds from the last step before the fault to the first step after it; None: one of them was
    not seen."""
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
    """Describes one checkpoint that was saved."""

    at_s: float
    step: int
    seconds: float
    """Duration of the save on the slowest node."""
    bytes: int
    """Bytes that the nodes whose logs were read have written."""
    nodes: int
    """Number of nodes that wrote a part, among those whose logs were read."""
    committed: bool
    """False if no log that was read says that the manifest was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSummary:
    """Describes the copies of state in memory, as one node saw them."""

    node: str
    count: int
    every: int
    """Steps from one snapshot to the next, as chosen last; 0: not known."""
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
    """Step time that 95 of 100 steps stayed below."""
    wait_s: float
    """Mean seconds of a step in which the node waited for data."""
    ratio: float
    """Median over all steps of the node's step time divided by the mean of all nodes."""
    compute_s: float | None
    """Median of the own time of the node's slowest worker in a step; None: it is not known."""
    compute_ratio: float | None
    """Median over all steps of that time divided by the median of all nodes; None: not known."""
    is_slow: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLog:
    """Says how much of a node's log was read."""

    node: str
    bytes: int
    cut_bytes: int = 0
    """Bytes at the beginning that were left out."""
    every: int = 1
    """Number of steps of which one was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandSummary:
    """Says what one island has contributed."""

    island: str
    rounds: int
    """Number of rounds that have a contribution of it."""
    samples: int
    late: float
    """Mean number of rounds by which its contributions were late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsSummary:
    """Says what the islands of a job have averaged."""

    rounds: int
    """Number of rounds of the part of the model that is averaged last."""
    samples: int
    """Samples of these rounds."""
    islands: tuple[IslandSummary, ...]
    shown: str
    """The island that the rest of the report is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Describes one run of a job."""

    job: str
    outcome: Outcome
    reason: str
    """Why the run ended, as the agents have said it in a sentence."""
    began: float
    """Unix time at which the run began."""
    wall_s: float
    final_step: int
    total_steps: int
    """Steps of the whole run; 0: not known."""
    plain: bool
    """True if the script trains without calling `elasticzero.run`, so that no steps are seen."""
    nodes: tuple[str, ...]
    """All nodes that had a part, in the order in which they came."""
    seconds: Mapping[str, float]
    """Seconds of the run by class of time; they add up to `wall_s`."""
    goodput: float | None
    before_first: Mapping[str, float]
    """Seconds before the first generation by class of time."""
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
    averaged: RoundsSummary | None = None
    """Rounds of the job's islands, all else is about one of them; None: its nodes are none."""
    notes: tuple[str, ...] = field(default=())
    """Sentences about the logs: parts that are missing, clocks that differ."""

    @property
    def survived(self) -> tuple[FaultSummary, ...]:
        return tuple(fault for fault in self.faults if fault.survived)

    @property
    def steps_redone(self) -> int:
        return sum(generation.steps_redone for generation in self.generations)
