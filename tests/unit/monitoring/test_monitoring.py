"""The alerts and the dashboard ask for what agents serve, and the alerts fire when they should."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import yaml

from elasticzero.launcher.observability.compute_time import STRAGGLER_RATIO
from elasticzero.launcher.options.table import DEFAULT_HTTP_PORT
from elasticzero.ops.dashboard.body_tables import node_table
from tests.support.promql import mistakes, panel_queries, rules, selectors, series
from tests.unit.renders import kustomized
from tools import monitoring
from tools.sample_job import document

TESTS = Path(__file__).parent / "alerts.test.yaml"


@pytest.fixture
def folder(root: Path) -> Path:
    return root / "k8s" / "components" / "monitoring"


def promtool(program: Callable[[str], str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [program("promtool"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_promtool_accepts_the_rules(folder: Path, program: Callable[[str], str]) -> None:
    completed = promtool(program, "check", "rules", str(folder / "rules.yaml"))
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_each_alert_fires_when_it_should_and_only_then(program: Callable[[str], str]) -> None:
    completed = promtool(program, "test", "rules", str(TESTS))
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_each_alert_has_a_case_that_fires_and_one_that_does_not(root: Path) -> None:
    cases: dict[str, set[bool]] = {}
    for test in yaml.safe_load(TESTS.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            cases.setdefault(case["alertname"], set()).add(bool(case["exp_alerts"]))
    assert cases == {rule["alert"]: {True, False} for rule in rules(root)}


def test_a_straggler_is_one_for_the_alert_as_on_screens(root: Path) -> None:
    (rule,) = (rule for rule in rules(root) if rule["alert"] == "ElasticZeroStraggler")
    assert rule["expr"].split()[-2:] == [">", str(STRAGGLER_RATIO)]
    (member,) = document(["node-0"])["nodes"]
    for ratio, marked in ((STRAGGLER_RATIO, False), (STRAGGLER_RATIO + 0.01, True)):
        shown = node_table([{**member, "compute_ratio": ratio}])[0]
        assert ("All others wait for this node" in shown) == marked


def test_each_alert_leads_to_its_entry_in_the_runbook(root: Path) -> None:
    page = (root / "docs" / "runbook.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    assert list(sections) == [rule["alert"] for rule in rules(root)]
    for rule in rules(root):
        anchor = rule["alert"].lower()
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{anchor}"
        assert rule["labels"]["severity"] in ("warning", "critical")
        for part in ("**Meaning.**", "**Look.**", "**Do.**"):
            assert part in sections[rule["alert"]], rule["alert"]


def test_alerts_name_metrics_and_labels_that_exist(root: Path) -> None:
    metrics = series()
    wrong = {r["alert"]: errors for r in rules(root) if (errors := mistakes(r["expr"], metrics))}
    assert not wrong


def test_the_dashboard_names_metrics_and_labels_that_exist() -> None:
    metrics = series()
    wrong = {
        title: errors
        for title, expression, _ in panel_queries()
        if (errors := mistakes(expression, metrics))
    }
    assert not wrong


def test_legends_name_labels_that_exist() -> None:
    metrics = series()
    for title, expression, legend in panel_queries():
        labels = set[str]().union(*(metrics[name] for name, _ in selectors(expression)))
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels, title


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("elasticzero_stepp", ["no metric elasticzero_stepp"]),
        ('elasticzero_step{rank="0"}', ["no label rank of elasticzero_step"]),
        ("sum by (ranks) (elasticzero_step)", ["no label ranks"]),
        ("elasticzero_step * on (instance) group_left (nod) elasticzero_info", ["no label nod"]),
        ('rate(elasticzero_step_seconds_bucket{le="1"}[1m])', []),
        ("max by (job_id, local_rank) (elasticzero_job_compute_ratio)", []),
    ],
)
def test_a_query_of_what_is_not_served_is_found(expression: str, why: list[str]) -> None:
    assert mistakes(expression, series()) == why


def test_generated_files_are_not_stale() -> None:
    assert monitoring.stale() == []


def test_the_operator_gets_the_same_rules(folder: Path) -> None:
    wrapped = yaml.safe_load((folder / "prometheusrule.yaml").read_text())
    assert (wrapped["apiVersion"], wrapped["kind"]) == (
        "monitoring.coreos.com/v1",
        "PrometheusRule",
    )
    assert wrapped["spec"] == yaml.safe_load((folder / "rules.yaml").read_text())


def test_the_pod_monitor_finds_the_agents_and_both_paths(root: Path, folder: Path) -> None:
    """Its fields are those of monitoring.coreos.com/v1 in prometheus-operator's API reference."""
    monitor = yaml.safe_load((folder / "podmonitor.yaml").read_text())
    spec = monitor["spec"]
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    assert spec.keys() == {"selector", "podMetricsEndpoints"}
    endpoints = spec["podMetricsEndpoints"]
    assert [endpoint["path"] for endpoint in endpoints] == ["/metrics", "/metrics/job"]
    for endpoint in endpoints:
        assert endpoint.keys() == {"port", "path", "interval", "tlsConfig", "relabelings"}
        path, scheme = endpoint["relabelings"]
        assert path["targetLabel"] == "metrics_path"
        assert scheme["targetLabel"] == "__scheme__"
        assert scheme["sourceLabels"] == ["__meta_kubernetes_pod_annotation_prometheus_io_scheme"]
    manifests = list(yaml.safe_load_all((root / "k8s" / "base" / "agents.yaml").read_text()))
    (template,) = (m["spec"]["template"] for m in manifests if m["kind"] == "Job")
    assert spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    ports = {p["name"]: p["containerPort"] for p in template["spec"]["containers"][0]["ports"]}
    assert {endpoint["port"] for endpoint in endpoints} == {"http"}
    assert ports["http"] == DEFAULT_HTTP_PORT


