"""Draws curves as a picture in SVG, for pages of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticzero.ops.page.ticks import value_ticks

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 20, 50
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours that people tell apart who do not see all of them (Okabe and Ito, 2008)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Names a curve, and holds its points: (x, y), in the order of x."""

    name: str
    points: Sequence[tuple[float, float]]


def curves_picture(curves: Sequence[Curve], *, across: str, up: str) -> str:
    """Returns a picture with axes, ticks and a legend.

    Args:
        curves: The curves, at most as many as there are colours.
        across: What x is.
        up: What y is.
    """
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    x_range, y_range = (0.0, max(xs)), (min(ys), max(ys))

    def at(x: float, y: float) -> tuple[float, float]:
        along = (x - x_range[0]) / (x_range[1] - x_range[0])
        above = (y - y_range[0]) / (y_range[1] - y_range[0])
        right, low = WIDTH - RIGHT, HEIGHT - BOTTOM
        return LEFT + along * (right - LEFT), low - above * (low - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for value in value_ticks(*y_range, 6):
        _, y = at(0, value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in value_ticks(*x_range, 6):
        x, _ = at(value, y_range[0])
        y = HEIGHT - BOTTOM
        parts.append(f'<path d="M{x:.1f} {y}v4" stroke="#888"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{value:,.10g}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">{across}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 16 {middle})"'
    parts.append(f'<text x="16" y="{middle}" text-anchor="middle" {turned}>{up}</text>')
    for index, (curve, colour) in enumerate(zip(curves, COLOURS, strict=False)):
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (at(*point) for point in curve.points))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = TOP + 16 + 20 * index
        parts.append(f'<path d="M{WIDTH - 280} {y - 4}h24" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - 250}" y="{y}">{curve.name}</text>')
    return "\n".join([*parts, "</svg>", ""])
