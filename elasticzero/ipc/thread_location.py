"""Finds lines of the script: the one that the main thread executes, and the one that an error comes
from."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
from types import FrameType

from elasticzero.errors import UserError, leads_to_script

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INTEGRATIONS = os.path.join(PACKAGE, "integrations", "")
_SITE_PACKAGES = ("site-packages", "dist-packages")
_LIBRARIES = tuple(
    os.path.join(os.path.abspath(path), "")
    for path in {
        *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")),
        *(path for path in sys.path if os.path.basename(path) in _SITE_PACKAGES),
    }
)
"""Folders whose code is not the script's; a virtual environment may use packages of another."""
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)
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
    return _place(at, at.f_lineno)


def place_of_error(error: BaseException) -> str:
    """Returns file, line and function of the script's innermost line in an error's traceback.

    Where a framework trains, that is the line that has started it. The text is empty if no line of
    the script leads to the error, as for an option.
    """
    first = trace = error.__traceback__
    place, in_framework = "", False
    while trace is not None:
        frame = trace.tb_frame
        if _is_of_script(frame):
            place = _place(frame, trace.tb_lineno)
        in_framework |= frame.f_code.co_filename.startswith(_INTEGRATIONS)
        trace = trace.tb_next
    caller = first.tb_frame if first is not None and in_framework and not place else None
    while caller is not None and not _is_of_script(caller):
        caller = caller.f_back
    return place if caller is None else _place(caller, caller.f_lineno)


def mistake_place(error: BaseException) -> str:
    """Returns the place of a mistake of the script in brackets, with a space before, to be added to
    the error's sentence; the text is empty for other errors."""
    place = place_of_error(error) if isinstance(error, UserError) else ""
    return f" ({place})" if place else ""


def place_in_traceback(text: str) -> str:
    """Returns file, line and function of the script's innermost line in a traceback as Python
    prints it; empty: there is none."""
    places = [m for m in _FRAME.finditer(text) if not _is_library(m["file"])]
    return _named(places[-1]["file"], int(places[-1]["line"]), places[-1]["name"]) if places else ""


def _is_of_script(frame: FrameType) -> bool:
    return not _is_library(frame.f_code.co_filename) and not leads_to_script(frame.f_globals)


def _place(frame: FrameType, line: int) -> str:
    return _named(frame.f_code.co_filename, line, frame.f_code.co_name)


def _named(file: str, line: int, function: str) -> str:
    within = "" if function == "<module>" else f" in {function}"
    return f"{os.path.basename(file)}:{line}{within}"


def _is_library(file: str) -> bool:
    return file.startswith((PACKAGE, *_LIBRARIES, "<"))
