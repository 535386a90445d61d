"""What a command prints for whoever called it."""

from __future__ import annotations

import os
import sys

READER_GONE = 141
"""The exit code of a command whose output nobody reads any more (`… | head`), as of one that
SIGPIPE ended; the signal itself would also end it at a connection that broke."""


def say(text: str, end: str = "\n") -> None:
    """Print a result; where that cannot be done, end the command, with a line that says why."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        if isinstance(error, BrokenPipeError):
            raise SystemExit(READER_GONE) from None
        print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None
