"""Runs a Prometheus that scrapes the agents of a job, and asks it queries."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

START_S = 30.0
"""Seconds within which the server must answer."""


class Prometheus:
    """Asks a running server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.loads(answer.read())["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        series: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return series

    def query_range(self, expression: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
        """Returns the value of a query at each second; times are Unix times."""
        span = {"start": f"{start_s:.3f}", "end": f"{end_s:.3f}", "step": "1"}
        series: list[dict[str, Any]] = self.get("query_range", query=expression, **span)["result"]
        return series

    def values(self, expression: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Returns the result of a query by these labels."""
        return {
            tuple(one["metric"].get(label, "") for label in labels): float(one["value"][1])
            for one in self.query(expression)
        }

    def value(self, expression: str) -> float:
        (value,) = self.values(expression).values()
        return value


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def write_targets(file: Path, addresses: Sequence[str]) -> None:
    """Names the agents that the server scrapes from now on; the file is replaced at once."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps([{"targets": list(addresses)}]))
    new.replace(file)


@contextmanager
def prometheus(
    program: str, folder: Path, rules_file: Path, addresses: Sequence[str], authority: str = ""
) -> Iterator[Prometheus]:
    """Runs a server that scrapes both paths of these agents each second.

    folder: a new directory of the server; `write_targets(folder / "targets.json", …)` names other
    agents. authority: certificate by which it knows them, as PEM; empty: they have no TLS.
    """
    folder.mkdir()
    (folder / "ca.pem").write_text(authority)
    write_targets(folder / "targets.json", addresses)
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(_configuration(folder, rules_file, encrypted=bool(authority))))
    port = _free_port()
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    server = Prometheus(port)
    try:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                server.get("status/buildinfo")
                break
            except (OSError, urllib.error.URLError):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError((folder / "log").read_text()) from None
                time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def _configuration(folder: Path, rules_file: Path, *, encrypted: bool) -> Mapping[str, Any]:
    """Returns the configuration that docs/monitoring.md describes."""
    tls = {"scheme": "https", "tls_config": {"ca_file": str(folder / "ca.pem")}}
    targets = {"files": [str(folder / "targets.json")], "refresh_interval": "1s"}
    jobs = [
        {
            "job_name": "elasticzero" + path.replace("/", "-"),
            "metrics_path": path,
            "file_sd_configs": [targets],
            **(tls if encrypted else {}),
        }
        for path in ("/metrics", "/metrics/job")
    ]
    intervals = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    return {"global": intervals, "rule_files": [str(rules_file)], "scrape_configs": jobs}


def as_grafana_sends(expression: str, job: str, rate_interval: str = "30s") -> str:
    """Returns a query of the dashboard with the values of Grafana's variables."""
    chosen = {"namespace": ".*", "job_id": job, "__rate_interval": rate_interval}
    for variable, value in chosen.items():
        expression = expression.replace(f"${variable}", value)
    return expression
