"""Makes elements of HTML and SVG, with everything escaped that comes from logs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape

from elasticzero.text import printable

DATE = "%Y-%m-%d %H:%M:%S UTC"


def escaped(value: object) -> str:
    """Returns text as markup; what would not be seen as itself is written out."""
    return escape(printable(str(value)))


def element(name: str, *content: str, **attributes: object) -> str:
    """Returns an element.

    `content` is markup. The values of `attributes` are escaped, and None leaves one out. `class_`
    is `class`, and `_` within a name is `-`.
    """
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{attribute_text}>{''.join(content)}</{name}>"


def _short(value: object) -> object:
    """Returns a number of at most two decimals, and anything else as it is."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def tooltip(text: str) -> str:
    """Returns what is shown of an SVG element under the mouse, and read aloud."""
    return element("title", escaped(text))


def moment(unix_s: float, *, day: bool = False) -> str:
    """Returns a Unix time, which a page with a script shows in the browser's time zone."""
    text = utc_text(unix_s, DATE if day else "%H:%M:%S")
    return element("time", escaped(text), data_unix=unix_s, data_day="" if day else None)


def utc_text(unix_s: float, pattern: str = DATE) -> str:
    """Returns a Unix time as text."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime(pattern)
    except (OverflowError, OSError, ValueError):
        return "an unknown time"


def row(
    name: str,
    cells: Sequence[str],
    numbers: Sequence[int] = (),
    optional: Sequence[int] = (),
    **attributes: object,
) -> str:
    """Returns a row of a table. Further keywords are its attributes.

    Args:
        name: element of each cell: `th` or `td`.
        cells: markup of each cell.
        numbers: columns of numbers, which are set to the right.
        optional: columns that are left out in a narrow window.
    """
    looks = {(True, False): "n", (False, True): "optional", (True, True): "n optional"}
    drawn = (
        element(name, cell, class_=looks.get((index in numbers, index in optional)))
        for index, cell in enumerate(cells)
    )
    return element("tr", *drawn, **attributes)


def table_of(head: str, rows: Iterable[str], name: str | None = None) -> str:
    """Returns a table, which scrolls in a window that is too narrow.

    Args:
        head: markup of the row of heads.
        rows: markup of each row.
        name: id of the table's body; None: it has none.
    """
    body = element("tbody", *rows, id=name)
    return element("div", element("table", element("thead", head), body), class_="scroll")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Returns a table.

    Args:
        head: text of each head.
        rows: markup of each cell.
        numbers: columns of numbers, which are set to the right.
    """
    top = row("th", [escaped(text) for text in head], numbers)
    return table_of(top, (row("td", cells, numbers) for cells in rows))


def tile(what: str, value: str, note: str, *, above: str = "") -> str:
    """Returns a key figure.

    Args:
        what: name of the figure.
        value: markup of the figure.
        note: text below it.
        above: markup between figure and note.
    """
    return element(
        "div",
        element("div", escaped(what), class_="what"),
        element("div", value, class_="value"),
        above,
        element("div", escaped(note), class_="note") if note else "",
        class_="tile",
    )


def section(name: str, title: str, lead: str, *content: str) -> str:
    """Returns a section of the page. Further arguments are its markup below the lead.

    Args:
        name: id of the section.
        title: text of its heading.
        lead: markup of the sentences that say what is to be seen.
    """
    head = element("h2", escaped(title))
    return element("section", head, element("p", lead, class_="lead"), *content, id=name)


def swatch(kind: str, text: str) -> str:
    """Returns an entry of a legend: the colour of a kind, and what it means."""
    return element("span", element("i", class_=f"swatch c-{kind}"), escaped(text), class_="key")


def legend(kinds: Iterable[tuple[str, str]]) -> str:
    """Returns the legend of some kinds, each with what it means."""
    return element("div", *(swatch(kind, text) for kind, text in kinds), class_="legend")
