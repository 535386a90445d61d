"""The exposition is what Prometheus and its linter accept, and holds what was observed."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from elasticzero.ipc.messages import Captured, Logged, Stepped
from elasticzero.launcher.observability.metrics import (
    INFO_LABELS,
    MAX_LOGGED_NAMES,
    PHASES,
    Metrics,
)

STEPPED = Stepped(
    step=7,
    at_s=0.0,
    step_s=0.25,
    data_wait_s=0.01,
    samples=12,
    gradient_norm=3.5,
    compute_s=0.2,
    wire_bytes={"gradients sent": 900, "gradients received": 800},
)
LABELS = (
    *("local_rank", "reason", "cause", "phase", "purpose", "operation", "code", "name", "gpu"),
    *("kind", "direction"),
)


def observed() -> Metrics:
    metrics = Metrics()
    metrics.identify("train", "a", "ddp", "world", "snapshot")
    metrics.observe_world(3, 4, 2)
    metrics.workers_running.set(2)
    for local_rank in (0, 1):
        metrics.received(local_rank, STEPPED)
        metrics.received(
            local_rank, Logged(step=7, scalars={"loss": 1.5, "tokens": 640, "lr": 0.1})
        )
    metrics.restarts.labels("failure").inc()
    metrics.recovery_seconds.labels("failure", "connect").observe(0.2)
    captured = Captured(step=6, generation=3, rank=0, world_size=4, seconds=0.02, bytes=2048)
    metrics.received(0, captured)
    metrics.received(0, replace(captured, checkpoint=True, bytes=4096))
    metrics.observe_snapshot(6, held=True)
    metrics.observe_snapshot(7, held=False)
    metrics.observe_checkpoint(step=6, seconds=0.5, written_bytes=1024)
    metrics.observe_etcd("read", 0.002, None)
    metrics.observe_etcd("write", 2.0, "unavailable")
    return metrics


def sample(metrics: Metrics, name: str, /, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"elasticzero_{name}", labels)


def test_what_is_observed_is_exposed() -> None:
    metrics = observed()
    assert sample(metrics, "generation") == 3
    assert sample(metrics, "step", local_rank="1") == 7
    assert sample(metrics, "step_seconds_sum", local_rank="0") == 0.25
    assert sample(metrics, "data_wait_seconds_count", local_rank="0") == 1
    assert sample(metrics, "samples_total", local_rank="0") == 12
    assert sample(metrics, "loss", local_rank="0") == 1.5
    assert sample(metrics, "log", local_rank="0", name="lr") == 0.1
    assert sample(metrics, "tokens_total", local_rank="1") == 640
    assert sample(metrics, "compute_seconds_sum", local_rank="0") == 0.2
    assert sample(metrics, "gradient_norm", local_rank="0") == 3.5
    assert sample(metrics, "capture_bytes_total", purpose="snapshot") == 2048
    assert sample(metrics, "capture_bytes_total", purpose="checkpoint") == 4096
    assert sample(metrics, "snapshot_last_step") == 6
    assert sample(metrics, "snapshots_failed_total") == 1
    assert (sample(metrics, "generation_start_timestamp_seconds") or 0) > 1.7e9
    assert sample(metrics, "restarts_total", reason="failure") == 1
    assert sample(metrics, "checkpoint_bytes_total") == 1024
    assert sample(metrics, "checkpoint_last_step") == 6
    assert sample(metrics, "etcd_request_seconds_count", operation="read") == 1
    assert sample(metrics, "etcd_request_seconds_count", operation="write") is None
    assert sample(metrics, "etcd_errors_total", operation="write", code="unavailable") == 1
    assert (sample(metrics, "checkpoint_last_timestamp_seconds") or 0) > 1.7e9


def test_every_phase_of_a_recovery_is_there_from_the_start() -> None:
    for phase in PHASES:
        assert sample(Metrics(), "recovery_seconds_count", cause="start", phase=phase) == 0


def test_exited_workers_leave_no_gauge_but_their_counts() -> None:
    metrics = observed()
    metrics.forget_workers()
    assert sample(metrics, "step", local_rank="0") is None
    assert sample(metrics, "loss", local_rank="0") is None
    assert sample(metrics, "log", local_rank="0", name="loss") is None
    assert sample(metrics, "samples_total", local_rank="0") == 12


def test_the_number_of_logged_names_is_bounded() -> None:
    metrics = Metrics()
    for index in range(2 * MAX_LOGGED_NAMES):
        metrics.received(0, Logged(step=1, scalars={f"x{index}": float(index), "x0": 7.0}))
    text = metrics.text().decode()
    assert text.count("elasticzero_log{") == MAX_LOGGED_NAMES
    assert sample(metrics, "log", local_rank="0", name="x0") == 7.0


def test_times_are_not_known_before_anything_has_happened() -> None:
    for name in ("generation_start", "snapshot_last", "checkpoint_last"):
        value = sample(Metrics(), f"{name}_timestamp_seconds")
        assert value is not None and math.isnan(value)


def test_everything_that_is_served_is_described() -> None:
    described = {name for metric in Metrics().descriptions for name in metric.series}
    families = text_string_to_metric_families(observed().text().decode())
    served = {one.name for family in families for one in family.samples}
    assert {name for name in served if not name.endswith("_created")} <= described


def test_registries_are_apart() -> None:
    one, other = observed(), Metrics()
    assert sample(one, "generation") == 3
    assert sample(other, "generation") == 0


def test_the_text_parses_and_every_name_has_prefix_and_legend() -> None:
    families = list(text_string_to_metric_families(observed().text().decode()))
    assert len(families) >= 20
    for family in families:
        assert family.name.startswith("elasticzero_")
        assert family.documentation.endswith(".")
        for one in family.samples:
            assert set(one.labels) <= {*LABELS, *INFO_LABELS, "le"}


def test_promtool_finds_nothing_to_blame(program: Callable[[str], str]) -> None:
    check = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=observed().text(),
        capture_output=True,
        timeout=30,
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")


def test_importing_is_light() -> None:
    module = "elasticzero.launcher.observability.metrics"
    code = f"import {module}, sys; print({{'torch', 'grpc', 'etcd3'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "set()", done.stderr


def test_bytes_on_the_wire_are_added_up_over_workers_and_their_successors() -> None:
    metrics = Metrics()

    def sent() -> float | None:
        return sample(metrics, "wire_bytes_total", kind="gradients", direction="sent")

    for local_rank, count, total in (
        (0, 100, 100),
        (1, 40, 140),
        (0, 250, 290),
        (0, 250, 290),
        (0, 70, 360),  # another process has taken its place
        (1, 90, 410),
    ):
        stepped = replace(STEPPED, wire_bytes={"gradients sent": count})
        metrics.received(local_rank, stepped)
        assert sent() == total
    metrics.received(0, replace(STEPPED, wire_bytes={}))  # of a strategy that does not count
    assert sent() == 410
