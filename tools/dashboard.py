"""Holds the panels of the Grafana dashboard, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from elasticzero.launcher.goodput import TIME_CLASSES
from elasticzero.ops.page.style import COLOURS

OF_JOB = '{namespace=~"$namespace",job_id="$job_id"}'
"""Selects the series of the job that the reader of the dashboard has chosen."""
BY_NODE = f"* on (namespace, instance, job) group_left (job_id, node) elasticzero_info{OF_JOB}"
"""Keeps the series of the job's nodes, and gives them the label `node`."""

CLASS_COLOURS: Mapping[str, str] = {name: COLOURS[name][0] for name in TIME_CLASSES}
"""Colours of the classes of time, as in the report."""

Kind = Literal["stat", "timeseries"]


@dataclass(frozen=True, slots=True)
class Query:
    """Says what a panel shows, and how Grafana names each series."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Describes one panel."""

    title: str
    queries: tuple[Query, ...]
    about: str
    unit: str = "short"
    """Unit as Grafana names it."""
    kind: Kind = "timeseries"
    width: int = 8
    """Columns of the 24 that a row has."""
    stacked: bool = False
    colours: Mapping[str, str] = field(default_factory=dict)
    """Colours of series by name; another has the next one of Grafana's own."""


@dataclass(frozen=True, slots=True)
class Row:
    """Groups panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


def job(name: str) -> str:
    """Returns the value of a metric of the job, whichever agent leads."""
    return f"max by (job_id) (elasticzero_job_{name}{OF_JOB})"


def age(name: str) -> str:
    """Returns the seconds since a time that a metric of the job gives."""
    return f"time() - {job(f'{name}_timestamp_seconds')}"


def quantile(share: float, name: str, *by: str) -> str:
    """Returns a quantile of a histogram of all nodes of the job, by these labels."""
    labels = ", ".join(("le", *by))
    rates = f"rate(elasticzero_{name}_bucket[$__rate_interval]) {BY_NODE}"
    return f"histogram_quantile({share:g}, sum by ({labels}) ({rates}))"


def rate(name: str, *by: str) -> str:
    """Returns the rate of a counter, summed over the job's nodes by these labels."""
    labels = f"by ({', '.join(by)}) " if by else ""
    return f"sum {labels}(rate(elasticzero_{name}[$__rate_interval]) {BY_NODE})"


def one(title: str, expression: str, about: str, unit: str = "short", width: int = 3) -> Panel:
    """Returns a panel with one number."""
    return Panel(
        title=title, queries=(Query(expression),), about=about, unit=unit, kind="stat", width=width
    )


NOW = Row(
    "Now",
    (
        one("Step", job("step"), "Optimizer steps applied."),
        one("Loss", job("loss"), "As the leader's script logged it last."),
        one("Goodput", job("goodput_ratio"), "Since the job began.", "percentunit"),
        one("Generation", job("generation"), "It is a new one after each recovery."),
        one("Time since a step", age("progress"), "Long: the job makes no progress.", "s"),
        one("Checkpoint age", age("checkpoint_last"), "Since the last commit.", "s"),
        one("Snapshot age", age("snapshot_last"), "What a lost node costs at most.", "s"),
        one("Steps lost", job("steps_lost_total"), "Finished steps that were done again."),
    ),
)

TRAINING = Row(
    "Training",
    (
        Panel(
            title="Loss",
            queries=(Query(job("loss"), "loss"),),
            about="As the leader's script logged it.",
        ),
        Panel(
            title="Norm of the gradient",
            queries=(Query(job("gradient_norm"), "norm"),),
            about="Before clipping.",
        ),
        Panel(
            title="Seconds of a step",
            queries=(
                Query(job("step_seconds"), "mean"),
                Query(quantile(0.5, "step_seconds"), "median"),
                Query(quantile(0.99, "step_seconds"), "99th percentile"),
            ),
            about="Mean: from step to step. The others: without busy sections, of all workers.",
            unit="s",
        ),
        Panel(
            title="Samples and tokens a second",
            queries=(
                Query(job("samples_per_second"), "samples"),
                Query(rate("tokens_total"), "tokens"),
            ),
            about="Tokens: where each rank's script logs `tokens`.",
        ),
        Panel(
            title="Model FLOPs utilization",
            queries=(Query(job("mfu_ratio"), "MFU"),),
            about="Needs --flops-per-sample and --peak-flops.",
            unit="percentunit",
        ),
        Panel(
            title="What the script logs",
            queries=(Query(f"max by (name) (elasticzero_log {BY_NODE})", "{{name}}"),),
            about="Every number of session.log; of several workers the greatest.",
        ),
    ),
)

TIME = Row(
    "Where the time goes",
    (
        Panel(
            title="Share of the last minutes by class",
            queries=(
                Query(
                    f"sum by (time_class) (delta(elasticzero_job_seconds{OF_JOB}[5m]))"
                    " / scalar(sum("
                    f"delta(elasticzero_job_seconds{OF_JOB}[5m])))",
                    "{{time_class}}",
                ),
            ),
            about="The time of steps that are done again moves from productive to wasted.",
            unit="percentunit",
            width=12,
            stacked=True,
            colours=CLASS_COLOURS,
        ),
        Panel(
            title="Seconds since the job began",
            queries=(
                Query(f"max by (time_class) (elasticzero_job_seconds{OF_JOB})", "{{time_class}}"),
            ),
            about="All classes add up to the age of the job.",
            unit="s",
            width=12,
            stacked=True,
            colours=CLASS_COLOURS,
        ),
    ),
)

