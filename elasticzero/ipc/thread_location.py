"""Finds the line of the script that the main thread is at, from another thread of the process."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from types import FrameType

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple(
    os.path.join(os.path.abspath(path), "")
    for path in {sysconfig.get_path("stdlib"), *map(sysconfig.get_path, ("purelib", "platlib"))}
)
_COLLECTIVE = ("/torch/distributed/", "/torch/autograd/")
"""Gloo and NCCL are waited for under these; DDP's reductions at the end of a backward."""


def main_thread() -> tuple[str, bool]:
    """The script's innermost line that the main thread is in, and whether that thread is inside a
    collective or a backward."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "the end of the process", False
    return place_of(frame), waits(frame)


def waits(frame: FrameType) -> bool:
    """Whether the innermost Python code is torch's that communicates, or this package's."""
    file = frame.f_code.co_filename
    return file.startswith(PACKAGE) or any(part in file for part in _COLLECTIVE)


def place_of(frame: FrameType) -> str:
    """File, line and function of the innermost frame that is no library's."""
    found: FrameType | None = frame
    while found is not None and _is_library(found.f_code.co_filename):
        found = found.f_back
    at = found or frame
    name = os.path.basename(at.f_code.co_filename)
    function = at.f_code.co_name
    within = "" if function == "<module>" else f" in {function}"
    return f"{name}:{at.f_lineno}{within}"


def _is_library(file: str) -> bool:
    return file.startswith((PACKAGE, *_LIBRARIES, "<"))
