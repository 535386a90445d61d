"""Holds the colours and the style that both pages of a run share: light, dark, print. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from elasticzero.ops.page.charts import MOST_LEFT

COLOURS: Mapping[str, tuple[str, str]] = {
    "productive": ("#3f9468", "#4fa878"),
    "startup": ("#b4cbe0", "#6a8bab"),
    "connect": ("#82add2", "#5580aa"),
    "build": ("#6db1a9", "#4d9890"),
    "restore": ("#4579ad", "#3c6c9f"),
    "data_wait": ("#d9b33f", "#c7a136"),
    "snapshot": ("#bba3d8", "#9a80c0"),
    "checkpoint": ("#8560b0", "#7d5ba6"),
    "wasted": ("#d2604d", "#d4624f"),
    "detect": ("#e8944c", "#d88842"),
    "regroup": ("#f0c48d", "#b58c52"),
    "idle": ("#c6cbd1", "#6d757e"),
    "parked": ("#98a1ab", "#4c535b"),
    "training": ("#3f9468", "#4fa878"),
    "starting": ("#82add2", "#5580aa"),
    "recovering": ("#e8944c", "#d88842"),
    "waiting": ("#c6cbd1", "#6d757e"),
    "fault": ("#c0392b", "#f0705f"),
    "left": ("#a8740c", "#dba640"),
    "joined": ("#2563b0", "#6aa5e8"),
    "planned": ("#6b737c", "#9aa2ab"),
    "start": ("#6b737c", "#9aa2ab"),
    "other": ("#7f8790", "#7f8790"),
}
"""Colour of each class of time, phase, state and kind of change, on a light and a dark page."""

_LIGHT = {
    "page": "#f7f8f9",
    "card": "#ffffff",
    "ink": "#1b2026",
    "muted": "#59626c",
    "line": "#dde2e7",
    "soft": "#eef1f4",
    "accent": "#2563b0",
    "good": "#2f8558",
    "warn": "#a8740c",
    "bad": "#c0392b",
}
_DARK = {
    "page": "#14171b",
    "card": "#1c2026",
    "ink": "#e6e9ed",
    "muted": "#9aa4af",
    "line": "#343b44",
    "soft": "#252b32",
    "accent": "#6aa5e8",
    "good": "#4fa878",
    "warn": "#dba640",
    "bad": "#f0705f",
}

_SHEET = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans",
    sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 48px; }
h1 { margin: 0; font-size: 23px; line-height: 1.35; font-weight: 650; overflow-wrap: anywhere; }
h2 { margin: 0 0 4px; font-size: 17px; font-weight: 650; }
h3 { margin: 20px 0 4px; font-size: 14px; font-weight: 600; }
.tiles { display: grid; gap: 12px; margin: 0 0 16px; }
.tile, section, aside { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; min-width: 0; }
section, aside { padding: 18px 20px 20px; margin: 0 0 16px; }
.tile { padding: 10px 14px 11px; }
.tile .what { color: var(--muted); font-size: 13px; }
.tile .value { font-size: 21px; font-weight: 650; line-height: 1.3;
  font-variant-numeric: tabular-nums; }
.tile .note { color: var(--muted); font-size: 12.5px; line-height: 1.35; }
.lead { margin: 0 0 14px; color: var(--muted); max-width: 84ch; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
.chart { padding: 20px 14px 24px 0; }
.plot { display: block; overflow: visible; }
.plot svg { overflow: visible; }
.plot text { font-size: 12px; fill: var(--muted); font-variant-numeric: tabular-nums; }
.plot .name { fill: var(--ink); }
.plot .unit { font-weight: 600; }
.plot polyline, .plot polygon { vector-effect: non-scaling-stroke; }
.grid { stroke: var(--line); stroke-width: 1; }
.axis { stroke: var(--muted); stroke-width: 1; }
.curve { fill: none; stroke: var(--accent); stroke-width: 1.8; stroke-linejoin: round; }
.area { fill: var(--accent); fill-opacity: .14; stroke: none; }
.bar { display: block; width: 100%; height: 22px; border-radius: 3px; background: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 3px 18px; margin: 8px 0 14px; font-size: 13px;
  color: var(--muted); }
.key { display: inline-flex; align-items: center; gap: 6px; white-space: nowrap; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2.5px; flex: none; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { color: var(--muted); font-weight: 600; font-size: 12.5px; text-align: left;
  vertical-align: bottom; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); }
td { vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
tr:last-child td { border-bottom: 0; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.muted { color: var(--muted); }
footer { color: var(--muted); font-size: 13px; margin-top: 20px; }
"""


def colour_name(kind: str) -> str:
    """Returns the name of the colour of a class of time, which may be one of another version."""
    return kind if kind in COLOURS else "other"


def style_sheet(sheet: str) -> str:
    """Returns the style of a page. sheet: what it adds to the style of both pages."""
    painted = "".join(
        f".c-{name} {{ fill: var(--{name}); background: var(--{name}); }}\n"
        f".s-{name} {{ stroke: var(--{name}); }}\n"
        f".k-{name} {{ color: var(--{name}); }}\n"
        for name in COLOURS
    )
    margins = "".join(
        f".left-{count} {{ margin-left: {10 + 7 * count}px; "
        f"width: calc(100% - {10 + 7 * count}px); }}\n"
        for count in range(1, MOST_LEFT + 1)
    )
    light = _variables({**_LIGHT, **{name: pair[0] for name, pair in COLOURS.items()}})
    dark = _variables({**_DARK, **{name: pair[1] for name, pair in COLOURS.items()}})
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f"{_SHEET}{margins}{painted}{sheet}"
    )


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())
