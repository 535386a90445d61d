"""Draws charts over the time of a run, and stacked bars, as SVG. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elasticzero.ops.page.markup import element, escaped, picture, tooltip
from elasticzero.ops.page.ticks import time_ticks, value_ticks
from elasticzero.text import many_text, number_text

Point = tuple[float, float]
"""Place on an axis, and the value there."""
Span = tuple[float, float, str]
"""Start and end in seconds, and what is between them."""
WIDTH = 1000.0
LEFT, RIGHT, TOP, BOTTOM = 128.0, 14.0, 14.0, 26.0
"""Margins of a chart; all have the same, so that times stand below each other."""
TIME_TICKS = 8
ROW = 22.0
NAME_SHOWN = 17
"""Number of characters of a node's name beside its row."""
MARK_GAP = 3.0
"""Marks of changes that are closer than this would run into each other."""


@dataclass(frozen=True, slots=True)
class ChangeMark:
    """Marks a change of the world on a chart."""

    at_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Maps times and values to places on a chart."""

    whole_s: float
    height: float
    low: float = 0.0
    high: float = 1.0

    def x(self, at_s: float) -> float:
        """Returns the place of a time in seconds; times outside are at the edges."""
        share = at_s / self.whole_s if self.whole_s > 0 else 0.0
        return LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, max(0.0, share))

    def y(self, value: float) -> float:
        """Returns the place of a value."""
        span = self.high - self.low
        share = (value - self.low) / span if span > 0 else 0.5
        return self.bottom - (self.bottom - TOP) * min(1.0, max(0.0, share))

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM


def stacked_bar(
    parts: Iterable[tuple[str, float, str]], whole: float, look: str, label: str
) -> str:
    """Returns a bar of coloured parts as wide as its place.

    parts: kind, length and tooltip of each. whole: length of the whole bar.
    """
    rects, at = [], 0.0
    scale = 1000.0 / whole if whole > 0 else 0.0
    for kind, length, text in parts:
        width = length * scale
        if width > 0:
            rects.append(
                element(
                    "rect",
                    tooltip(text),
                    x=at,
                    width=max(width, 0.6),
                    height=10,
                    class_=f"c-{kind}",
                )
            )
        at += width
    return element(
        "svg",
        *rects,
        viewBox="0 0 1000 10",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
        class_=f"bar {look}",
    )


def node_timeline(
    states: Mapping[str, Sequence[Span]],
    meanings: Mapping[str, str],
    whole_s: float,
    marks: Sequence[ChangeMark],
    crosses: Sequence[tuple[float, str, str]],
) -> str:
    """Returns a row for each node with its states over time.

    crosses: time, node and tooltip of each fault.
    """
    height = TOP + ROW * len(states) + BOTTOM
    plot = Plot(whole_s=whole_s, height=height)
    rows, places = [], {}
    for index, (node, spans) in enumerate(states.items()):
        top = TOP + index * ROW
        places[node] = top + ROW / 2
        rows.append(_name(node, top + ROW / 2 + 4))
        rows += [
            element(
                "path",
                tooltip(f"{node} {meaning}"),
                d="".join(_block(plot, span, top) for span in spans if span[2] == state),
                class_=f"c-{state}",
            )
            for state, meaning in meanings.items()
            if any(span[2] == state for span in spans)
        ]
    drawn = [
        element(
            "path",
            tooltip(text),
            d=f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10",
            class_="cross",
        )
        for x, y, text in ((plot.x(at_s), places.get(n), text) for at_s, n, text in crosses)
        if y is not None
    ]
    content = [*_time_axis(plot), *rows, *_drawn_marks(plot, marks), *drawn]
    return picture(WIDTH, height, *content, label="What each node did over time")


def _block(plot: Plot, span: Span, top: float) -> str:
    """Returns the path of one span in the row that begins at `top`."""
    left, right = plot.x(span[0]), plot.x(span[1])
    width, height = max(right - left, 0.5), ROW - 6
    return f"M{left:.1f} {top + 3:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"


def _name(node: str, y: float) -> str:
    half = (NAME_SHOWN - 1) // 2
    short = node if len(node) <= NAME_SHOWN else f"{node[:half]}…{node[-half:]}"
    return element(
        "text",
        tooltip(node),
        escaped(short),
        x=LEFT - 8,
        y=y,
        text_anchor="end",
        class_="name",
    )


def size_chart(sizes: Sequence[Point], whole_s: float, marks: Sequence[ChangeMark]) -> str:
    """Returns a chart of the number of ranks over time. sizes: beginning and number of each."""
    high = max((size for _, size in sizes), default=1.0)
    plot = Plot(whole_s=whole_s, height=118.0, high=high * 1.12)
    corners: list[str] = []
    before = 0.0
    for at_s, size in sizes:
        corners += [f"{plot.x(at_s):.1f},{plot.y(before):.1f}"]
        corners += [f"{plot.x(at_s):.1f},{plot.y(size):.1f}"]
        before = size
    corners.append(f"{plot.x(whole_s):.1f},{plot.y(before):.1f}")
    ends = [f"{plot.x(whole_s):.1f},{plot.y(0):.1f}"]
    content = [
        *_value_axis(plot, [t for t in value_ticks(0, high, 3) if t == int(t)], "ranks"),
        *_time_axis(plot),
        element("polygon", points=" ".join([*corners, *ends]), class_="area"),
        element("polyline", points=" ".join(corners), class_="curve"),
        *_drawn_marks(plot, marks),
    ]
    return picture(WIDTH, plot.height, *content, label="Number of ranks over time")


def curve_chart(
    points: Sequence[Point],
    again: Sequence[Point],
    whole_s: float,
    marks: Sequence[ChangeMark],
    names: tuple[str, str],
) -> str:
    """Returns a curve over time. again: points of steps that were done again, drawn as dots.

    names: unit of the values, and what the chart shows.
    """
    unit, label = names
    values = [value for _, value in (*points, *again)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    plot = Plot(whole_s=whole_s, height=220.0, low=low - margin, high=high + margin)
    line = " ".join(f"{plot.x(at_s):.1f},{plot.y(value):.1f}" for at_s, value in points)
    dots = [
        element("circle", cx=plot.x(at_s), cy=plot.y(value), r=1.9, class_="again")
        for at_s, value in again
    ]
    content = [
        *_value_axis(plot, value_ticks(low, high, 5), unit),
        *_time_axis(plot),
        *_drawn_marks(plot, marks),
        *dots,
        element("polyline", points=line, class_="curve"),
    ]
    return picture(WIDTH, plot.height, *content, label=label)


def _time_axis(plot: Plot) -> list[str]:
    found = []
    for at_s, text in time_ticks(plot.whole_s, TIME_TICKS):
        x = plot.x(at_s)
        found.append(element("line", x1=x, x2=x, y1=TOP, y2=plot.bottom + 4, class_="grid"))
        found.append(element("text", escaped(text), x=x, y=plot.bottom + 18, text_anchor="middle"))
    edge = {"x1": LEFT, "x2": WIDTH - RIGHT, "y1": plot.bottom, "y2": plot.bottom}
    return [*found, element("line", **edge, class_="axis")]


def _value_axis(plot: Plot, ticks: Iterable[float], unit: str) -> list[str]:
    found = [
        element("text", escaped(unit), x=0, y=TOP + 4, class_="unit"),
    ]
    for value in ticks:
        y = plot.y(value)
        found.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        text = escaped(number_text(value))
        found.append(element("text", text, x=LEFT - 8, y=y + 4, text_anchor="end"))
    return found


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
    found = []
    for x, kind, texts in grouped:
        more = f" … {many_text(len(texts) - 3, 'change')} more" if len(texts) > 3 else ""
        line = {"x1": x, "x2": x, "y1": TOP - 6, "y2": plot.bottom}
        found.append(
            element("line", tooltip("; ".join(texts[:3]) + more), **line, class_=f"mark s-{kind}")
        )
    return found
