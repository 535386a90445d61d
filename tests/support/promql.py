"""What the tests of monitoring read off queries of Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from elasticzero.launcher.observability.job_metrics import JOB_METRICS
from elasticzero.launcher.observability.metrics import Metrics
from tools.dashboard import ROWS

TARGET_LABELS = {"namespace", "instance", "job", "metrics_path"}
"""Labels that Prometheus adds, on Kubernetes by the PodMonitor."""
_SELECTOR = re.compile(r"\b(elasticzero_\w+)(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\b(?:by|on|ignoring|group_left|without) ?\(([^)]*)\)")


def series() -> dict[str, set[str]]:
    """The labels of every series that agents serve, by its name."""
    labels_of: dict[str, set[str]] = {}
    for metric in (*Metrics().descriptions, *JOB_METRICS):
        labels_of |= {name: set(labels) for name, labels in metric.series.items()}
    return labels_of


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """The series that a query names, and the labels by which it selects them."""
    for name, matchers in _SELECTOR.findall(expression):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))


def groupings(expression: str) -> set[str]:
    """The labels by which a query groups or joins."""
    lists = ",".join(_GROUPING.findall(expression))
    return {label.strip() for label in lists.split(",") if label.strip()}


def mistakes(expression: str, labels_of: Mapping[str, set[str]]) -> list[str]:
    """What a query names that no agent serves."""
    texts = []
    available = set(TARGET_LABELS)
    for name, labels in selectors(expression):
        if name not in labels_of:
            texts.append(f"no metric {name}")
            continue
        available |= labels_of[name]
        texts += [f"no label {x} of {name}" for x in labels - labels_of[name] - TARGET_LABELS]
    return texts + [f"no label {label}" for label in groupings(expression) - available]


def rules(root: Path) -> list[dict[str, Any]]:
    """The alerts, as `rules.yaml` has them."""
    text = (root / "k8s" / "components" / "monitoring" / "rules.yaml").read_text()
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def panel_queries() -> Iterator[tuple[str, str, str]]:
    """Title, query and legend of everything on the dashboard."""
    for row in ROWS:
        for panel in row.panels:
            for query in panel.queries:
                yield panel.title, query.expression, query.legend
