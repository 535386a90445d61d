"""Draws what nodes, ranks, loss and steps did over the time of a run. Pure.

All charts have the same margins, so that times stand below each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticzero.ops.page.charts import (
    MOST_LEFT,
    UNITS,
    Plot,
    Point,
    Span,
    area,
    block,
    curve,
    percent,
    picture,
    stretched,
    x_axis,
    y_axis,
)
from elasticzero.ops.page.markup import element, escaped, tooltip
from elasticzero.ops.page.ticks import time_ticks, value_ticks
from elasticzero.text import many_text, number_text

TIME_TICKS = 8
ROW = 22.0
"""Pixels of the height of a node's row."""
MARK_GAP = 3.0
"""Marks of changes that are closer than this would run into each other."""


@dataclass(frozen=True, slots=True)
class ChangeMark:
    """Marks a change of the world on a chart."""

    at_s: float
    kind: str
    text: str


def node_timeline(
    states: Mapping[str, Sequence[Span]],
    meanings: Mapping[str, str],
    whole_s: float,
    marks: Sequence[ChangeMark],
    crosses: Sequence[tuple[float, str, str]],
) -> str:
    """Returns a row for each node with its states over time.

    Args:
        states: spans of each node.
        meanings: what each state means.
        whole_s: seconds of the run.
        marks: changes of the world.
        crosses: time, node and tooltip of each fault.
    """
    plot = Plot(last=whole_s)
    names, blocks, places = [], [], {}
    row = UNITS / max(1, len(states))
    for index, (node, spans) in enumerate(states.items()):
        places[node] = (index + 0.5) * row
        names.append(_name(node, places[node]))
        top, bottom = (index + 3 / ROW) * row, (index + 1 - 3 / ROW) * row
        for state, meaning in meanings.items():
            path = "".join(
                block(plot.x(span[0]), plot.x(span[1]), top, bottom)
                for span in spans
                if span[2] == state
            )
            if path:
                text = tooltip(f"{node} {meaning}")
                blocks.append(element("path", text, d=path, class_=f"c-{state}"))
    struck = [
        _cross(plot.x(at_s), places[node], text) for at_s, node, text in crosses if node in places
    ]
    axis = _time_axis(plot)
    content = [*axis, *names, stretched(*blocks), *_drawn_marks(plot, marks), *struck]
    height = ROW * len(states)
    return _over_time(*content, label="What each node did over time", height=height)


def _over_time(*content: str, label: str, height: float) -> str:
    """Returns a chart, which scrolls where the page is narrow."""
    return element(
        "div",
        picture(*content, label=label, left=MOST_LEFT, height=height, class_="run"),
        class_="scroll",
    )


def _name(node: str, y: float) -> str:
    half = (MOST_LEFT - 1) // 2
    short = node if len(node) <= MOST_LEFT else f"{node[:half]}…{node[-half:]}"
    place = {"x": -8, "y": percent(y), "dy": 4}
    return element("text", tooltip(node), escaped(short), **place, text_anchor="end", class_="name")


def _cross(x: float, y: float, text: str) -> str:
    stroke = element("path", tooltip(text), d="M-5 -5l10 10m0 -10l-10 10")
    return element("svg", stroke, x=percent(x), y=percent(y), class_="cross")


def size_chart(sizes: Sequence[Point], whole_s: float, marks: Sequence[ChangeMark]) -> str:
    """Returns a chart of the number of ranks over time.

    Args:
        sizes: beginning of each generation in seconds, and its number of ranks.
        whole_s: seconds of the run.
        marks: changes of the world.
    """
    high = max((size for _, size in sizes), default=1.0)
    plot = Plot(last=whole_s, high=high * 1.12)
    corners: list[Point] = []
    before = 0.0
    for at_s, size in sizes:
        corners += [(at_s, before), (at_s, size)]
        before = size
    corners.append((whole_s, before))
    ticks = [(value, number_text(value)) for value in value_ticks(0, high, 3) if value % 1 == 0]
    content = [
        *y_axis(plot, ticks, "ranks"),
        *_time_axis(plot),
        stretched(area(plot, corners, [(whole_s, 0.0)], "area"), curve(plot, corners)),
        *_drawn_marks(plot, marks),
    ]
    return _over_time(*content, label="Number of ranks over time", height=78.0)


def curve_chart(
    points: Sequence[Point],
    again: Sequence[Point],
    whole_s: float,
    marks: Sequence[ChangeMark],
    names: tuple[str, str],
) -> str:
    """Returns a curve over time.

    Args:
        points: places of the curve.
        again: points of steps that were done again, drawn as dots.
        whole_s: seconds of the run.
        marks: changes of the world.
        names: unit of the values, and what the chart shows.
    """
    unit, label = names
    values = [value for _, value in (*points, *again)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    plot = Plot(last=whole_s, low=low - margin, high=high + margin)
    dots = [
        element("circle", cx=percent(plot.x(at)), cy=percent(plot.y(value)), r=1.9, class_="again")
        for at, value in again
    ]
    ticks = [(value, number_text(value)) for value in value_ticks(low, high, 5)]
    content = [
        *y_axis(plot, ticks, unit),
        *_time_axis(plot),
        *_drawn_marks(plot, marks),
        *dots,
        stretched(curve(plot, points)),
    ]
    return _over_time(*content, label=label, height=180.0)


def _time_axis(plot: Plot) -> list[str]:
    return x_axis(plot, time_ticks(plot.last, TIME_TICKS), lines=True)


def _drawn_marks(plot: Plot, marks: Sequence[ChangeMark]) -> list[str]:
    """Returns a line for each change; of many in one place, one that stands for all."""
    grouped: list[tuple[float, str, list[str]]] = []
    for mark in sorted(marks, key=lambda mark: mark.at_s):
        x = plot.x(mark.at_s)
        if grouped and x - grouped[-1][0] < MARK_GAP:
            at, kind, texts = grouped[-1]
            grouped[-1] = (at, "fault" if mark.kind == "fault" else kind, [*texts, mark.text])
        else:
            grouped.append((x, mark.kind, [mark.text]))
    drawn = []
    for at, kind, texts in grouped:
        place = percent(at)
        rest = f" … {many_text(len(texts) - 3, 'change')} more" if len(texts) > 3 else ""
        text = tooltip("; ".join(texts[:3]) + rest)
        line = {"x1": place, "x2": place, "y1": -6, "y2": "100%"}
        drawn.append(element("line", text, **line, class_=f"mark s-{kind}"))
    return drawn
