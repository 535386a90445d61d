"""Draws the charts of the status page. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from elasticzero.ops.dashboard.body_tables import rows_of, whole
from elasticzero.ops.page.charts import (
    UNITS,
    Plot,
    area,
    block,
    curve,
    percent,
    picture,
    stacked_bar,
    stretched,
    x_axis,
    y_axis,
)
from elasticzero.ops.page.markup import element, escaped, tooltip
from elasticzero.ops.page.style import colour_name
from elasticzero.ops.page.ticks import moment_ticks, value_ticks
from elasticzero.text import many_text, number_text, share_text, span_text

LEAST_SHARE = 0.0005
"""Least share of the time that has an entry in the legend."""
LETTER_PX = 9.0
WIDTHS_PX = ((900.0, "odd"), (540.0, "second"), (290.0, None))
"""Least width of the chart of generations in a window of each size, and what a narrower window
does not show."""
CAPTION = "ranks, and the number of the generation"
CURSOR = element("g", class_="cursor")
"""Place in which the page's script marks what the pointer is at."""


def loss_chart(document: Mapping[str, Any]) -> str:
    """Returns the loss over steps: the mean, and the range of what was joined into one point."""
    rows = rows_of(document["history"].get("loss"))
    if len(rows) < 2:
        return _empty("loss", "The script has logged no loss yet")
    low, high = min(row[1] for row in rows), max(row[1] for row in rows)
    margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    first, last = rows[0][0], rows[-1][0]
    plot = Plot(first=first, last=last, low=low - margin, high=high + margin)
    texts = [
        f"step {whole(round(at))}: {number_text(mean)}"
        + (f" ({number_text(least)} to {number_text(most)})" if least != most else "")
        for at, mean, least, most in rows
    ]
    values = [(v, number_text(v, 3)) for v in value_ticks(plot.low, plot.high, 5)]
    steps = [(at, f"{at:,.0f}") for at in value_ticks(first, last, 7) if at % 1 == 0]
    band = area(plot, [(r[0], r[3]) for r in rows], [(r[0], r[2]) for r in rows], "band")
    line = curve(plot, [(r[0], r[1]) for r in rows], data_read=_json(texts))
    return picture(
        *y_axis(plot, values),
        *x_axis(plot, steps),
        stretched(band, line),
        CURSOR,
        label="Loss over steps",
        left=max(len(text) for _, text in values),
        id="loss",
        data_reading="lossread",
    )


def goodput_chart(document: Mapping[str, Any]) -> str:
    """Returns the goodput over time."""
    rows = rows_of(document["history"].get("goodput"))
    if len(rows) < 2:
        return _empty("goodput", "Not known yet")
    least = min(row[1] for row in rows)
    low = 0.0 if least < 0.5 else 0.5 if least < 0.9 else 0.9
    plot = Plot(first=rows[0][0], last=rows[-1][0], low=low)
    times = _json([row[0] for row in rows])
    texts = _json([share_text(row[1]) for row in rows])
    line = curve(plot, [(r[0], r[1]) for r in rows], data_read=texts, data_at=times)
    return picture(
        *y_axis(plot, [(v, f"{v:.0%}") for v in value_ticks(low, 1.0, 2)]),
        *_moments(plot, 4),
        stretched(line),
        CURSOR,
        label="Goodput over time",
        left=4,
        height=76.0,
        id="goodput",
        data_reading="goodread",
    )


def _moments(plot: Plot, most: int) -> list[str]:
    """Returns the axis of a chart over Unix time, with what the page's script needs to label it."""
    step_s, ticks = moment_ticks(plot.first, plot.last, most)
    scale = {"data_from": plot.first, "data_to": plot.last, "data_step": step_s}
    return [element("g", *x_axis(plot, ticks, unix=True), class_="moments", **scale)]


