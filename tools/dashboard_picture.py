"""Writes the picture of the Grafana dashboard: `python -m tools.dashboard_picture`.

A real job with faults runs on this machine under a real Prometheus, which answers the queries of
all panels. Matplotlib draws the answers on the dashboard's grid: Grafana itself is not needed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, Formatter, FuncFormatter, PercentFormatter

from tools.monitoring import COLUMNS, FOLDER, dashboard
from tools.prometheus import Prometheus, as_grafana_sends, prometheus, write_targets
from tools.source import ROOT

PICTURE = ROOT / "docs" / "pictures" / "dashboard.png"
JOB = "gpt"
FAULTS = ("kill-worker@150", "kill-node@300", "join@380", "drain@650")
STEPS = 900
RATE_INTERVAL = "15s"
WIDTH_INCHES, ROW_INCHES, DPI = 15.0, 0.36, 80
COLOURS = (
    *("#3b7dd8", "#e0752d", "#2e9e6b", "#b8489d", "#c9a227", "#6f58c9"),
    *("#d0463b", "#2aa7b5", "#8a6d3b", "#7d8899"),
)
NO_DATA = "No data"
LEGEND_LETTERS = 220
"""Letters of the legend of a panel that takes the whole width, in two lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Gives the answers of Prometheus about the time of the job."""

    server: Prometheus
    start_s: float
    end_s: float
    generations: tuple[tuple[float, int], ...] = ()
    """Seconds since the job's start at which each generation but the first began; its number."""

    def series(self, target: Mapping[str, Any]) -> list[tuple[str, list[float], list[float]]]:
        """Returns the name, the seconds since the job's start and the values of each series."""
        query = as_grafana_sends(target["expr"], JOB, RATE_INTERVAL)
        drawn = []
        for one in self.server.query_range(query, self.start_s, self.end_s):
            points = [(float(at) - self.start_s, float(value)) for at, value in one["values"]]
            points = [(at, value) for at, value in points if math.isfinite(value)]
            if points:
                name = named(target["legendFormat"], one["metric"])
                drawn.append((name, [at for at, _ in points], [value for _, value in points]))
        return drawn


def named(legend: str, labels: Mapping[str, str]) -> str:
    """Returns the name of a series, as Grafana makes it from the labels."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)


def formatter(unit: str) -> Formatter:
    """Returns what writes a number with a unit of Grafana's."""
    match unit:
        case "percentunit":
            return PercentFormatter(1.0, decimals=None)
        case "s":
            return FuncFormatter(lambda value, _: seconds(value))
        case "Bps":
            return EngFormatter("B/s")
        case _:
            return FuncFormatter(lambda value, _: plain_number(value))


def seconds(value: float) -> str:
    """Returns a duration in the unit that suits it."""
    if value == 0:
        return "0 s"
    return f"{1000 * value:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"


def plain_number(value: float) -> str:
    """Returns a number without a unit."""
    return f"{value:.3g}" if abs(value) < 10_000 else f"{value / 1000:.3g} K"


def shown_number(value: float, unit: str) -> str:
    """Returns the number of a panel with one number."""
    match unit:
        case "percentunit":
            return f"{100 * value:.1f} %"
        case "s":
            return seconds(value)
        case _:
            return f"{value:.4g}"


def draw(answers: Answers, picture: Path) -> list[str]:
    """Draws all panels; returns the titles of those without data."""
    panels = json.loads(dashboard())["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    mpl.rcParams |= {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    mpl.rcParams |= {"axes.prop_cycle": mpl.cycler(color=COLOURS), "axes.edgecolor": "#9aa3ad"}
    figure = pyplot.figure(figsize=(WIDTH_INCHES, rows * ROW_INCHES), facecolor="#f4f5f7")
    empty = []
    for panel in panels:
        place = Place.of(panel["gridPos"], rows)
        if panel["type"] == "row":
            at = 0.09 / WIDTH_INCHES, place.bottom + place.height / 4
            figure.text(*at, panel["title"], fontsize=12, weight="bold")
            continue
        back = figure.add_axes(place.inside(0.05, 0.05, 0.05, 0.05), xticks=[], yticks=[])
        back.spines[:].set_visible(True)
        back.spines[:].set_color("#d9dce1")
        x, y, _, height = place.inside(0.13, 0.0, 0.0, 0.22)
        figure.text(x, y + height, panel["title"], weight="bold")
        if panel["type"] == "stat":
            full = _draw_number(back, panel, answers)
        else:
            chart = figure.add_axes(place.inside(0.65, 0.75, 0.2, 0.4), facecolor="none")
            full = _draw_series(chart, panel, answers)
        if not full:
            empty.append(panel["title"])
            back.text(0.5, 0.5, NO_DATA, ha="center", color="#7d8899", transform=back.transAxes)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=DPI)
    return empty


