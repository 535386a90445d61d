"""Defines the metrics of a job as a whole, which the leading agent serves at `/metrics/job`.

They are made from the agent's state at each scrape. Every series has the label `job_id`, because it
describes a job and not the agent that serves it: after a change of the leader another agent does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from elasticzero.launcher.goodput import TIME_CLASSES, goodput
from elasticzero.launcher.observability.descriptions import MetricDescription, MetricKind
from elasticzero.launcher.observability.job_counts import JobCounts

PREFIX = "elasticzero_job_"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """Holds what the leading agent knows of its job; None: not known, and no series."""

    job: str
    counts: JobCounts
    generation: int = 0
    generation_start: float | None = None
    """Unix time."""
    world_size: int = 0
    members: int = 0
    nodes_min: int = 0
    nodes_max: int = 0
    waiting: int | None = None
    """Nodes that are registered and in no world, without those that are set aside."""
    set_aside: int = 0
    seconds: Mapping[str, float] | None = None
    """Seconds of the job's time, by class."""
    step: int | None = None
    progress_time: float | None = None
    """Unix time of the last step; before the first, of the agent's begin."""
    steps_total: int | None = None
    step_s: float | None = None
    """Seconds of a step, in the mean of the last ones."""
    samples_per_s: float | None = None
    mfu: float | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    snapshot_step: int | None = None
    snapshot_time: float | None = None
    checkpoint_step: int | None = None
    checkpoint_time: float | None = None
    checkpoint_every: int = 0
    compute_ratios: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """Own times of the slowest workers, as multiples of the median, by node and local rank."""


Samples = Mapping[tuple[str, ...], float | None]
"""Values of a metric, by those of its labels without `job_id`; None: not known."""


def _metric(kind: MetricKind, name: str, meaning: str, *labels: str) -> MetricDescription:
    return MetricDescription(f"{PREFIX}{name}", kind, ("job_id", *labels), meaning)


GENERATION = _metric("gauge", "generation", "Number of the present generation; 0 before the first.")
GENERATION_START = _metric(
    "gauge", "generation_start_timestamp_seconds", "Unix time when the leader saw its beginning."
)
WORLD_SIZE = _metric("gauge", "world_size", "Ranks in the present generation.")
MEMBERS = _metric("gauge", "members", "Nodes in the present generation.")
NODES_MIN = _metric("gauge", "nodes_min", "Fewest nodes on which the job runs.")
NODES_MAX = _metric("gauge", "nodes_max", "Most nodes on which the job runs.")
WAITING = _metric(
    "gauge", "waiting_nodes", "Nodes that are registered and wait for a place, or for others."
)
SET_ASIDE = _metric("gauge", "set_aside_nodes", "Nodes that are set aside for a while.")
SECONDS = _metric(
    "gauge",
    "seconds",
    "Seconds of the job by class; all classes add up to the time since it began.",
    "time_class",
)
GOODPUT = _metric("gauge", "goodput_ratio", "Productive share of the job's time.")
STEP = _metric("gauge", "step", "Optimizer steps applied.")
PROGRESS = _metric(
    "gauge",
    "progress_timestamp_seconds",
    "Unix time of the last step, before the first one that of the leader's begin; no series if the "
    "script makes no visible steps.",
)
STEPS_TOTAL = _metric("gauge", "steps_planned", "Steps of the whole run, where that is known.")
STEP_SECONDS = _metric("gauge", "step_seconds", "Mean seconds from step to step, of the last ones.")
SAMPLES = _metric("gauge", "samples_per_second", "Samples a second, over the last steps.")
MFU = _metric(
    "gauge",
    "mfu_ratio",
    "Model FLOPs utilization over the last steps, where --flops-per-sample and --peak-flops are "
    "given.",
)
LOSS = _metric("gauge", "loss", "Loss of the last step, as the leader's script logged it.")
GRADIENT_NORM = _metric(
    "gauge", "gradient_norm", "Norm of the gradient of the last applied step, before clipping."
)
SNAPSHOT_STEP = _metric("gauge", "snapshot_last_step", "Step of the last snapshot that is held.")
SNAPSHOT_TIME = _metric(
    "gauge", "snapshot_last_timestamp_seconds", "Unix time since which it is held."
)
CHECKPOINT_STEP = _metric("gauge", "checkpoint_last_step", "Step of the last committed checkpoint.")
CHECKPOINT_TIME = _metric(
    "gauge", "checkpoint_last_timestamp_seconds", "Unix time when it was committed."
)
CHECKPOINT_EVERY = _metric(
    "gauge", "checkpoint_every_steps", "Steps from checkpoint to checkpoint; 0: one at the end."
)
COMPUTE_RATIO = _metric(
    "gauge",
    "compute_ratio",
    "Own time in a step of the slowest workers, as a multiple of the median of all workers.",
    "node",
    "local_rank",
)
RECOVERIES = _metric("counter", "recoveries_total", "Recoveries that came to a step.", "cause")
RECOVERY_SECONDS = _metric(
    "counter", "recovery_seconds_total", "Seconds of recoveries by phase.", "phase"
)
STEPS_LOST = _metric("counter", "steps_lost_total", "Finished steps that were done again.")
PREEMPTIONS = _metric(
    "counter", "preemptions_total", "Nodes that left because of a notice or signal.", "source"
)
DRAINS = _metric("counter", "drains_total", "Nodes that operators have drained.")
INTERRUPTIONS = _metric(
    "counter",
    "interruptions_total",
    "Generations that ended because a node left, was lost, or had the first worker that failed.",
    "node",
)


