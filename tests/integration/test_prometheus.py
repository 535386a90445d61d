"""A real Prometheus scrapes a job with TLS, a worker is killed, and every query is answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from elasticzero.launcher.secrets import TOKEN, Secret
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.tls.authority import JobAuthority
from tests.integration.clusters import REGRESSION, story
from tests.support.promql import panel_queries, rules, selectors
from tools.prometheus import Prometheus, as_grafana_sends, prometheus

JOB_TOKEN = "the-token-of-this-very-job"
SLOW = "node-2"
EMPTY = {
    "GPU utilization": "there is no GPU",
    "GPU memory in use": "there is no GPU",
    "Errors a second": "etcd answers",
}
"""Panels for which this job produces nothing, and why."""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_prometheus_answers_every_query_about_a_job_with_a_killed_worker(
    tmp_path: Path, root: Path, job: str, etcd: EtcdServer, program: Callable[[str], str]
) -> None:
    server = program("prometheus")
    arguments = ["--nnodes", "3:3", "--strategy", "zero1", "--snapshot-every", "4"]
    arguments += ["--checkpoint-dir", str(tmp_path / "c"), "--checkpoint-every", "10"]
    arguments += ["--flops-per-sample", "1e6", "--peak-flops", "1e9"]
    arguments += [str(REGRESSION), "--pause", "0.1", "--tokens", "128", "--epochs", "10"]
    slow = tmp_path / "slow"
    slow.write_text("0.3")
    token = {TOKEN: JOB_TOKEN}
    environments = [token, token, {**token, "TESTER_PAUSE_FILE": str(slow)}]
    authority = JobAuthority(Secret(JOB_TOKEN), job).certificate
    rules_file = root / "k8s" / "components" / "monitoring" / "rules.yaml"
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3, environments=environments) as told:
        told.wait_for_step(2)
        ports = {node: e["port"] for node, e in told.told if e["event"] == "serving"}
        addresses = [f"127.0.0.1:{port}" for port in ports.values()]
        with prometheus(
            server, tmp_path / "prometheus", rules_file, addresses, authority
        ) as prometheus_server:
            told.wait(
                "scrapes of generation 1",
                lambda: len(prometheus_server.query("elasticzero_step")) == 3,
            )
            told.wait_for_step(told.step + 8)
            told.cluster.kill_worker(told.cluster.nodes[SLOW])
            told.wait_for_first_step(2)
            told.wait_for_step(told.step + 12)
            told.wait(
                "the own times of all workers",
                lambda: prometheus_server.query("elasticzero_job_compute_ratio > 1.3"),
            )
            told.wait(
                "a checkpoint of generation 2",
                lambda: [
                    e for e in told.of("checkpoint") if e["generation"] == 2 and e["step"] > 10
                ],
            )
            told.wait_for_step(told.step + 10)
            check_targets(prometheus_server, ports, job)
            check_numbers(prometheus_server, told.step, job)
            check_rules(prometheus_server, root, job)
            check_dashboard(prometheus_server, job)
        slow.write_text("0.0")
        told.wait_for_end()


def check_targets(server: Prometheus, ports: Mapping[str, int], job: str) -> None:
    up = server.values("up", "instance", "job")
    assert len(up) == 6 and set(up.values()) == {1.0}
    info = server.values("elasticzero_info", "instance", "node", "job_id", "strategy")
    assert set(info) == {(f"127.0.0.1:{p}", n, job, "zero1") for n, p in ports.items()}
    assert len(server.query("elasticzero_job_generation")) == 1
    assert server.value("sum(elasticzero_leader)") == 1


def check_numbers(server: Prometheus, step: int, job: str) -> None:
    assert server.value("elasticzero_job_generation") == 2
    assert server.value("elasticzero_job_members") == 3
    assert server.value("elasticzero_job_waiting_nodes") == 0
    assert server.value("elasticzero_job_set_aside_nodes") == 0
    assert step - 12 <= server.value("elasticzero_job_step") <= step + 12
    assert server.values("elasticzero_job_recoveries_total", "cause") == {("failure",): 1}
    assert server.values("elasticzero_job_interruptions_total > 0", "node") == {(SLOW,): 1}
    assert server.value('elasticzero_job_seconds{time_class="productive"}') > 1
    assert 0 < server.value("elasticzero_job_goodput_ratio") < 1
    assert server.value("time() - elasticzero_job_progress_timestamp_seconds") < 10
    assert server.value("time() - elasticzero_job_checkpoint_last_timestamp_seconds") < 60
    assert server.value("elasticzero_job_checkpoint_every_steps") == 10
    samples = server.value("elasticzero_job_samples_per_second")
    assert server.value("elasticzero_job_mfu_ratio") == pytest.approx(samples / 3000, rel=0.2)
    tokens = server.value("sum(rate(elasticzero_tokens_total[10s]))")
    assert tokens == pytest.approx(3 * 128 * samples / 10, rel=0.5)
    slowest = server.values("elasticzero_job_compute_ratio > 1.3", "node")
    assert list(slowest) == [(SLOW,)]
    joined = server.values(
        "elasticzero_step * on (instance, job) group_left (job_id, node) elasticzero_info",
        "job_id",
        "node",
    )
    assert set(joined) == {(job, f"node-{index}") for index in range(3)}


def check_rules(server: Prometheus, root: Path, job: str) -> None:
    groups = server.get("rules")["groups"]
    told = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert told.keys() == {rule["alert"] for rule in rules(root)}
    assert {rule["health"] for rule in told.values()} == {"ok"}
    firing = [alert["labels"] for alert in server.get("alerts")["alerts"]]
    assert {alert["alertname"] for alert in firing} <= {"ElasticZeroStraggler"}
    for rule in rules(root):
        for name, _ in selectors(rule["expr"]):
            assert server.query(name), f"{rule['alert']}: {name} has no data"


def check_dashboard(server: Prometheus, job: str) -> None:
    empty = {}
    for title, expression, legend in panel_queries():
        result = server.query(as_grafana_sends(expression, job))
        values = [float(one["value"][1]) for one in result]
        if not values or all(value != value for value in values):
            empty[title] = legend
    assert empty.keys() <= EMPTY.keys(), empty
