"""Writes the tables of the status page: generations, nodes and events. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elasticzero.launcher.observability.compute_time import STRAGGLER_RATIO
from elasticzero.ops.page.markup import element, escaped, moment, row, table_of
from elasticzero.text import duration_text, many_text, span_text

NODES_SHOWN = 40
"""Maximum number of nodes that are shown before a reader asks for all."""
GENERATIONS_SHOWN = 6
EVENTS_SHOWN = 12
DAY_S = 72_000
"""Seconds of a job's life from which on times have a day."""
TIERS = {"ram": " in memory", "storage": " on storage", "live": " without a stop"}
MOODS = {
    **dict.fromkeys(("training", "finished"), "good"),
    **dict.fromkeys(("gone", "failed", "set aside"), "bad"),
    **dict.fromkeys(("waiting", "?"), ""),
}
"""Colours of the states that are not on the way to another one."""
LEVELS = {"error": "bad", "warning": "warn"}


def mood(state: str) -> str:
    """Returns the colour of a state of a job or a node."""
    return MOODS.get(state, "warn")


def dot(look: str) -> str:
    """Returns a dot in a colour; without one it is grey."""
    return element("i", class_=f"dot {look}".rstrip())


def whole(value: int | None) -> str:
    """Returns a whole number with commas between thousands."""
    return "–" if value is None else f"{value:,}"


def rows_of(rows: Iterable[Sequence[float | None]] | None) -> list[Sequence[float]]:
    """Returns the rows of a curve of which every value is known."""
    return [
        [value for value in values if value is not None]
        for values in rows or ()
        if all(value is not None and math.isfinite(value) for value in values)
    ]


def generation_table(records: Sequence[Mapping[str, Any]], now_s: float) -> str:
    """Returns the last generations, the newest first."""
    heads = ("#", "Began", "Nodes", "Ranks", "From step", "Starts in", "Why")
    numbers, optional = (0, 2, 3, 4, 5), (2, 4, 5)
    days = bool(records) and now_s - records[0]["at"] > DAY_S
    rows = []
    for record in reversed(records[-GENERATIONS_SHOWN:]):
        step, trained = record["resume_step"], record["trained_at"]
        cells = (
            escaped(record["generation"]),
            element("span", moment(record["at"], day=days), class_="muted"),
            whole(record["nodes"]),
            whole(record["ranks"]),
            escaped(f"{step:,}{TIERS.get(record['tier'], '')}" if step else "0"),
            "–" if trained is None else span_text(max(0.0, trained - record["at"])),
            escaped(record["reason"]),
        )
        rows.append(row("td", cells, numbers, optional))
    return table_of(row("th", heads, numbers, optional), rows, "generations")


def island_table(rounds: Mapping[str, Any]) -> str:
    """Returns what the islands of a job have. rounds: what `/job` says of its rounds."""
    heads = ("Island", "Newest round", "Samples in it", "Waiting", "On hand", "Address")
    numbers, optional = (1, 2, 3, 4), (4, 5)
    rows = []
    for island in rounds["islands"]:
        late = island["staleness"] or 0
        samples = whole(island["samples"]) + (f", {many_text(late, 'round')} late" if late else "")
        misses = rounds["round"] and (late or island["samples"] is None)
        cells = (
            escaped(island["island"]),
            whole(island["round"]),
            dot("warn" if misses else "good") + escaped(samples),
            whole(island["waiting"]),
            whole(island["on_hand"]),
            escaped(island["address"]),
        )
        rows.append(row("td", cells, numbers, optional))
    return table_of(row("th", heads, numbers, optional), rows, "islands")


def node_table(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the nodes, and a button that shows the rest of many.

    Of many nodes those that do not train come first; the script of the page shows all of them in
    their own order, `data-place`.
    """
    computes = any(node.get("compute_s") is not None for node in nodes)
    heads = ["Node", "Role", "Ranks", "State", "Step", "Last step", "Step time"]
    heads += ["Own compute"] * computes + ["Up", "Address"]
    up = len(heads) - 2
    numbers, optional = tuple(range(4, up + 1)), (1, 2, 5, up, up + 1)
    placed = list(enumerate(nodes))
    many = len(nodes) > NODES_SHOWN
    if many:
        placed.sort(key=lambda item: mood(item[1]["state"]) == "good")
    rows = []
    for index, (place, node) in enumerate(placed):
        rest = "rest" if index >= NODES_SHOWN else None
        cells = _node_cells(node, computes=computes)
        attributes = {"class_": rest, "data_place": place if many else None}
        rows.append(row("td", cells, numbers, optional, **attributes))
    label = f"Show all {len(nodes):,} nodes"
    button = element("button", label, id="more", type="button", hidden=None if many else "")
    return [table_of(row("th", heads, numbers, optional), rows, "nodes"), button]


def _node_cells(node: Mapping[str, Any], *, computes: bool) -> list[str]:
    silent = "?" if node["silent"] else "–"
    step, age_s, step_s, up_s = (node[key] for key in ("step", "step_age_s", "step_s", "up_s"))
    cells = [
        escaped(node["node"]),
        escaped(node["role"]),
        "–" if node["ranks"] == "-" else escaped(node["ranks"]),
        _state_cell(node),
        silent if step is None else whole(step),
        silent if age_s is None else f"{duration_text(max(0.0, age_s))} ago",
        silent if step_s is None else span_text(step_s),
    ]
    if computes:
        cells.append(_compute_cell(node, silent))
    return [
        *cells,
        silent if up_s is None else duration_text(up_s),
        "–" if node["address"] is None else escaped(node["address"]),
    ]


def _state_cell(node: Mapping[str, Any]) -> str:
    state, aside_s = node["state"], node["set_aside_s"]
    aside = state == "set aside" and aside_s is not None
    text = f"{state}, {duration_text(aside_s)} more" if aside else state
    reason = node["set_aside_for"]
    return dot(mood(state)) + (
        element("span", escaped(text), title=reason) if reason else escaped(text)
    )


def _compute_cell(node: Mapping[str, Any], silent: str) -> str:
    compute_s, ratio = node["compute_s"], node["compute_ratio"]
    text = silent if compute_s is None else span_text(compute_s)
    if ratio is None or ratio <= STRAGGLER_RATIO:
        return text
    why = "All others wait for this node in each step."
    return element("span", dot("warn"), f"{text}, {ratio:.1f}×", title=why)


def event_list(lines: Sequence[Sequence[Any]]) -> str:
    """Returns the last events, the newest first."""
    items = (
        element("li", moment(at), dot(LEVELS.get(level, "")), element("p", escaped(text)))
        for at, level, text in reversed(lines[-EVENTS_SHOWN:])
    )
    return element("ol", *items, id="events")