@dataclass(frozen=True, slots=True)
class Place:
    """Gives the place of a panel as shares of the picture, from its lower left corner."""

    left: float
    bottom: float
    width: float
    height: float
    picture_inches: float
    """Height of the picture."""

    @classmethod
    def of(cls, grid: Mapping[str, int], rows: int) -> Place:
        """Returns the place that a panel has on the dashboard's grid of so many rows."""
        bottom = 1 - (grid["y"] + grid["h"]) / rows
        at = grid["x"] / COLUMNS, bottom, grid["w"] / COLUMNS, grid["h"] / rows
        return cls(*at, rows * ROW_INCHES)

    def inside(
        self, left: float, bottom: float, right: float, top: float
    ) -> tuple[float, float, float, float]:
        """Returns the place within margins in inches, as matplotlib takes it."""
        across, up = WIDTH_INCHES, self.picture_inches
        return (
            self.left + left / across,
            self.bottom + bottom / up,
            self.width - (left + right) / across,
            self.height - (bottom + top) / up,
        )


def _draw_number(axes: Axes, panel: Mapping[str, Any], answers: Answers) -> bool:
    series = answers.series(panel["targets"][0])
    if series:
        text = shown_number(series[0][2][-1], panel["fieldConfig"]["defaults"]["unit"])
        axes.text(0.5, 0.42, text, fontsize=20, ha="center", va="center", transform=axes.transAxes)
    return bool(series)


def _draw_series(axes: Axes, panel: Mapping[str, Any], answers: Answers) -> bool:
    defaults = panel["fieldConfig"]["defaults"]
    series = [one for target in panel["targets"] for one in answers.series(target)]
    if not series:
        axes.set_axis_off()
        return False
    if "stacking" in defaults["custom"]:
        times = sorted({at for _, ats, _ in series for at in ats})
        values_at = [dict(zip(ats, values, strict=True)) for _, ats, values in series]
        layers = [[one.get(at, 0.0) for at in times] for one in values_at]
        names = [name for name, _, _ in series]
        chosen = dict(zip(names, cycle(COLOURS), strict=False)) | _chosen_colours(panel)
        colours = [chosen[name] for name in names]
        axes.stackplot(times, layers, labels=names, colors=colours, alpha=0.85)
    else:
        for name, times, values in series:
            _draw_line(axes, name, times, values)
    lowest = min(min(values) for _, _, values in series)
    axes.set_ylim(bottom=min(0.0, lowest))
    axes.set_xlim(0, answers.end_s - answers.start_s)
    axes.yaxis.set_major_formatter(formatter(defaults["unit"]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} s"))
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.6)
    for at_s, number in answers.generations:
        axes.axvline(at_s, color="#e0752d", linewidth=0.7, linestyle="--")
        top = axes.get_xaxis_transform()
        axes.text(at_s, 1.0, f" {number}", color="#b35a1c", fontsize=6.5, va="top", transform=top)
    axes.set_axisbelow(True)
    _draw_legend(axes, panel["gridPos"]["w"] / COLUMNS)
    return True


def _chosen_colours(panel: Mapping[str, Any]) -> dict[str, str]:
    """Returns the colours that the dashboard gives to series by name."""
    return {
        rule["matcher"]["options"]: rule["properties"][0]["value"]["fixedColor"]
        for rule in panel["fieldConfig"]["overrides"]
    }


