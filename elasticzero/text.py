"""Formats text for people (numbers, durations, sizes, lists, tables), and prints it safely."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

READER_GONE = 141
"""The exit code of a command whose output nobody reads any more (`… | head`), as of one that
SIGPIPE ended; the signal itself would also end it at a connection that broke."""
NEARNESS = 0.65
"""Least similarity, from 0 to 1, of a word that is suggested."""
_COLOR = re.compile(r"(\x1b\[[0-9;:]*m)")
_COLOR_END = "\x1b[0m"
_SPAN_UNITS = (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))


def printable(text: str, encoding: str = "utf-8") -> str:
    """Returns the text with everything escaped that would not be seen as itself: control characters
    but line breaks, halves of surrogate pairs, and what the encoding does not have."""
    if not text.replace("\n", "").isprintable():
        text = "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)
    return text if text.isascii() else text.encode(encoding, "backslashreplace").decode(encoding)


def shown(name: str) -> str:
    """Returns a name as it can stand within a line."""
    return name if name.isprintable() else printable(name.replace("\n", "\\n"))


def print_foreign(text: str, *, to: TextIO | None = None, start: str = "", end: str = "\n") -> None:
    """Prints text that may hold the words of others, such as the error of a script on another node.

    All text of others that reaches a terminal comes through here, or through `printable` or
    `colored`: a terminal obeys what it is sent.

    Args:
        text: The text, which is escaped.
        to: Where it is printed; None: on standard error.
        start: Text before it, which is not escaped.
        end: Text after it.
    """
    stream = sys.stderr if to is None else to
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(start + printable(text, encoding), end=end, file=stream, flush=True)


def print_error(text: str) -> None:
    """Prints an error on stderr; further lines are indented, so that none passes for our own."""
    print_foreign(text.replace("\n", "\n  "))


def colored(line: str) -> str:
    """Returns a line of a script's output as `printable`, but with its colors and tabs."""
    if line.isprintable():
        return line
    parts = _COLOR.split(line)
    parts[::2] = ["\t".join(map(printable, part.split("\t"))) for part in parts[::2]]
    return "".join(parts) + (_COLOR_END if len(parts) > 1 else "")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def print_result(text: str, end: str = "\n") -> None:
    """Prints a result, escaped if need be; if that fails, ends the command with a line that says
    why."""
    with _output_errors():
        print(printable(text, sys.stdout.encoding or "utf-8"), end=end, flush=True)


def print_bytes(content: bytes) -> None:
    """Prints the content of a file as it is; if that fails, ends the command as `print_result`."""
    with _output_errors():
        sys.stdout.buffer.write(content)
        sys.stdout.flush()


@contextmanager
def _output_errors() -> Iterator[None]:
    """Ends the command where the output cannot be written."""
    try:
        yield
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        if isinstance(error, BrokenPipeError):
            raise SystemExit(READER_GONE) from None
        print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None


def count_text(count: int, thing: str) -> str:
    """Returns a count with its noun: `1 rank`, `2 ranks`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def many_text(count: int, thing: str) -> str:
    """Returns a count with its noun, with commas between thousands: `1 step`, `2,000 steps`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def shortened(text: str, most: int) -> str:
    """Returns the first `most` characters of a text that has more, and how many are left out."""
    left_out = len(text) - most
    return text if left_out <= 0 else f"{text[:most]}... ({left_out} characters more)"


def with_short_lines(text: str, most: int) -> str:
    """Returns a text in which each line has at most `most` characters, as `shortened`."""
    if len(text) <= most:
        return text
    return "\n".join(shortened(line, most) for line in text.split("\n"))


def list_text(items: Iterable[object], most: int) -> str:
    """Returns the first `most` items with commas between them, and `...` where there are more."""
    texts = list(map(str, items))
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")


def named_text(thing: str, names: Sequence[object], most: int) -> str:
    """Returns the noun with the names that it stands for: `rank 1`, `ranks 1, 3`.

    Args:
        thing: The noun in the singular, which takes an s for any number of names but one.
        names: The names.
        most: The most names that are shown; `...` stands for the rest.
    """
    return f"{thing}{'' if len(names) == 1 else 's'} {list_text(names, most)}"


def nearest_text(word: str, choices: Iterable[str]) -> str:
    """Returns a question about the choice that is nearest to a word, for the end of an error;
    empty: none is near, or several are.

    Args:
        word: The word, which is none of the choices.
        choices: The words that it may have been meant to be.
    """
    import difflib  # only an error needs it

    ratios = {c: difflib.SequenceMatcher(None, word, c).ratio() for c in choices}
    best = max(ratios.values(), default=0.0)
    near = [choice for choice, ratio in ratios.items() if ratio == best]
    return f"; did you mean {near[0]}?" if best >= NEARNESS and len(near) == 1 else ""


def size_text(count: float) -> str:
    """Returns bytes in the unit that suits them."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def bytes_of(text: str) -> int:
    """Returns the bytes of a size such as `500MB` or `2GiB`; raises `ValueError` for other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i)?B?", text.strip(), re.IGNORECASE)
    if not match or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is not a size such as 500MB or 2GiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** (" KMGT".index(match[2].upper() or " ")))


def duration_text(seconds: float) -> str:
    """Returns an age or an estimate in one unit: `0.3 s`, `45 s`, `12 min`, `5 h`, `3 days`.

    `span_text` is for durations that were measured.
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    for unit, size, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < size * most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def span_text(seconds: float) -> str:
    """Returns a measured duration in one unit or two: `4.2 ms`, `41.2 s`, `2 min 5 s`."""
    if abs(seconds) < 1e-7:
        return "0 s"
    if seconds < 0:
        return f"-{span_text(-seconds)}"
    if seconds < 0.0995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for unit, size, smaller, part in _SPAN_UNITS:
        if whole >= size:
            count, rest = whole // size, whole % size // part
            return f"{count} {unit} {rest} {smaller}" if rest else f"{count} {unit}"
    return f"{whole} s"


def share_text(share: float) -> str:
    """Returns a share as a percentage: `71.4%`, `<0.1%`."""
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{100 * share:.1f}%"


def number_text(value: float, digits: int = 4) -> str:
    """Returns a number of so many digits, whole numbers with commas between thousands."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def age_text(seconds: float) -> str:
    """Returns how long ago, in the largest whole unit."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{count_text(int(seconds // length), unit)} ago"
    return "just now"


def table_text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns the rows under their heads, in columns of equal width; ends with a line break."""
    cells = [[shown(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join(lines) + "\n"