def generation_chart(document: Mapping[str, Any]) -> str:
    """Returns a block for each generation, as high as its ranks, and one for each pause between."""
    records = document["history"].get("generations") or []
    if not records:
        return _empty("timeline", "No generation yet")
    now_s, last = document["at"], records[-1]
    if document["done"] is not None:
        now_s = last["ended_at"] or now_s
    most = max(1, *(record["ranks"] for record in records))
    plot = Plot(first=records[0]["at"], last=max(now_s, records[0]["at"] + 1), high=most)
    blocks, gaps, numbers = [], [], []
    for index, record in enumerate(records):
        ended = record["ended_at"] if record["ended_at"] is not None else now_s
        trained = record["trained_at"]
        if trained is None:
            trained = record["at"] if document["plain"] else ended
        left, middle, right = (plot.x(at) for at in (record["at"], trained, ended))
        top, text = plot.y(record["ranks"]), tooltip(_generation_text(record))
        starts = element("path", d=block(left, middle, top, UNITS), class_="c-startup")
        trains = element("path", d=block(middle, right, top, UNITS), class_="c-productive")
        blocks.append(element("g", text, starts, trains))
        numbers += _block_number(str(record["generation"]), middle, right)
        if index + 1 < len(records):
            gaps.append(_gap(plot, ended, records[index + 1]))
    halves = dict.fromkeys((most, round(most / 2)))
    return picture(
        *y_axis(plot, [(value, str(value)) for value in halves], CAPTION),
        *_moments(plot, 11),
        stretched(*blocks, *gaps),
        *numbers,
        label="Ranks that train, over time",
        left=len(str(most)),
        height=78.0,
        id="timeline",
        class_="dense",
    )


def _generation_text(record: Mapping[str, Any]) -> str:
    return (
        f"Generation {record['generation']}: {many_text(record['ranks'], 'rank')} on "
        f"{many_text(record['nodes'], 'node')}, from step {record['resume_step']}\n"
        f"{record['reason']}"
    )


def _gap(plot: Plot, ended: float, following: Mapping[str, Any]) -> str:
    """Returns the block of the time between a generation and the one that follows.

    Args:
        plot: the axes of the chart.
        ended: Unix time at which the generation ended.
        following: record of the generation that follows, as the history has it.
    """
    path = block(plot.x(ended), plot.x(following["at"]), 0.0, UNITS, least=2.0)
    lasted = span_text(max(0.0, following["at"] - ended))
    text = tooltip(f"Nothing trained for {lasted}\n{following['reason']}")
    return element("path", text, d=path, class_="c-fault")


def _block_number(text: str, left: float, right: float) -> list[str]:
    """Returns the number of a generation within its block; empty where there is no room for it.

    A class of the text hides it in windows that are too narrow.

    Args:
        text: the number.
        left: left edge of the block, in units of the chart's area.
        right: right edge of the block, in the same units.
    """
    share = (right - left) / UNITS
    needed_px = LETTER_PX * len(text) + 8
    looks = [hidden for width_px, hidden in WIDTHS_PX if share * width_px > needed_px]
    if not looks:
        return []
    place = {"x": percent((left + right) / 2), "y": "100%", "dy": -8}
    look = f"count {looks[-1] or ''}".rstrip()
    return [element("text", escaped(text), **place, text_anchor="middle", class_=look)]


def time_bar(seconds: Mapping[str, float], whole_s: float) -> str:
    """Returns the bar of where the time went, the longest class first."""
    parts = [
        (colour_name(kind), s, f"{_name(kind)}: {span_text(s)}") for kind, s in _longest(seconds)
    ]
    return stacked_bar(parts, whole_s, "time", "The job's time by class")


def time_legend(seconds: Mapping[str, float], whole_s: float) -> str:
    """Returns the classes of time with their seconds and shares."""
    items = (
        element(
            "li",
            element("i", class_=f"swatch c-{colour_name(kind)}"),
            element("span", escaped(_name(kind))),
            element("span", span_text(s), class_="n"),
            element("b", escaped(share_text(s / whole_s)), class_="n"),
        )
        for kind, s in _longest(seconds)
        if s / whole_s >= LEAST_SHARE
    )
    return element("ul", *items, id="legend")


def _longest(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def _name(kind: str) -> str:
    return kind.replace("_", " ")


def _empty(name: str, text: str) -> str:
    return element("div", text, class_="chart empty", id=name)


def _json(values: Sequence[object]) -> str:
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"))
