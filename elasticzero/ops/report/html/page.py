"""Writes the page of a run as one file of HTML. Pure.

The page loads nothing and runs nothing, and says so to the browser. All that comes from logs is
escaped by `markup`.
"""

from __future__ import annotations

from elasticzero.ops.page.markup import element, escaped, tile, utc_text
from elasticzero.ops.page.style import style_sheet
from elasticzero.ops.report.html.sections import (
    recovery_section,
    story,
    time_section,
    training_section,
)
from elasticzero.ops.report.html.sentences import fault_kinds, headline, node_range
from elasticzero.ops.report.html.style import SHEET
from elasticzero.ops.report.html.tables import (
    checkpoint_section,
    fault_section,
    incident_section,
    rounds_section,
    step_time_section,
)
from elasticzero.ops.report.model import RunSummary
from elasticzero.ops.report.notes import names_text
from elasticzero.text import many_text, share_text, span_text
from elasticzero.version import __version__

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Content security policy, by which the page may load its own style and nothing else."""


def report_page(summary: RunSummary, written: float) -> str:
    """Returns the page. written: Unix time at which it is made."""
    sections = [time_section(summary)]
    if summary.generations:
        sections = [
            rounds_section(summary),
            story(summary),
            time_section(summary),
            training_section(summary),
            fault_section(summary),
            recovery_section(summary),
            checkpoint_section(summary),
            step_time_section(summary),
        ]
    sections.append(incident_section(summary))
    title = escaped(f"ElasticZero: job {summary.job}, {summary.outcome}")
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<meta name="referrer" content="no-referrer">',
        element("title", title),
        f"<style>{style_sheet(SHEET)}</style>",
    ]
    body = [_header(summary), _tiles(summary), _notes(summary), *sections, _footer(written)]
    text = "\n".join(filter(None, body))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{chr(10).join(head)}\n</head>\n'
        f"<body>\n<main>\n{text}\n</main>\n</body>\n</html>\n"
    )


def _header(summary: RunSummary) -> str:
    nodes = many_text(len(summary.nodes), "node")
    ended = "and was running at" if summary.outcome == "running" else "to"
    reason = f" End: {summary.reason}." if summary.reason and summary.outcome != "failed" else ""
    meta = (
        f"{utc_text(summary.began)} {ended} {utc_text(summary.began + summary.wall_s)}; "
        f"{nodes} had a part: {names_text(summary.nodes)}.{reason}"
    )
    return element(
        "header",
        element("p", "Report of a run, by ElasticZero", class_="eyebrow"),
        element("h1", escaped(headline(summary))),
        element("p", escaped(meta), class_="meta"),
    )


def _tiles(summary: RunSummary) -> str:
    total = summary.total_steps
    survived, faults = summary.survived, summary.faults
    again_s = summary.seconds.get("wasted", 0.0)
    saved = [c.step for c in summary.checkpoints if c.committed]
    goodput = "–" if summary.goodput is None else share_text(summary.goodput)
    steps = "not seen" if summary.plain else f"{summary.final_step:,}"
    tiles = (
        ("Outcome", summary.outcome, f"in {many_text(len(summary.generations), 'generation')}"),
        ("Steps", steps, f"of {total:,}" if total else ""),
        ("Wall time", span_text(summary.wall_s), ""),
        ("Goodput", goodput, "of the time, for steps that count"),
        (
            "Faults survived",
            f"{len(survived):,}"
            if len(survived) == len(faults)
            else f"{len(survived)} of {len(faults)}",
            fault_kinds(survived),
        ),
        ("Steps done again", f"{summary.steps_redone:,}", span_text(again_s) if again_s else ""),
        (
            "Nodes at a time",
            node_range(summary).split(" node")[0] if summary.generations else "0",
            "",
        ),
        ("Last checkpoint", f"step {saved[-1]:,}" if saved else "none", ""),
    )
    return element(
        "div",
        *(tile(what, escaped(value), note) for what, value, note in tiles),
        class_="tiles",
    )


def _notes(summary: RunSummary) -> str:
    if not summary.notes:
        return ""
    items = (element("li", escaped(note)) for note in summary.notes)
    return element("aside", element("b", "About the logs"), element("ul", *items))


def _footer(written: float) -> str:
    text = (
        f"Written on {utc_text(written)} by elasticzero report {__version__}. Times on this page "
        "count from the beginning of the job. More of a bar or mark is shown under the mouse."
    )
    return element("footer", escaped(text))
