"""Reads what a request asks for, and says with which answer one is refused."""

from __future__ import annotations

import re
from http import HTTPStatus

_SNAPSHOT = re.compile(r"/snapshots/(\d{1,18})/(\d{1,18})/([A-Za-z0-9_][A-Za-z0-9._-]{0,199})\Z")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})\Z")


class RequestRefused(Exception):
    """Reports that a request gets an error as its response."""

    def __init__(self, status: HTTPStatus, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def snapshot_file(path: str) -> tuple[int, int, str]:
    """Returns the generation, the step and the name of the snapshot's file at a path."""
    match = _SNAPSHOT.match(path)
    if match is None:
        raise RequestRefused(
            HTTPStatus.NOT_FOUND, "a snapshot's file is /snapshots/GENERATION/STEP/NAME"
        )
    return int(match[1]), int(match[2]), match[3]


def byte_range(header: str, size: int) -> tuple[int, int]:
    """Parses a header `Range: bytes=first-last`, `first-` or `-last_n`; returns [start, stop)."""
    match = _RANGE.match(header.strip())
    if match is None or (not match[1] and not match[2]):
        raise RequestRefused(HTTPStatus.BAD_REQUEST, "one range is served, as in bytes=0-99")
    if match[1]:
        start = int(match[1])
        stop = min(int(match[2]) + 1, size) if match[2] else size
        backwards = bool(match[2]) and int(match[2]) < start
    else:
        start, stop, backwards = max(0, size - int(match[2])), size, False
    if backwards or start >= size or start >= stop:
        raise RequestRefused(
            HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
            f"the file has {size} bytes",
            Content_Range=f"bytes */{size}",
        )
    return start, stop
