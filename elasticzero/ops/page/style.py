"""Holds the style sheet of the report: light, dark, and for print. Pure."""

from __future__ import annotations

from collections.abc import Mapping

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
}
_DARK = {
    "page": "#14171b",
    "card": "#1c2026",
    "ink": "#e6e9ed",
    "muted": "#9aa4af",
    "line": "#343b44",
    "soft": "#252b32",
    "accent": "#6aa5e8",
}

_SHEET = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans",
    sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 48px; }
header .eyebrow { margin: 0; color: var(--muted); font-size: 13px; letter-spacing: .02em; }
h1 { margin: 4px 0 6px; font-size: 23px; line-height: 1.35; font-weight: 650;
  overflow-wrap: anywhere; }
h2 { margin: 0 0 4px; font-size: 17px; font-weight: 650; }
h3 { margin: 20px 0 4px; font-size: 14px; font-weight: 600; }
.meta { margin: 0 0 20px; color: var(--muted); overflow-wrap: anywhere; }
.tiles { display: grid; gap: 12px; margin: 0 0 20px;
  grid-template-columns: repeat(auto-fit, minmax(max(140px, 22%), 1fr)); }
.tile, section, aside { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
.tile { padding: 10px 14px 11px; }
.tile .what { color: var(--muted); font-size: 13px; }
.tile .value { font-size: 21px; font-weight: 650; line-height: 1.3;
  font-variant-numeric: tabular-nums; }
.tile .note { color: var(--muted); font-size: 12.5px; line-height: 1.35; }
section, aside { padding: 18px 20px 20px; margin: 0 0 16px; }
aside { border-left: 4px solid var(--left); padding: 12px 18px; }
aside ul { margin: 4px 0 0; padding-left: 20px; }
.lead { margin: 0 0 14px; color: var(--muted); max-width: 84ch; overflow-wrap: anywhere; }
.lead b { color: var(--ink); font-weight: 600; }
.scroll { overflow-x: auto; }
.chart { display: block; width: 100%; min-width: 640px; height: auto; }
.chart text { font-size: 12px; fill: var(--muted); font-variant-numeric: tabular-nums; }
.chart .name { fill: var(--ink); }
.chart .unit { font-weight: 600; }
.grid { stroke: var(--line); stroke-width: 1; }
.axis { stroke: var(--muted); stroke-width: 1; }
.curve { fill: none; stroke: var(--accent); stroke-width: 1.6; stroke-linejoin: round; }
.again { fill: var(--wasted); fill-opacity: .75; }
.area { fill: var(--accent); fill-opacity: .14; stroke: none; }
.mark { stroke-width: 1.2; stroke-dasharray: 4 3; }
.cross { stroke: var(--fault); stroke-width: 2.4; fill: none; stroke-linecap: round; }
.bar { display: block; width: 100%; border-radius: 3px; background: var(--soft); }
.bar.tall { height: 30px; }
.bar.low { height: 13px; width: 230px; margin-top: 4px; }
.legend { display: flex; flex-wrap: wrap; gap: 3px 18px; margin: 8px 0 14px; font-size: 13px;
  color: var(--muted); }
.key { display: inline-flex; align-items: center; gap: 6px; white-space: nowrap; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2.5px; flex: none; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { color: var(--muted); font-weight: 600; font-size: 12.5px; text-align: left;
  vertical-align: bottom; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); }
td { vertical-align: top; }
td .key { white-space: normal; align-items: baseline; }
th:last-child, td:last-child { padding-right: 0; }
tr:last-child td { border-bottom: 0; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
#time tr:last-child td { font-weight: 600; border-top: 2px solid var(--line); }
.tag { display: inline-block; padding: 0 7px; border-radius: 9px; border: 1px solid currentColor;
  font-size: 12px; line-height: 17px; white-space: nowrap; }
#recoveries .bar.low { width: 170px; }
#recoveries th, #recoveries td { padding-right: 10px; }
#recoveries th:last-child, #recoveries td:last-child { padding-right: 0; }
.words { overflow-wrap: anywhere; min-width: 220px; }
.nowrap { white-space: nowrap; }
.muted { color: var(--muted); }
details { margin-top: 2px; }
summary { cursor: pointer; color: var(--accent); font-size: 12.5px; }
pre { margin: 6px 0 2px; padding: 8px 10px; background: var(--soft); border-radius: 6px;
  font: 12px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 340px; overflow-y: auto; }
footer { color: var(--muted); font-size: 13px; margin-top: 20px; }
@media (max-width: 560px) {
  main { padding: 18px 10px 32px; }
  section { padding: 14px 12px; }
  h1, .tile .value { font-size: 18px; }
}
@media print {
  body { font-size: 12px; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  .tile, section, aside { border-color: #ccc; border-radius: 0; }
  section { padding: 10px 0; border-width: 1px 0 0; margin: 0; }
  .scroll { overflow: visible; }
  .chart { min-width: 0; }
  .tile, tr, .chart, .legend { break-inside: avoid; }
  h2, h3, .lead, thead { break-after: avoid; }
  table { font-size: 10.5px; }
  pre { max-height: none; overflow: visible; }
}
"""


def style_sheet() -> str:
    """Returns the style sheet of the page."""
    names = dict.fromkeys(COLOURS)
    painted = "".join(
        f".c-{name} {{ fill: var(--{name}); background: var(--{name}); }}\n"
        f".s-{name} {{ stroke: var(--{name}); }}\n"
        f".tag.k-{name} {{ color: var(--{name}); }}\n"
        for name in names
    )
    light = _variables({**_LIGHT, **{name: pair[0] for name, pair in COLOURS.items()}})
    dark = _variables({**_DARK, **{name: pair[1] for name, pair in COLOURS.items()}})
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f"{_SHEET}{painted}"
    )


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())
