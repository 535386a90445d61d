"""Reads and writes the file in which torch's `record` leaves the error that ended a script.

TORCHELASTIC_ERROR_FILE names it. An agent reads its workers' files, and writes the job's error into
the file that its own environment names: a scheduler looks there for the reason
(`/dev/termination-log`, say).
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "TORCHELASTIC_ERROR_FILE"
MAX_BYTES = 1 << 20
"""Size of the largest file that is read; `record` writes none as large."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Holds an error as `record` writes it."""

    message: str
    """One line."""
    traceback: str


def error_file(log_dir: Path, local_rank: int) -> Path:
    """Returns the path of the error file of the worker with this local rank."""
    return log_dir / f"{local_rank}.error.json"


def read(path: Path) -> Recorded | None:
    """Returns the error in the file; None: there is no file, or it has another form."""
    with suppress(OSError, ValueError, RecursionError):
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        return parse(data) if len(data) <= MAX_BYTES else None
    return None


def parse(data: bytes) -> Recorded | None:
    """Returns the error in the bytes of such a file; None: they have another form.

    The forms are `{"message": {"message": TEXT, "extraInfo": {"py_callstack": TEXT}}}` and
    `{"message": TEXT}`. Raises `ValueError` if the bytes are no JSON.
    """
    value = json.loads(data)
    message = value.get("message") if isinstance(value, dict) else None
    if isinstance(message, str):
        return Recorded(_one_line(message), "")
    if not isinstance(message, dict) or not isinstance(message.get("message"), str):
        return None
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    return Recorded(_one_line(message["message"]), stack if isinstance(stack, str) else "")


def _one_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else "an error without a message"


def write(path: str, message: str, traceback: str, exit_code: int) -> None:
    """Writes the job's error in the form of `record`.

    A file that cannot be written is ignored, because the error was printed too.

    Args:
        path: The file.
        message: The error as one line.
        traceback: The traceback as text.
        exit_code: Exit code of the job.
    """
    error = {
        "message": message,
        "errorCode": exit_code,
        "extraInfo": {"py_callstack": traceback, "timestamp": str(int(time.time()))},
    }
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": error}, file)


def write_own(message: str, traceback: str, exit_code: int) -> None:
    """Writes the job's error to the file that this process's environment names, if any.

    Args:
        message: The error as one line.
        traceback: The traceback as text.
        exit_code: Exit code of the job.
    """
    if path := os.environ.get(VARIABLE):
        write(path, message, traceback, exit_code)
