"""Draws curves, bars and axes as SVG that fits any width. Pure.

The box of a chart's `<svg>` is the area of its data; labels lie outside of it, in its margins.
Places are shares of that area, so that text keeps its size in a window of any width. What must
stretch with the window lies in an inner picture of 1000 by 1000 units.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elasticzero.ops.page.markup import element, escaped, tooltip

Point = tuple[float, float]
"""Place on an axis, and the value there."""
Span = tuple[float, float, str]
"""Start and end in seconds, and what is between them."""
UNITS = 1000.0
"""Width and height of the area of the data."""
MOST_LEFT = 17
"""Maximum number of characters of a label at the left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Maps values of two axes to units of the area; what is outside lies at its edge."""

    first: float = 0.0
    last: float
    low: float = 0.0
    high: float = 1.0

    def x(self, at: float) -> float:
        """Returns the place from the left."""
        return UNITS * _share(at, self.first, self.last, 0.0)

    def y(self, value: float) -> float:
        """Returns the place from the top."""
        return UNITS * (1.0 - _share(value, self.low, self.high, 0.5))

    def places(self, points: Iterable[Point]) -> str:
        """Returns the places of points, as an attribute of a polyline or polygon."""
        return " ".join(f"{self.x(at):.1f},{self.y(value):.1f}" for at, value in points)


def _share(value: float, low: float, high: float, flat: float) -> float:
    """Returns the share of a range that lies below a value, at least 0 and at most 1.

    Args:
        value: a value on the range's axis.
        low: beginning of the range.
        high: end of the range.
        flat: the result where the range is empty.
    """
    return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else flat


def percent(units: float) -> str:
    """Returns a place in units of the area as a percentage of it."""
    return f"{f'{units / 10:.2f}'.rstrip('0').rstrip('.')}%"


def picture(
    *content: str, label: str, left: int, height: float | None = None, **attributes: object
) -> str:
    """Returns a chart of markup, of which the later lies above the earlier.

    Further keywords are attributes of the element around the chart.

    Args:
        label: what the chart shows, for those who do not see it.
        left: number of characters for which there is room at the left.
        height: pixels of the area; None: the style says it.
    """
    drawn = element(
        "svg",
        *content,
        height=height,
        role="img",
        aria_label=label,
        class_=f"plot left-{min(left, MOST_LEFT)}",
    )
    look = attributes.pop("class_", None)
    return element("div", drawn, class_=f"chart {look}" if look else "chart", **attributes)


def stretched(*content: str) -> str:
    """Returns the inner picture of a chart, which stretches with the window."""
    box = f"0 0 {UNITS:g} {UNITS:g}"
    return element(
        "svg", *content, viewBox=box, preserveAspectRatio="none", width="100%", height="100%"
    )


def x_axis(
    plot: Plot, ticks: Sequence[tuple[float, str]], *, lines: bool = False, unix: bool = False
) -> list[str]:
    """Returns the lower edge and its labels.

    Args:
        plot: the axes of the chart.
        ticks: place and label of each.
        lines: True: a line goes up from each tick.
        unix: True: places are Unix times, of which the browser makes its own labels.
    """
    drawn = []
    for index, (at, text) in enumerate(ticks):
        x = percent(plot.x(at))
        if lines:
            drawn.append(element("line", x1=x, x2=x, y1=0, y2="100%", class_="grid"))
        drawn.append(
            element(
                "text",
                escaped(text),
                x=x,
                y="100%",
                dy=18,
                text_anchor="middle",
                class_=(None, "odd", "second", "odd")[index % 4],
                data_unix=at if unix else None,
            )
        )
    return [*drawn, element("line", x1=0, x2="100%", y1="100%", y2="100%", class_="axis")]


def y_axis(plot: Plot, ticks: Iterable[tuple[float, str]], unit: str = "") -> list[str]:
    """Returns lines across the area with their labels.

    Args:
        plot: the axes of the chart.
        ticks: value and label of each line.
        unit: text above the area; empty: none.
    """
    drawn = [element("text", escaped(unit), x=0, y=-6, class_="unit")] if unit else []
    for value, text in ticks:
        y = percent(plot.y(value))
        drawn.append(element("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        drawn.append(element("text", escaped(text), x=-8, y=y, dy=4, text_anchor="end"))
    return drawn


def curve(plot: Plot, points: Iterable[Point], **attributes: object) -> str:
    """Returns a line through points, which `stretched` takes in."""
    return element("polyline", points=plot.places(points), class_="curve", **attributes)


def area(plot: Plot, edge: Sequence[Point], other: Sequence[Point], look: str) -> str:
    """Returns the area between two lines, which `stretched` takes in.

    Args:
        plot: the axes of the chart.
        edge: points of one line, from left to right.
        other: points of the other line, from left to right.
        look: class of the area.
    """
    return element("polygon", points=plot.places([*edge, *reversed(other)]), class_=look)


def block(left: float, right: float, top: float, bottom: float, *, least: float = 0.5) -> str:
    """Returns the path of a rectangle. All arguments are in units of the area.

    Args:
        left: left edge.
        right: right edge.
        top: upper edge.
        bottom: lower edge.
        least: minimum width, so that a short time can be seen.
    """
    width, height = max(right - left, least), bottom - top
    return f"M{left:.1f} {top:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"


def stacked_bar(
    parts: Iterable[tuple[str, float, str]], whole: float, look: str, label: str
) -> str:
    """Returns a bar of coloured parts as wide as its place.

    Args:
        parts: kind, length and tooltip of each.
        whole: length of the whole bar.
        look: class of the bar.
        label: what the bar shows, for those who do not see it.
    """
    rects, at = [], 0.0
    scale = UNITS / whole if whole > 0 else 0.0
    for kind, length, text in parts:
        width = length * scale
        if width > 0:
            place = {"x": at, "width": max(width, 0.6), "height": 10}
            rects.append(element("rect", tooltip(text), **place, class_=f"c-{kind}"))
        at += width
    return element(
        "svg",
        *rects,
        viewBox=f"0 0 {UNITS:g} 10",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
        class_=f"bar {look}",
    )
