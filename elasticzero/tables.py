"""Sizes, counts and tables as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

from elasticzero.text import shown


def counted(count: int, thing: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def size_text(count: float) -> str:
    """Bytes in the unit that suits them."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def age_text(seconds: float) -> str:
    """How long ago, in the largest whole unit."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{counted(int(seconds // length), unit)} ago"
    return "just now"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The rows under their heads, in columns of equal width; ends with a line break."""
    cells = [[shown(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join(lines) + "\n"
