"""Writes two files of k8s/components/monitoring: `python -m tools.monitoring [--check]`.

`prometheusrule.yaml` wraps `rules.yaml` for Prometheus' operator, and `dashboard.json` is Grafana's
form of `tools/dashboard.py`. With --check nothing is written: the exit code is 1 if a file differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tools.dashboard import ROWS, Panel, Query, Row
from tools.source import ROOT

FOLDER = ROOT / "k8s" / "components" / "monitoring"
GENERATED = "# `make reference` writes this file from rules.yaml; do not edit it.\n"
HEAD = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: elasticzero
  labels:
    app.kubernetes.io/name: elasticzero
    app.kubernetes.io/component: monitoring
spec:
"""
HEIGHT = 8
STAT_HEIGHT = 4
COLUMNS = 24
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def prometheus_rule() -> str:
    lines = (FOLDER / "rules.yaml").read_text().splitlines(keepends=True)
    rules = [f"  {line}" if line.strip() else line for line in lines if not line.startswith("#")]
    return GENERATED + HEAD + "".join(rules)


def dashboard() -> str:
    panels = [panel for row in _placed_rows() for panel in row]
    value = {
        "title": "ElasticZero",
        "uid": "elasticzero",
        "tags": ["elasticzero"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": [_generations()]},
        "panels": panels,
    }
    return json.dumps(value, indent=1) + "\n"


def _variables() -> list[dict[str, Any]]:
    """Returns what the reader of the dashboard chooses: a data source, a namespace and a job."""
    named = 'label_values(elasticzero_info{namespace=~"$namespace"}, job_id)'
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        _variable("namespace", "label_values(elasticzero_info, namespace)")
        | {"includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}},
        _variable("job_id", named),
    ]


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": {"job_id": "Job"}.get(name, name.capitalize()),
        "type": "query",
        "datasource": DATA_SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
    }


def _generations() -> dict[str, Any]:
    """Returns the marks at the beginnings of generations."""
    expression = (
        'changes(elasticzero_job_generation{namespace=~"$namespace",job_id="$job_id"}[1m]) > 0'
    )
    return {
        "name": "New generation",
        "datasource": DATA_SOURCE,
        "enable": True,
        "expr": expression,
        "titleFormat": "new generation",
        "iconColor": "orange",
        "step": "15s",
    }


def _placed_rows() -> Iterator[list[dict[str, Any]]]:
    """Returns the panels of each row with their places on the grid."""
    top, number = 0, 1
    for row in ROWS:
        placed: list[dict[str, Any]] = [
            {
                "id": number,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
            }
        ]
        top, number = top + 1, number + 1
        for line in _lines(row):
            left, height = 0, max(_height(panel) for panel in line)
            for panel in line:
                place = {"x": left, "y": top, "w": panel.width, "h": height}
                placed.append({"id": number, "gridPos": place} | _panel(panel))
                left, number = left + panel.width, number + 1
            top += height
        yield placed


def _lines(row: Row) -> Iterator[list[Panel]]:
    """Returns the panels of a row, line by line."""
    line: list[Panel] = []
    for panel in row.panels:
        if sum(other.width for other in line) + panel.width > COLUMNS:
            yield line
            line = []
        line.append(panel)
    if line:
        yield line


def _height(panel: Panel) -> int:
    return STAT_HEIGHT if panel.kind == "stat" else HEIGHT


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind == "timeseries":
        custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
        if panel.stacked:
            custom |= {"fillOpacity": 60, "stacking": {"mode": "normal", "group": "A"}}
        defaults["custom"] = custom
        options: dict[str, Any] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        calculation = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        options = {"reduceOptions": calculation, "colorMode": "none", "graphMode": "none"}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATA_SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": _colours(panel)},
        "options": options,
        "targets": [_target(index, query) for index, query in enumerate(panel.queries)],
    }


def _colours(panel: Panel) -> list[dict[str, Any]]:
    return [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
        }
        for name, colour in panel.colours.items()
    ]


def _target(index: int, query: Query) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": DATA_SOURCE,
        "expr": query.expression,
        "legendFormat": query.legend or "__auto",
        "range": True,
    }


FILES: dict[str, Callable[[], str]] = {
    "prometheusrule.yaml": prometheus_rule,
    "dashboard.json": dashboard,
}


def stale() -> list[str]:
    """Returns the names of files that differ from what they are made from."""
    paths = {name: FOLDER / name for name in FILES}
    return [
        name
        for name, text in FILES.items()
        if not paths[name].exists() or paths[name].read_text() != text()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated files of monitoring.")
    parser.add_argument("--check", action="store_true", help="report stale files, write none")
    check, names = parser.parse_args().check, stale()
    if check and names:
        print(f"These files are stale; run make reference: {', '.join(names)}", file=sys.stderr)
        return 1
    for name in names:
        (FOLDER / name).write_text(FILES[name]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
