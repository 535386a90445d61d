"""Makes elements of HTML and SVG, with everything escaped that comes from logs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from elasticzero.text import printable


def escaped(value: object) -> str:
    """Returns text as markup; what would not be seen as itself is written out."""
    return escape(printable(str(value)))


def element(name: str, *content: str, **attributes: object) -> str:
    """Returns an element.

    content: markup. attributes: values are escaped; None leaves one out; `class_` is `class`, and
    `_` within a name is `-`.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{given}>{''.join(content)}</{name}>"


def _short(value: object) -> object:
    """Returns a number of at most two decimals, and anything else as it is."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def tooltip(text: str) -> str:
    """Returns what is shown of an SVG element under the mouse, and read aloud."""
    return element("title", escaped(text))


def picture(width: float, height: float, *content: str, label: str) -> str:
    """Returns an SVG picture as wide as the page, which scrolls where the page is narrow."""
    svg = element(
        "svg",
        *content,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
        class_="chart",
    )
    return element("div", svg, class_="scroll")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Returns a table.

    head: texts. rows: markup of each cell. numbers: columns of numbers, which are set to the right.
    """

    def cells(name: str, row: Sequence[str]) -> str:
        return "".join(
            element(name, cell, class_="n" if index in numbers else None)
            for index, cell in enumerate(row)
        )

    top = element("thead", element("tr", cells("th", [escaped(text) for text in head])))
    body = element("tbody", *(element("tr", cells("td", row)) for row in rows))
    return element("div", element("table", top, body), class_="scroll")


def section(name: str, title: str, lead: str, *content: str) -> str:
    """Returns a section of the page. lead: markup of the sentences that say what is to be seen."""
    head = element("h2", escaped(title))
    return element("section", head, element("p", lead, class_="lead"), *content, id=name)


def swatch(kind: str, text: str) -> str:
    """Returns an entry of a legend: the colour of a kind, and what it means."""
    return element("span", element("i", class_=f"swatch c-{kind}"), escaped(text), class_="key")


def legend(kinds: Iterable[tuple[str, str]]) -> str:
    """Returns the legend of some kinds, each with what it means."""
    return element("div", *(swatch(kind, text) for kind, text in kinds), class_="legend")
