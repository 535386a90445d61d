"""The file in which torch's `record` leaves the error that ended a script.

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
"""A longer file is not one of `record`'s."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """An error as `record` writes it."""

    message: str
    """One line."""
    traceback: str


def error_file(log_dir: Path, local_rank: int) -> Path:
    """The file of the worker with this local rank."""
    return log_dir / f"{local_rank}.error.json"


def read(path: Path) -> Recorded | None:
    """Reads the file; None: there is none, or it is not of this form."""
    with suppress(OSError, ValueError, RecursionError):
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        return parse(data) if len(data) <= MAX_BYTES else None
    return None


def parse(data: bytes) -> Recorded | None:
    """`{"message": {"message": TEXT, "extraInfo": {"py_callstack": TEXT}}}`, or
    `{"message": TEXT}`; None: neither. Raises `ValueError` where it is no JSON."""
    value = json.loads(data)
    said = value.get("message") if isinstance(value, dict) else None
    if isinstance(said, str):
        return Recorded(_one_line(said), "")
    if not isinstance(said, dict) or not isinstance(said.get("message"), str):
        return None
    extra = said.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    return Recorded(_one_line(said["message"]), stack if isinstance(stack, str) else "")


def _one_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else "an error without a message"


def write(path: str, message: str, traceback: str, exit_code: int) -> None:
    """Leave the job's error in the form of `record`; a file that cannot be written is passed
    over, for the error was printed too."""
    error = {
        "message": message,
        "errorCode": exit_code,
        "extraInfo": {"py_callstack": traceback, "timestamp": str(int(time.time()))},
    }
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": error}, file)


def write_own(message: str, traceback: str, exit_code: int) -> None:
    """`write` to the file that this process's environment names, if it names one."""
    if path := os.environ.get(VARIABLE):
        write(path, message, traceback, exit_code)
