"""The exposition is what Prometheus and its linter accept, and holds what was observed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from elasticzero.launcher.observability.metrics import PHASES, Metrics


def observed() -> Metrics:
    metrics = Metrics()
    metrics.generation.set(3)
    metrics.world_size.set(4)
    metrics.members.set(2)
    metrics.workers_running.set(2)
    for local_rank in (0, 1):
        metrics.observe_step(local_rank, step=7, seconds=0.25, data_wait_s=0.01, samples=12)
        metrics.loss.labels(str(local_rank)).set(1.5)
    metrics.restarts.labels("failure").inc()
    metrics.recovery_seconds.labels("connect").observe(0.2)
    metrics.observe_capture(0.02, 2048)
    metrics.observe_checkpoint(step=6, seconds=0.5, written_bytes=1024)
    metrics.observe_etcd("read", 0.002, None)
    metrics.observe_etcd("write", 2.0, "unavailable")
    return metrics


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"elasticzero_{name}", labels)


def test_what_is_observed_is_exposed() -> None:
    metrics = observed()
    assert sample(metrics, "generation") == 3
    assert sample(metrics, "step", local_rank="1") == 7
    assert sample(metrics, "step_seconds_sum", local_rank="0") == 0.25
    assert sample(metrics, "data_wait_seconds_count", local_rank="0") == 1
    assert sample(metrics, "samples_total", local_rank="0") == 12
    assert sample(metrics, "loss", local_rank="0") == 1.5
    assert sample(metrics, "restarts_total", reason="failure") == 1
    assert sample(metrics, "checkpoint_bytes_total") == 1024
    assert sample(metrics, "checkpoint_last_step") == 6
    assert sample(metrics, "etcd_request_seconds_count", operation="read") == 1
    assert sample(metrics, "etcd_request_seconds_count", operation="write") is None
    assert sample(metrics, "etcd_errors_total", operation="write", code="unavailable") == 1
    assert (sample(metrics, "checkpoint_last_timestamp_seconds") or 0) > 1.7e9


def test_every_phase_of_a_recovery_is_there_from_the_start() -> None:
    for phase in PHASES:
        assert sample(Metrics(), "recovery_seconds_count", phase=phase) == 0


def test_exited_workers_leave_no_gauge_but_their_counts() -> None:
    metrics = observed()
    metrics.forget_workers()
    assert sample(metrics, "step", local_rank="0") is None
    assert sample(metrics, "loss", local_rank="0") is None
    assert sample(metrics, "samples_total", local_rank="0") == 12


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
            assert set(one.labels) <= {"local_rank", "reason", "phase", "operation", "code", "le"}


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
