"""Defines every Prometheus metric of an agent.

The agent owns the one registry; workers send it their samples. Labels have few values:
`local_rank`, never a pid or a global rank, so that no series is left behind by a recovery.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from elasticzero.launcher.goodput import TIME_CLASSES, goodput

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

CONTENT_TYPE = CONTENT_TYPE_LATEST

_STEP_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_RECOVERY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_CHECKPOINT_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)
_REQUEST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """Holds one agent's metrics, each documented by its help text; `text()` is what a scrape
    gets."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._membership()
        self._training()
        self._recovery()
        self._checkpoints()
        self._etcd()

    def _membership(self) -> None:
        self.generation = self._gauge(
            "generation", "Number of the generation this node takes part in; 0 before the first."
        )
        self.world_size = self._gauge("world_size", "Ranks in this generation.")
        self.members = self._gauge("members", "Nodes in this generation.")
        self.workers_running = self._gauge("workers_running", "Workers of this node that run.")

    def _training(self) -> None:
        per_worker = ("local_rank",)
        self.step = self._gauge("step", "Optimizer steps applied since the start.", per_worker)
        self.step_seconds = self._histogram(
            "step_seconds", "Seconds of a step, without busy sections.", _STEP_BUCKETS_S, per_worker
        )
        self.data_wait_seconds = self._histogram(
            "data_wait_seconds", "Seconds a step waited for its batch.", _STEP_BUCKETS_S, per_worker
        )
        self.samples = self._counter(
            "samples_total", "Samples in steps finished here, recomputed ones included.", per_worker
        )
        self.loss = self._gauge(
            "loss", "Loss of the last step, as the script logged it.", per_worker
        )

    def _recovery(self) -> None:
        self.job_seconds = self._gauge(
            "job_seconds",
            "Seconds of the whole job by class; all classes add up to the time since it began.",
            ("time_class",),
        )
        self.goodput = self._gauge(
            "goodput_ratio",
            "Productive share of the whole job's time; NaN where this node cannot say.",
        )
        self.steps_lost = self._counter(
            "steps_lost_total", "Finished steps that recoveries made this node do again."
        )
        self.restarts = self._counter(
            "restarts_total", "Generations that replaced one this node was in.", ("reason",)
        )
        self.recovery_seconds = self._histogram(
            "recovery_seconds",
            "Seconds of each phase of the way to a generation's first step.",
            _RECOVERY_BUCKETS_S,
            ("phase",),
        )
        for phase in PHASES:
            self.recovery_seconds.labels(phase)

    def _checkpoints(self) -> None:
        self.capture_seconds = self._histogram(
            "capture_seconds",
            "Seconds that training waited while a worker's state was copied to shared memory.",
            _RECOVERY_BUCKETS_S,
        )
        self.capture_bytes = self._counter(
            "capture_bytes_total", "Bytes of state that workers copied to shared memory."
        )
        self.snapshot_step = self._gauge(
            "snapshot_last_step",
            "Step of the last snapshot of which this node holds all that it is to hold.",
        )
        self.checkpoint_seconds = self._histogram(
            "checkpoint_seconds",
            "Seconds to write this node's part of a checkpoint.",
            _CHECKPOINT_BUCKETS_S,
        )
        self.checkpoint_bytes = self._counter(
            "checkpoint_bytes_total", "Bytes of checkpoints written by this node."
        )
        self.checkpoint_step = self._gauge(
            "checkpoint_last_step", "Step of the last checkpoint known to be committed."
        )
        self.checkpoint_timestamp = self._gauge(
            "checkpoint_last_timestamp_seconds",
            "Unix time when the last checkpoint was seen committed.",
        )

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

    def observe_etcd(self, operation: str, seconds: float, error: str | None) -> None:
        """Records one request to etcd: its duration, and the code of its error if it failed."""
        if error is None:
            self.etcd_request_seconds.labels(operation).observe(seconds)
        else:
            self.etcd_errors.labels(operation, error).inc()

    def observe_step(
        self, local_rank: int, *, step: int, seconds: float, data_wait_s: float, samples: int
    ) -> None:
        """Records one step that a worker finished."""
        rank = str(local_rank)
        self.step.labels(rank).set(step)
        self.step_seconds.labels(rank).observe(seconds)
        self.data_wait_seconds.labels(rank).observe(data_wait_s)
        self.samples.labels(rank).inc(samples)

    def observe_time(self, seconds: Mapping[str, float]) -> None:
        """Sets where the job's time has gone, by class; empty: this agent cannot say."""
        if not seconds:
            self.job_seconds.clear()
        for kind in TIME_CLASSES if seconds else ():
            self.job_seconds.labels(kind).set(seconds.get(kind, 0.0))
        share = goodput(seconds)
        self.goodput.set(math.nan if share is None else share)

    def observe_capture(self, seconds: float, captured_bytes: int) -> None:
        """Records that a worker's state was copied to shared memory."""
        self.capture_seconds.observe(seconds)
        self.capture_bytes.inc(captured_bytes)

    def observe_checkpoint(self, *, step: int, seconds: float, written_bytes: int) -> None:
        """Records that this node's part of a checkpoint is written, and the checkpoint is
        committed."""
        self.checkpoint_seconds.observe(seconds)
        self.checkpoint_bytes.inc(written_bytes)
        self.checkpoint_step.set(step)
        self.checkpoint_timestamp.set(time.time())

    def forget_workers(self) -> None:
        """Removes the gauges of workers that are gone, so that none shows an old value."""
        self.step.clear()
        self.loss.clear()

    def text(self) -> bytes:
        """Returns the exposition, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, legend: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"elasticzero_{name}", legend, labels, registry=self.registry)

    def _counter(self, name: str, legend: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"elasticzero_{name}", legend, labels, registry=self.registry)

    def _histogram(
        self, name: str, legend: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Histogram:
        return Histogram(
            f"elasticzero_{name}", legend, labels, buckets=buckets, registry=self.registry
        )
