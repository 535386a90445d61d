"""What a command prints for whoever called it."""

from __future__ import annotations

import os
import sys

READER_GONE = 141
"""The exit code of a command whose output nobody reads any more (`… | head`), as of one that
SIGPIPE ended; the signal itself would also end it at a connection that broke."""


def printable(text: str, encoding: str = "utf-8") -> str:
    """The text with everything escaped that would not be seen as itself: control characters but
    line breaks, halves of surrogate pairs, and what the encoding does not have."""
    if not text.replace("\n", "").isprintable():
        text = "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)
    return text if text.isascii() else text.encode(encoding, "backslashreplace").decode(encoding)


def shown(name: str) -> str:
    """A name as it can stand within a line."""
    return name if name.isprintable() else printable(name.replace("\n", "\\n"))


def complain(text: str) -> None:
    """Print an error on stderr; further lines are indented, so that none passes for our own."""
    print(printable(text.replace("\n", "\n  ")), file=sys.stderr)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def say(text: str, end: str = "\n") -> None:
    """Print a result, escaped where need be; where that cannot be done, end the command, with a
    line that says why."""
    try:
        print(printable(text, sys.stdout.encoding or "utf-8"), end=end, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        if isinstance(error, BrokenPipeError):
            raise SystemExit(READER_GONE) from None
        print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None