def _draw_legend(axes: Axes, share: float) -> None:
    """Names the series under a panel, as far as its share of the width suffices."""
    handles, labels = axes.get_legend_handles_labels()
    if not any(labels):
        return
    longest = max(map(len, labels)) + 4
    columns = max(1, int(LEGEND_LETTERS * share / longest))
    axes.legend(
        handles[: 2 * columns], labels[: 2 * columns], loc="upper left",
        bbox_to_anchor=(0.0, -0.13), ncols=columns, frameon=False, fontsize=7,
        handlelength=1.0, columnspacing=0.9, borderpad=0, borderaxespad=0,
    )  # fmt: skip


def _draw_line(axes: Axes, name: str, times: list[float], values: list[float]) -> None:
    """Draws a line that is broken where a series has no value for more than two seconds."""
    ats, shown = [times[0]], [values[0]]
    for before, at, value in zip(times, times[1:], values[1:], strict=False):
        if at - before > 2:
            ats.append(before)
            shown.append(math.nan)
        ats.append(at)
        shown.append(value)
    axes.plot(ats, shown, linewidth=1.2, label=name)


def agents(logs: Path) -> list[str]:
    """Returns the addresses of all agents that have served metrics, from their event logs."""
    addresses = []
    for file in logs.glob("*/events.jsonl"):
        for line in file.read_text().splitlines():
            if '"serving"' in line and line.endswith("}"):
                addresses.append(f"127.0.0.1:{json.loads(line)['port']}")
    return addresses


def watch_job(folder: Path, server: Prometheus) -> Answers:
    """Runs a job under the server until it ends; its agents become targets as they start."""
    arguments = ["local", "--nodes", "3", "--job", JOB, "--log-dir", str(folder / "logs")]
    arguments += ["--strategy", "zero2", "--checkpoint-dir", str(folder / "checkpoints")]
    arguments += ["--checkpoint-every", "100", "--flops-per-sample", "6e8", "--peak-flops", "1e11"]
    arguments += [word for fault in FAULTS for word in ("--fault", fault)]
    arguments += [str(ROOT / "examples" / "gpt.py"), "--steps", str(STEPS)]
    command = [sys.executable, "-m", "elasticzero.cli", *arguments]
    start_s, targets = time.time(), list[str]()
    with subprocess.Popen(command, cwd=ROOT) as running:
        while running.poll() is None:
            addresses = agents(folder / "logs" / JOB)
            if addresses != targets:
                targets = addresses
                write_targets(folder / "prometheus" / "targets.json", targets)
            time.sleep(0.3)
    if running.returncode:
        raise SystemExit(f"error: the job ended with exit code {running.returncode}")
    present = server.query_range(f'elasticzero_job_step{{job_id="{JOB}"}}', start_s, time.time())
    seen_s = [float(at) for one in present for at, _ in one["values"]]
    start_s, end_s = min(seen_s), max(seen_s)
    first_seen: dict[int, float] = {}
    for one in server.query_range(f'elasticzero_job_generation{{job_id="{JOB}"}}', start_s, end_s):
        for at, number in one["values"]:
            first_seen[int(number)] = min(
                float(at) - start_s, first_seen.get(int(number), math.inf)
            )
    generations = tuple((at, number) for number, at in sorted(first_seen.items()) if number > 1)
    return Answers(server=server, start_s=start_s, end_s=end_s, generations=generations)


def main() -> None:
    places = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    program = shutil.which("prometheus", path=places)
    if program is None:
        raise SystemExit("error: there is no Prometheus: make tools fetches it")
    with tempfile.TemporaryDirectory(prefix="elasticzero-picture-") as name:
        folder = Path(name)
        with prometheus(program, folder / "prometheus", FOLDER / "rules.yaml", []) as server:
            answers = watch_job(folder, server)
            empty = draw(answers, PICTURE)
    print(f"{PICTURE}: {PICTURE.stat().st_size // 1024} KiB")
    print(f"panels without data: {', '.join(empty) or 'none'}")


if __name__ == "__main__":
    main()