NODES = Row(
    "Nodes and failures",
    (
        Panel(
            title="Nodes",
            queries=(
                Query(job("nodes_min"), "MIN"),
                Query(job("nodes_max"), "MAX"),
                Query(job("set_aside_nodes"), "set aside"),
                Query(job("waiting_nodes"), "waiting"),
                Query(job("members"), "members"),
            ),
            about="Waiting: registered and without a place.",
        ),
        Panel(
            title="Recoveries by cause",
            queries=(
                Query(f"max by (cause) (elasticzero_job_recoveries_total{OF_JOB})", "{{cause}}"),
            ),
            about="Since the leading agent joined. boundary: nodes came or left in good order.",
        ),
        Panel(
            title="Seconds of a recovery by phase",
            queries=(
                Query(
                    f"max by (phase) (elasticzero_job_recovery_seconds_total{OF_JOB})"
                    f" / scalar(sum(max by (cause) (elasticzero_job_recoveries_total{OF_JOB})))",
                    "{{phase}}",
                ),
            ),
            about="The mean of all recoveries.",
            unit="s",
            stacked=True,
        ),
        Panel(
            title="Interruptions by node",
            queries=(
                Query(f"max by (node) (elasticzero_job_interruptions_total{OF_JOB})", "{{node}}"),
            ),
            about="Generations that ended because of a node.",
        ),
        Panel(
            title="Preemptions and drains",
            queries=(
                Query(f"max by (source) (elasticzero_job_preemptions_total{OF_JOB})", "{{source}}"),
                Query(job("drains_total"), "drains"),
            ),
            about="Nodes that left in good order.",
        ),
        Panel(
            title="Leader",
            queries=(Query(f"elasticzero_leader {BY_NODE}", "{{node}}"),),
            about="1 for the agent that leads.",
        ),
    ),
)

WORKERS = Row(
    "Workers",
    (
        Panel(
            title="Own time of the slowest workers",
            queries=(
                Query(
                    f"max by (node, local_rank) (elasticzero_job_compute_ratio{OF_JOB})",
                    "{{node}} {{local_rank}}",
                ),
            ),
            about="As multiples of the median of all workers; all others wait for a straggler.",
        ),
        Panel(
            title="Own time in a step",
            queries=(Query(quantile(0.5, "compute_seconds", "node"), "{{node}}"),),
            about="Median; forwards and backwards without waits for data or collectives.",
            unit="s",
        ),
        Panel(
            title="Wait for data in a step",
            queries=(Query(quantile(0.99, "data_wait_seconds", "node"), "{{node}}"),),
            about="99th percentile.",
            unit="s",
        ),
        Panel(
            title="GPU utilization",
            queries=(Query(f"elasticzero_gpu_utilization_ratio {BY_NODE}", "{{node}} {{gpu}}"),),
            about="Needs the package nvidia-ml-py.",
            unit="percentunit",
            width=12,
        ),
        Panel(
            title="GPU memory in use",
            queries=(
                Query(
                    "elasticzero_gpu_memory_used_bytes / elasticzero_gpu_memory_total_bytes "
                    f"{BY_NODE}",
                    "{{node}} {{gpu}}",
                ),
            ),
            about="Share of the GPU's memory; needs the package nvidia-ml-py.",
            unit="percentunit",
            width=12,
        ),
    ),
)

STATE = Row(
    "Snapshots and checkpoints",
    (
        Panel(
            title="Training waits for a copy of its state",
            queries=(Query(quantile(0.99, "capture_seconds", "purpose"), "{{purpose}}"),),
            about="99th percentile.",
            unit="s",
        ),
        Panel(
            title="Bytes copied to memory",
            queries=(Query(rate("capture_bytes_total", "purpose"), "{{purpose}}"),),
            about="All nodes together.",
            unit="Bps",
        ),
        Panel(
            title="Bytes written to storage",
            queries=(Query(rate("checkpoint_bytes_total"), "checkpoints"),),
            about="All nodes together.",
            unit="Bps",
        ),
        Panel(
            title="Seconds to write a checkpoint",
            queries=(Query(quantile(0.99, "checkpoint_seconds", "node"), "{{node}}"),),
            about="99th percentile, of the node's part.",
            unit="s",
        ),
        Panel(
            title="Failures",
            queries=(
                Query(rate("snapshots_failed_total", "node"), "snapshots, {{node}}"),
                Query(rate("checkpoints_failed_total", "node"), "checkpoints, {{node}}"),
            ),
            about="A second.",
        ),
        Panel(
            title="Age of the last checkpoint",
            queries=(
                Query(age("checkpoint_last"), "checkpoint"),
                Query(age("snapshot_last"), "snapshot"),
            ),
            about="The work that the loss of all nodes, or of one, would cost.",
            unit="s",
        ),
    ),
)

ETCD = Row(
    "etcd",
    (
        Panel(
            title="Seconds of a request",
            queries=(Query(quantile(0.99, "etcd_request_seconds", "operation"), "{{operation}}"),),
            about="99th percentile.",
            unit="s",
        ),
        Panel(
            title="Errors a second",
            queries=(
                Query(rate("etcd_errors_total", "operation", "code"), "{{operation}} {{code}}"),
            ),
            about="Requests and streams that failed.",
        ),
        Panel(
            title="Away",
            queries=(Query(rate("etcd_away_seconds_total", "node"), "{{node}}"),),
            about="Share of the time in which etcd did not answer.",
            unit="percentunit",
        ),
    ),
)

ROWS = (NOW, TRAINING, TIME, NODES, WORKERS, STATE, ETCD)
