"""A real Prometheus scrapes a real job in which a worker is killed, and answers every query."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, story
from tests.support.promql import panel_queries, rules, selectors
from tools.prometheus import Prometheus, as_grafana_sends, prometheus

SLOW = "node-2"
EMPTY = {
    "GPU utilization": "there is no GPU",
    "GPU memory in use": "there is no GPU",
    "Errors a second": "etcd answers",
}
"""Panels for which this job produces nothing, and why."""


@pytest.mark.timeout(240)
def test_prometheus_answers_every_query_about_a_job_with_a_killed_worker(
    tmp_path: Path, root: Path, job: str, etcd: EtcdServer, program: Callable[[str], str]
) -> None:
    server = program("prometheus")
    words = ["--nnodes", "3:3", "--strategy", "zero1", "--snapshot-every", "4"]
    words += ["--checkpoint-dir", str(tmp_path / "c"), "--checkpoint-every", "10"]
    words += ["--flops-per-sample", "1e6", "--peak-flops", "1e9"]
    words += [str(REGRESSION), "--pause", "0.1", "--tokens", "128", "--epochs", "10"]
    slow = tmp_path / "slow"
    slow.write_text("0.3")
    each = [{}, {}, {"TESTER_PAUSE_FILE": str(slow)}]
    rules_file = root / "k8s" / "components" / "monitoring" / "rules.yaml"
    with story(tmp_path, etcd.endpoint, job, words, nodes=3, environments=each) as told:
        told.wait_for_step(2)
        ports = {node: e["port"] for node, e in told.told if e["event"] == "serving"}
        addresses = [f"127.0.0.1:{port}" for port in ports.values()]
        with prometheus(server, tmp_path / "prometheus", rules_file, addresses) as found:
            told.wait(
                "scrapes of generation 1",
                lambda: len(found.query("elasticzero_step")) == 3,
            )
            told.wait_for_step(told.step + 8)
            told.cluster.kill_worker(told.cluster.nodes[SLOW])
            told.wait_for_first_step(2)
            told.wait_for_step(told.step + 12)
            told.wait(
                "the own times of all workers",
                lambda: found.query("elasticzero_job_compute_ratio > 1.3"),
            )
            told.wait(
                "a checkpoint of generation 2",
                lambda: [
                    e for e in told.of("checkpoint") if e["generation"] == 2 and e["step"] > 10
                ],
            )
            told.wait_for_step(told.step + 10)
            check_targets(found, ports, job)
            check_numbers(found, told.step, job)
            check_rules(found, root, job)
            check_dashboard(found, job)
        slow.write_text("0.0")
        told.wait_for_end()


def check_targets(found: Prometheus, ports: Mapping[str, int], job: str) -> None:
    up = found.values("up", "instance", "job")
    assert len(up) == 6 and set(up.values()) == {1.0}
    info = found.values("elasticzero_info", "instance", "node", "job_id", "strategy")
    assert set(info) == {(f"127.0.0.1:{p}", n, job, "zero1") for n, p in ports.items()}
    assert len(found.query("elasticzero_job_generation")) == 1
    assert found.value("sum(elasticzero_leader)") == 1


def check_numbers(found: Prometheus, step: int, job: str) -> None:
    assert found.value("elasticzero_job_generation") == 2
    assert found.value("elasticzero_job_members") == 3
    assert found.value("elasticzero_job_waiting_nodes") == 0
    assert found.value("elasticzero_job_set_aside_nodes") == 0
    assert step - 12 <= found.value("elasticzero_job_step") <= step + 12
    assert found.values("elasticzero_job_recoveries_total", "cause") == {("failure",): 1}
    assert found.values("elasticzero_job_interruptions_total > 0", "node") == {(SLOW,): 1}
    assert found.value('elasticzero_job_seconds{time_class="productive"}') > 1
    assert 0 < found.value("elasticzero_job_goodput_ratio") < 1
    assert found.value("time() - elasticzero_job_progress_timestamp_seconds") < 10
    assert found.value("time() - elasticzero_job_checkpoint_last_timestamp_seconds") < 60
    assert found.value("elasticzero_job_checkpoint_every_steps") == 10
    samples = found.value("elasticzero_job_samples_per_second")
    assert found.value("elasticzero_job_mfu_ratio") == pytest.approx(samples / 3000, rel=0.2)
    tokens = found.value("sum(rate(elasticzero_tokens_total[10s]))")
    assert tokens == pytest.approx(3 * 128 * samples / 10, rel=0.5)
    slowest = found.values("elasticzero_job_compute_ratio > 1.3", "node")
    assert list(slowest) == [(SLOW,)]
    joined = found.values(
        "elasticzero_step * on (instance, job) group_left (job_id, node) elasticzero_info",
        "job_id",
        "node",
    )
    assert set(joined) == {(job, f"node-{index}") for index in range(3)}


def check_rules(found: Prometheus, root: Path, job: str) -> None:
    groups = found.get("rules")["groups"]
    told = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert told.keys() == {rule["alert"] for rule in rules(root)}
    assert {rule["health"] for rule in told.values()} == {"ok"}
    firing = [alert["labels"] for alert in found.get("alerts")["alerts"]]
    assert {alert["alertname"] for alert in firing} <= {"ElasticZeroStraggler"}
    for rule in rules(root):
        for name, _ in selectors(rule["expr"]):
            assert found.query(name), f"{rule['alert']}: {name} has no data"


def check_dashboard(found: Prometheus, job: str) -> None:
    empty = {}
    for title, expression, legend in panel_queries():
        result = found.query(as_grafana_sends(expression, job))
        values = [float(one["value"][1]) for one in result]
        if not values or all(value != value for value in values):
            empty[title] = legend
    assert empty.keys() <= EMPTY.keys(), empty