def job_samples(state: JobState) -> dict[MetricDescription, Samples]:
    """Returns the values of each metric."""
    counts = state.counts
    one: dict[MetricDescription, float | None] = {
        GENERATION: state.generation,
        GENERATION_START: state.generation_start,
        WORLD_SIZE: state.world_size,
        MEMBERS: state.members,
        NODES_MIN: state.nodes_min,
        NODES_MAX: state.nodes_max,
        WAITING: state.waiting,
        SET_ASIDE: state.set_aside,
        GOODPUT: goodput(state.seconds) if state.seconds else None,
        STEP: state.step,
        PROGRESS: state.progress_time,
        STEPS_TOTAL: state.steps_total,
        STEP_SECONDS: state.step_s,
        SAMPLES: state.samples_per_s,
        MFU: state.mfu,
        LOSS: state.loss,
        GRADIENT_NORM: state.gradient_norm,
        SNAPSHOT_STEP: state.snapshot_step,
        SNAPSHOT_TIME: state.snapshot_time,
        CHECKPOINT_STEP: state.checkpoint_step,
        CHECKPOINT_TIME: state.checkpoint_time,
        CHECKPOINT_EVERY: state.checkpoint_every,
        STEPS_LOST: counts.steps_lost,
        DRAINS: counts.drains,
    }
    seconds = state.seconds or {}
    several: dict[MetricDescription, Samples] = {
        SECONDS: {(kind,): seconds.get(kind, 0.0) for kind in TIME_CLASSES if seconds},
        COMPUTE_RATIO: {(n, str(rank)): x for (n, rank), x in state.compute_ratios.items()},
        RECOVERIES: {(cause,): count for cause, count in counts.recoveries.items()},
        RECOVERY_SECONDS: {(phase,): took_s for phase, took_s in counts.recovery_s.items()},
        PREEMPTIONS: {(source,): count for source, count in counts.preemptions.items()},
        INTERRUPTIONS: {(node,): count for node, count in counts.interruptions.items()},
    }
    single: dict[MetricDescription, Samples] = {
        metric: {(): value} for metric, value in one.items()
    }
    return single | several


JOB_METRICS = tuple(job_samples(JobState(job="", counts=JobCounts())))
"""All metrics of a job."""


class _Collector:
    """Gives the metrics of a job to a registry."""

    def __init__(self, state: JobState) -> None:
        self._state = state

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        for metric, samples in job_samples(self._state).items():
            family: CounterMetricFamily | GaugeMetricFamily = (
                CounterMetricFamily(metric.name, metric.meaning, labels=metric.labels)
                if metric.kind == "counter"
                else GaugeMetricFamily(metric.name, metric.meaning, labels=metric.labels)
            )
            for labels, value in samples.items():
                if value is not None:
                    family.add_metric([self._state.job, *labels], float(value))
            yield family


def job_exposition(state: JobState | None) -> bytes:
    """Returns what `/metrics/job` serves, in Prometheus' text format; nothing where this agent does
    not lead."""
    if state is None:
        return b""
    registry = CollectorRegistry()
    registry.register(_Collector(state))
    return generate_latest(registry)


def model_flops_utilization(
    flops_per_sample: float | None,
    peak_flops: float | None,
    samples_per_s: float | None,
    world_size: int,
) -> float | None:
    """Returns the model's FLOPs a second, as a share of the peak of all ranks' devices.

    Args:
        flops_per_sample: FLOPs of forward and backward for one sample.
        peak_flops: FLOPs a second that one rank's device reaches at most.
        samples_per_s: Samples a second of the whole job.
        world_size: Number of ranks.
    """
    if not flops_per_sample or not peak_flops or samples_per_s is None or not world_size:
        return None
    return flops_per_sample * samples_per_s / (peak_flops * world_size)
