"""Keeps the logs of a node's workers below a size.

A worker holds its log open, and so does everything that it has started. So a log that is too long
is copied to `LOG.1`, the parts before it become `LOG.2` and so on, and the file itself is cut off
in place. What a worker writes between the last byte of the copy and the cut is lost: some
microseconds' worth. Where there is no room for a copy, the oldest part makes room, or the log is
cut off without one.

It stands apart from `log_tail.py`, which only reads the logs.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elasticzero.text import size_text

COPY_SUFFIX = ".copy"
"""End of the name of a part that is not whole yet."""
COPY_BYTES = 1 << 20
"""Bytes that are copied at a time."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLimit:
    """Says how long a log may become, and how many of its older parts stay."""

    max_bytes: int = 1 << 30
    """Size in bytes from which a log is cut off; 0: there is no limit."""
    keep: int = 1
    """Number of older parts that stay."""


def rotate(logs: Iterable[Path], limit: LogLimit) -> list[Path]:
    """Cuts off each log that is too long; returns the paths of those."""
    cut = []
    for path in logs:
        with suppress(OSError):
            if limit.max_bytes and path.stat().st_size >= limit.max_bytes:
                _rotate(path, limit)
                cut.append(path)
    return cut


def part(path: Path, number: int) -> Path:
    """Returns the path of an older part of a log; 1 is the newest."""
    return path.with_name(f"{path.name}.{number}")


def _rotate(path: Path, limit: LogLimit) -> None:
    """Cuts off one log, after its bytes were copied where that is possible."""
    if limit.keep == 0:
        os.truncate(path, 0)
        return
    try:
        _move(path, limit.keep)
    except OSError as error:
        _copy_of(path).unlink(missing_ok=True)
        oldest = next((p for n in range(limit.keep, 0, -1) if (p := part(path, n)).exists()), None)
        if oldest is not None:
            oldest.unlink()
            _rotate(path, limit)
            return
        size = path.stat().st_size
        os.truncate(path, 0)
        log.warning(
            "%s was cut off, and %s of output are gone: there is no room for a copy (%s)",
            *(path, size_text(size), error.strerror or error),
        )


def _copy_of(path: Path) -> Path:
    return path.with_name(path.name + COPY_SUFFIX)


def _move(path: Path, keep: int) -> None:
    """Copies a log, makes the copy its newest part, and cuts the log off.

    An agent that dies in between leaves bytes twice, and loses none.
    """
    with path.open("r+b") as source:
        with _copy_of(path).open("wb") as target:
            shutil.copyfileobj(source, target, COPY_BYTES)
        for number in range(keep - 1, 0, -1):
            with suppress(FileNotFoundError):
                part(path, number).replace(part(path, number + 1))
        newest = _copy_of(path).replace(part(path, 1))
        with newest.open("ab") as target:  # what has come meanwhile
            shutil.copyfileobj(source, target, COPY_BYTES)
        source.truncate(0)
