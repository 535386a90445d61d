"""Finds the line of the script that the main thread executes, from another thread of the
process."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from types import FrameType

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SITE_PACKAGES = ("site-packages", "dist-packages")
_LIBRARIES = tuple(
    os.path.join(os.path.abspath(path), "")
    for path in {
        *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")),
        *(path for path in sys.path if os.path.basename(path) in _SITE_PACKAGES),
    }
)
"""Folders whose code is not the script's; a virtual environment may use packages of another."""
_COLLECTIVE = ("/torch/distributed/", "/torch/autograd/")
"""Folders of the code that waits for gloo and NCCL, DDP's reductions in a backward included."""


def main_thread() -> tuple[str, bool]:
    """Returns the script's innermost line in the main thread, and whether that thread may wait for
    peers.

    It may wait for peers inside a collective or a backward.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "the end of the process", False
    return place_of(frame), waits(frame)


def waits(frame: FrameType) -> bool:
    """Returns whether the innermost Python code is torch's communication code, or this
    package's."""
    file = frame.f_code.co_filename
    return file.startswith(PACKAGE) or any(part in file for part in _COLLECTIVE)


def place_of(frame: FrameType) -> str:
    """Returns file, line and function of the innermost frame outside of libraries."""
    candidate: FrameType | None = frame
    while candidate is not None and _is_library(candidate.f_code.co_filename):
        candidate = candidate.f_back
    at = candidate or frame
    name = os.path.basename(at.f_code.co_filename)
    function = at.f_code.co_name
    within = "" if function == "<module>" else f" in {function}"
    return f"{name}:{at.f_lineno}{within}"


def _is_library(file: str) -> bool:
    return file.startswith((PACKAGE, *_LIBRARIES, "<"))
