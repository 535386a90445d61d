"""Defines every Prometheus metric of a node, which its agent serves at `/metrics`.

The agent owns the one registry; workers send it their samples. Labels have few values:
`local_rank`, never a pid or a global rank, so that no series is left behind by a recovery. Job and
node are labels of `elasticzero_info` alone, with which queries join the others. `job_metrics` has
the metrics of the job as a whole.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from elasticzero.ipc.messages import TOKENS, Captured, Logged, Message, ResidualLost, Stepped
from elasticzero.launcher.observability.descriptions import MetricDescription, MetricKind
from elasticzero.launcher.observability.gpu import GPU_METRICS, GpuCollector
from elasticzero.version import __version__

log = logging.getLogger(__name__)

Phase = Literal["detect", "regroup", "start", "connect", "build", "restore", "first_step"]
"""Phases of a recovery, in order."""
PHASES: tuple[Phase, ...] = (
    "detect",
    "regroup",
    "start",
    "connect",
    "build",
    "restore",
    "first_step",
)
FIRST = "start"
"""Cause of a generation that follows none which this node was in."""

CONTENT_TYPE = CONTENT_TYPE_LATEST
INFO_LABELS = ("job_id", "node", "version", "strategy", "shard", "redundancy")
MAX_LOGGED_NAMES = 64
"""Maximum number of names of `session.log` that are metrics; those that come later are not."""

_STEP_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_RECOVERY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_CHECKPOINT_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)
_REQUEST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """Holds one agent's metrics, each documented by its help text; `text()` is what a scrape
    gets."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.descriptions: list[MetricDescription] = []
        self._identity: tuple[str, ...] = ()
        self._wire_counts: dict[str, Mapping[str, int]] = {}
        """What each worker has sent and received until its newest step, by its local rank."""
        self._names: set[str] = set()
        """Names of `session.log` that are metrics."""
        self._membership()
        self._training()
        self._recovery()
        self._snapshots()
        self._checkpoints()
        self._etcd()
        self._islands()
        self.registry.register(GpuCollector())
        self.descriptions += GPU_METRICS

    def _membership(self) -> None:
        self.info = self._gauge("info", "Always 1; the labels say what this agent is.", INFO_LABELS)
        self.leader = self._gauge("leader", "1 on the agent that leads the job; 0 on the others.")
        self.generation = self._gauge(
            "generation", "Number of the generation this node takes part in; 0 before the first."
        )
        self.generation_start = self._gauge(
            "generation_start_timestamp_seconds",
            "Unix time when this node saw that generation; NaN before the first.",
        )
        self.generation_start.set(math.nan)
        self.world_size = self._gauge("world_size", "Ranks in this generation.")
        self.members = self._gauge("members", "Nodes in this generation.")
        self.workers_running = self._gauge("workers_running", "Workers of this node that run.")
        self.standby_bytes = self._gauge(
            "standby_bytes",
            "Memory of the processes that stand by for this node's workers, without what they "
            "share.",
        )

    def _training(self) -> None:
        per_worker = ("local_rank",)
        self.step = self._gauge("step", "Optimizer steps applied since the start.", per_worker)
        self.step_seconds = self._histogram(
            "step_seconds", "Seconds of a step, without busy sections.", _STEP_BUCKETS_S, per_worker
        )
        self.data_wait_seconds = self._histogram(
            "data_wait_seconds", "Seconds a step waited for its batch.", _STEP_BUCKETS_S, per_worker
        )
        self.compute_seconds = self._histogram(
            "compute_seconds",
            "Seconds of a worker's own forwards and backwards in a step, without waits for data or "
            "collectives; with zero3 waits for gathered parameters count.",
            _STEP_BUCKETS_S,
            per_worker,
        )
        self.samples = self._counter(
            "samples_total",
            "Samples of the global batches of steps finished here, recomputed ones included; the "
            "same for each worker of the job.",
            per_worker,
        )
        self.tokens = self._counter(
            "tokens_total",
            "Sum of the `tokens` that a worker's script has logged, recomputed ones included.",
            per_worker,
        )
        self.wire_bytes = self._counter(
            "wire_bytes_total",
            "Bytes of gradients and parameters that this node's workers have sent to other ranks "
            "and received from them; zero3 and --deterministic count none.",
            ("kind", "direction"),
        )
        self.loss = self._gauge(
            "loss", "Loss of the last step, as the script logged it.", per_worker
        )
        self.gradient_norm = self._gauge(
            "gradient_norm",
            "Norm of the gradient of the last applied step, before clipping; the same for each "
            "worker of the job.",
            per_worker,
        )
        self.logged = self._gauge(
            "log",
            f"Last value that the script logged under a name, for the first {MAX_LOGGED_NAMES} "
            "names.",
            ("local_rank", "name"),
        )

    def _recovery(self) -> None:
        self.steps_lost = self._counter(
            "steps_lost_total", "Finished steps that recoveries made this node do again."
        )
        self.residuals_lost = self._counter(
            "residuals_lost_total",
            "Ranks that were lost with what they had not sent of gradients yet (`--wire`); the "
            "agent of rank 0 counts them.",
        )
        self.restarts = self._counter(
            "restarts_total", "Generations that replaced one this node was in.", ("reason",)
        )
        self.recovery_seconds = self._histogram(
            "recovery_seconds",
            "Seconds of each phase of the way to a generation's first step.",
            _RECOVERY_BUCKETS_S,
            ("cause", "phase"),
        )
        for phase in PHASES:
            self.recovery_seconds.labels(FIRST, phase)

    def _snapshots(self) -> None:
        self.capture_seconds = self._histogram(
            "capture_seconds",
            "Seconds that training waited while a worker's state was copied to shared memory.",
            _RECOVERY_BUCKETS_S,
            ("purpose",),
        )
        self.capture_bytes = self._counter(
            "capture_bytes_total",
            "Bytes of state that workers copied to shared memory.",
            ("purpose",),
        )
        self.snapshots = self._counter(
            "snapshots_total", "Snapshots of which this node held all that it is to hold."
        )
        self.snapshots_failed = self._counter(
            "snapshots_failed_total",
            "Snapshots of which this node could not hold all that it is to hold.",
        )
        self.snapshot_step = self._gauge(
            "snapshot_last_step",
            "Step of the last snapshot of which this node holds all that it is to hold.",
        )
        self.snapshot_timestamp = self._gauge(
            "snapshot_last_timestamp_seconds",
            "Unix time when this node held that snapshot; NaN before the first.",
        )
        self.snapshot_timestamp.set(math.nan)
        for purpose in ("snapshot", "checkpoint"):
            self.capture_seconds.labels(purpose)
            self.capture_bytes.labels(purpose)

    def _checkpoints(self) -> None:
        self.checkpoint_seconds = self._histogram(
            "checkpoint_seconds",
            "Seconds to write this node's part of a checkpoint.",
            _CHECKPOINT_BUCKETS_S,
        )
        self.checkpoint_bytes = self._counter(
            "checkpoint_bytes_total", "Bytes of checkpoints written by this node."
        )
        self.checkpoints_failed = self._counter(
            "checkpoints_failed_total", "Tries to save a checkpoint that failed on this node."
        )
        self.checkpoint_step = self._gauge(
            "checkpoint_last_step", "Step of the last checkpoint known to be committed."
        )
        self.checkpoint_timestamp = self._gauge(
            "checkpoint_last_timestamp_seconds",
            "Unix time when the last checkpoint was seen committed; NaN before the first.",
        )
        self.checkpoint_timestamp.set(math.nan)

    def _etcd(self) -> None:
        self.etcd_request_seconds = self._histogram(
            "etcd_request_seconds",
            "Seconds of a request to etcd.",
            _REQUEST_BUCKETS_S,
            ("operation",),
        )
        self.etcd_errors = self._counter(
            "etcd_errors_total", "Requests and streams to etcd that failed.", ("operation", "code")
        )
        self.etcd_reachable = self._gauge(
            "etcd_reachable", "1 while etcd answers this agent; 0 while it does not."
        )
        self.etcd_away = self._counter(
            "etcd_away_seconds_total", "Seconds for which etcd did not answer this agent."
        )

    def _islands(self) -> None:
        self.islands = self._gauge(
            "islands", "Islands of the job that live; 0 where its nodes are none."
        )
        self.rounds = self._counter(
            "rounds_total", "Rounds that the job's islands have committed, of all fragments."
        )
        self.round_samples = self._counter(
            "round_samples_total", "Samples of this island in committed rounds of all fragments."
        )
        self.round_staleness = self._gauge(
            "round_staleness",
            "Rounds that were committed between the one that this island's last contribution "
            "differs from and its own.",
        )
        self.round_bytes = self._counter(
            "round_bytes_total",
            "Bytes of contributions, means and outer parameters that this node has fetched from "
            "other islands.",
        )

    def observe_round(self, samples: int, staleness: int | None) -> None:
        """Records a committed round.

        Args:
            samples: This island's samples in it.
            staleness: How late its contribution was; None: the round has none.
        """
        self.rounds.inc()
        self.round_samples.inc(samples)
        if staleness is not None:
            self.round_staleness.set(staleness)

    def received(self, local_rank: int, message: Message) -> None:
        """Records a message of a worker."""
        rank = str(local_rank)
        match message:
            case Stepped():
                self._observe_step(rank, message)
            case Logged():
                self._observe_log(rank, message.scalars)
            case Captured():
                purpose = "checkpoint" if message.checkpoint or message.direct else "snapshot"
                self.capture_seconds.labels(purpose).observe(message.seconds)
                self.capture_bytes.labels(purpose).inc(message.bytes)
            case ResidualLost(ranks=ranks):
                self.residuals_lost.inc(ranks)
            case _:
                pass

    def _observe_step(self, rank: str, message: Stepped) -> None:
        self.step.labels(rank).set(message.step)
        self.step_seconds.labels(rank).observe(message.step_s)
        self.data_wait_seconds.labels(rank).observe(message.data_wait_s)
        if message.compute_s is not None:
            self.compute_seconds.labels(rank).observe(message.compute_s)
        if message.gradient_norm is not None:
            self.gradient_norm.labels(rank).set(message.gradient_norm)
        self.samples.labels(rank).inc(message.samples)
        self._observe_wire(rank, message.wire_bytes)

    def _observe_wire(self, rank: str, counts: Mapping[str, int]) -> None:
        """Adds what a worker has sent and received since its newest step that is known.

        Args:
            rank: Its local rank.
            counts: The bytes since it was made, by kind and direction; a successor begins anew.
        """
        before = self._wire_counts.get(rank, {})
        for name, count in counts.items():
            kind, _, direction = name.partition(" ")
            passed = before.get(name, 0)
            self.wire_bytes.labels(kind, direction).inc(count - (passed if passed <= count else 0))
        self._wire_counts[rank] = counts

    def _observe_log(self, rank: str, scalars: Mapping[str, float]) -> None:
        if "loss" in scalars:
            self.loss.labels(rank).set(scalars["loss"])
        if (tokens := scalars.get(TOKENS, 0)) > 0:
            self.tokens.labels(rank).inc(tokens)
        for name, value in scalars.items():
            if name not in self._names and len(self._names) < MAX_LOGGED_NAMES:
                self._names.add(name)
                if len(self._names) == MAX_LOGGED_NAMES:
                    log.warning(
                        "the script has logged %d names; others are in the event log alone, and "
                        "no metrics",
                        MAX_LOGGED_NAMES,
                    )
            if name in self._names:
                self.logged.labels(rank, name).set(value)

    def identify(self, job: str, node: str, strategy: str, shard: str, redundancy: str) -> None:
        """Says what this agent is, by the labels of `elasticzero_info`.

        Args:
            job: The job's name.
            node: The node's name.
            strategy: Value of `--strategy`.
            shard: Value of `--shard`.
            redundancy: Value of `--redundancy`.
        """
        labels = (job, node, __version__, strategy, shard, redundancy)
        if labels != self._identity:
            self._identity = labels
            self.info.clear()
            self.info.labels(*labels).set(1)

    def observe_world(self, generation: int, world_size: int, members: int) -> None:
        """Records a new generation.

        Args:
            generation: Number of the generation.
            world_size: Number of its ranks.
            members: Number of its nodes.
        """
        self.generation.set(generation)
        self.generation_start.set(time.time())
        self.world_size.set(world_size)
        self.members.set(members)

    def observe_etcd(self, operation: str, seconds: float, error: str | None) -> None:
        """Records one request to etcd.

        Args:
            operation: What the request did.
            seconds: Seconds that it took.
            error: Code of its error; None: it succeeded.
        """
        if error is None:
            self.etcd_request_seconds.labels(operation).observe(seconds)
        else:
            self.etcd_errors.labels(operation, error).inc()

    def observe_snapshot(self, step: int, *, held: bool) -> None:
        """Records that this node holds its part of a snapshot, or cannot."""
        if not held:
            self.snapshots_failed.inc()
            return
        self.snapshots.inc()
        self.snapshot_step.set(step)
        self.snapshot_timestamp.set(time.time())

    def observe_checkpoint(self, *, step: int, seconds: float, written_bytes: int) -> None:
        """Records that this node's part of a checkpoint is written, and the whole is committed.

        Args:
            step: Step of the checkpoint.
            seconds: Seconds that the save took.
            written_bytes: Bytes that this node wrote.
        """
        self.checkpoint_seconds.observe(seconds)
        self.checkpoint_bytes.inc(written_bytes)
        self.checkpoint_step.set(step)
        self.checkpoint_timestamp.set(time.time())

    def forget_workers(self) -> None:
        """Removes the gauges of workers that are gone, so that none shows an old value."""
        for gauge in (self.step, self.loss, self.gradient_norm, self.logged):
            gauge.clear()

    def text(self) -> bytes:
        """Returns the exposition, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _name(self, name: str, kind: MetricKind, legend: str, labels: tuple[str, ...]) -> str:
        """Returns the name of a metric with the prefix, and lists the metric.

        Args:
            name: Name without the prefix.
            kind: Kind of the metric.
            legend: What it measures, as one sentence.
            labels: Names of its labels.
        """
        full = f"elasticzero_{name}"
        self.descriptions.append(MetricDescription(full, kind, labels, legend))
        return full

    def _gauge(self, name: str, legend: str, labels: tuple[str, ...] = ()) -> Gauge:
        full = self._name(name, "gauge", legend, labels)
        return Gauge(full, legend, labels, registry=self.registry)

    def _counter(self, name: str, legend: str, labels: tuple[str, ...] = ()) -> Counter:
        full = self._name(name, "counter", legend, labels)
        return Counter(full, legend, labels, registry=self.registry)

    def _histogram(
        self, name: str, legend: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Histogram:
        full = self._name(name, "histogram", legend, labels)
        return Histogram(full, legend, labels, buckets=buckets, registry=self.registry)