def test_google_scrapes_both_paths_under_different_names(root: Path, folder: Path) -> None:
    """Endpoints of one port within one resource are refused by the operator."""
    monitorings = list(yaml.safe_load_all((folder / "podmonitoring.yaml").read_text()))
    schema = root / "tests" / "fixtures" / "kubernetes" / "podmonitoring.json"
    manifests = list(yaml.safe_load_all((root / "k8s" / "base" / "agents.yaml").read_text()))
    (template,) = (m["spec"]["template"] for m in manifests if m["kind"] == "Job")
    for resource in monitorings:
        jsonschema.validate(resource, json.loads(schema.read_text()))
        selected = resource["spec"]["selector"]["matchLabels"]
        assert selected.items() <= template["metadata"]["labels"].items()
    endpoints = [m["spec"]["endpoints"] for m in monitorings]
    assert [[e["path"] for e in one] for one in endpoints] == [["/metrics"], ["/metrics/job"]]
    assert {e["port"] for one in endpoints for e in one} == {"http"}
    assert len({m["metadata"]["name"] for m in monitorings}) == 2
    wrong = {**monitorings[0], "spec": {**monitorings[0]["spec"], "interval": "15s"}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, json.loads(schema.read_text()))


def test_the_dashboard_is_whole(folder: Path) -> None:
    board = json.loads((folder / "dashboard.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        rows, columns = range(at["y"], at["y"] + at["h"]), range(at["x"], at["x"] + at["w"])
        cells = {(x, y) for x in columns for y in rows}
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
    shown = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert shown == [expression for _, expression, _ in panel_queries()]
    metrics = series()
    for annotation in board["annotations"]["list"]:
        assert not mistakes(annotation["expr"], metrics)
    variables = [variable["query"] for variable in board["templating"]["list"]]
    assert not [m for v in variables for m in mistakes(str(v), metrics)]


def test_kustomize_renders_the_component(
    root: Path, tmp_path: Path, program: Callable[[str], str]
) -> None:
    overlay = root / "k8s" / "overlays" / "quick-look"
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{relative(overlay, tmp_path)}]\n"
        f"components: [{relative(root / 'k8s' / 'components' / 'monitoring', tmp_path)}]\n"
    )
    rendered = kustomized(tmp_path, program)
    kinds = {manifest["kind"] for manifest in rendered}
    assert {"PodMonitor", "PrometheusRule", "ConfigMap", "Job"} <= kinds
    (board,) = (m for m in rendered if "dashboard.json" in m.get("data", {}))
    assert json.loads(board["data"]["dashboard.json"])["uid"] == "elasticzero"
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"


def relative(path: Path, base: Path) -> str:
    up = "/".join([".."] * (len(base.resolve().parts) - 1))
    return f"{up}{path.resolve()}"


def test_the_component_names_files_that_exist(folder: Path) -> None:
    component = yaml.safe_load((folder / "kustomization.yaml").read_text())
    files = component["resources"] + component["configMapGenerator"][0]["files"]
    assert component["kind"] == "Component"
    assert all((folder / name).is_file() for name in files)
