"""Charts: where values are drawn, and that text of others is escaped."""

from __future__ import annotations

import re

from elasticzero.ops.page.charts import (
    Plot,
    block,
    percent,
    picture,
    stacked_bar,
    stretched,
    x_axis,
    y_axis,
)
from elasticzero.ops.page.markup import moment, row, table


def test_a_plot_keeps_values_within_its_area() -> None:
    plot = Plot(first=10.0, last=20.0, low=1.0, high=3.0)
    assert [plot.x(at) for at in (0.0, 10.0, 15.0, 99.0)] == [0.0, 0.0, 500.0, 1000.0]
    assert [plot.y(value) for value in (1.0, 2.0, 3.0, 9.0)] == [1000.0, 500.0, 0.0, 0.0]
    assert plot.places([(15.0, 2.0)]) == "500.0,500.0"


def test_a_plot_without_extent_has_places_too() -> None:
    plot = Plot(first=5.0, last=5.0, low=2.0, high=2.0)
    assert (plot.x(5.0), plot.y(2.0)) == (0.0, 500.0)


def test_places_are_shares_of_the_area() -> None:
    assert [percent(units) for units in (0.0, 123.45, 1000.0)] == ["0%", "12.35%", "100%"]
    assert block(10.0, 10.0, 0.0, 5.0) == "M10.0 0.0h0.5v5.0h-0.5z"


def test_parts_of_a_bar_stand_beside_each_other() -> None:
    bar = stacked_bar(
        [("idle", 1.0, "<a>"), ("wasted", 3.0, "b"), ("none", 0.0, "")], 4.0, "x", "l"
    )
    places = re.findall(r'x="([^"]+)" width="([^"]+)"', bar)
    assert places == [("0", "250"), ("250", "750")]
    assert "&lt;a&gt;" in bar and 'class="bar x"' in bar


def test_labels_of_an_axis_thin_out_by_class() -> None:
    """A narrow window leaves out every second label, or three of four."""
    plot = Plot(last=8.0)
    drawn = "".join(x_axis(plot, [(float(i), str(i)) for i in range(5)], unix=True))
    looks = re.findall(r"<text([^>]*)>", drawn)
    assert [re.findall(r'class="(\w+)"', look) for look in looks] == [
        [], ["odd"], ["second"], ["odd"], [],
    ]  # fmt: skip
    assert [re.findall(r'data-unix="(\w+)"', look) for look in looks] == [
        [str(i)] for i in range(5)
    ]


def test_a_chart_has_room_for_its_labels() -> None:
    plot = Plot(last=1.0)
    chart = picture(stretched(), *y_axis(plot, [(0.5, "<half>")], "u"), label="L", left=40, id="c")
    assert 'class="plot left-17"' in chart and 'id="c"' in chart and 'aria-label="L"' in chart
    assert "&lt;half&gt;" in chart


def test_columns_of_a_table_have_their_class() -> None:
    assert row("td", ["a", "b", "c"], (1, 2), (2,)) == (
        '<tr><td>a</td><td class="n">b</td><td class="n optional">c</td></tr>'
    )
    assert "<th>&lt;</th>" in table(["<"], [])


def test_a_moment_has_its_unix_time() -> None:
    assert moment(90.5) == '<time data-unix="90.5">00:01:30</time>'
    assert (
        moment(90.0, day=True) == '<time data-unix="90" data-day="">1970-01-01 00:01:30 UTC</time>'
    )
    assert "an unknown time" in moment(1e30)
