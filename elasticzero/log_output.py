"""Writes this package's log records on standard error, each as its message alone, and keeps full
disks from scripts that print.

Every module logs by `logging.getLogger(__name__)`. In a process of ours (a worker that an agent has
started, a command) what `attach_to_stderr` attaches shows the records. In a process of somebody
else's the records belong to whatever that process has configured; where it has configured nothing,
`attach_to_stderr_by_default` shows them, so that `python train.py` says what it does.

`keep_write_errors` makes another kind of standard streams for workers, whose output goes into files
of their agent. An error of such a file is not one of the script.
"""

from __future__ import annotations

import io
import logging
import os
import stat
import sys
import time
from contextlib import suppress
from typing import Any

from elasticzero.text import printable

PACKAGE_LOGGER = "elasticzero"
DELETED = " (deleted)"
"""Linux puts this after the path of an open file that has been deleted."""
REPORTED = "elasticzero: this error was reported to the agent, which prints it:"
REPORTED_END = "elasticzero: end of the error"
"""Lines around an error in a worker's log that are not repeated on the terminal, nor is what is
between them: the agent prints an error once, whichever ranks and generations it ends."""
SEEK_FILE_S = 1.0
"""Seconds between two looks at whether the file of a stream has been deleted."""


class MessageHandler(logging.Handler):
    """Writes each record's message to the present `sys.stderr`, and its traceback if it has one.

    It may hold the words of others, so what a terminal would obey is escaped.
    """

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr  # a process may have none
        with suppress(Exception):  # a note that cannot be written must not end what it tells of
            encoding = getattr(stream, "encoding", None) or "utf-8"
            stream.write(printable(self.format(record), encoding) + "\n")
            stream.flush()


def attach_to_stderr() -> None:
    """Has the records of this package written from INFO on; another call changes nothing.

    A level that somebody has set on the package's logger stays. The records no longer reach the
    root logger, whose handlers would write each of them a second time.
    """
    logger = logging.getLogger(PACKAGE_LOGGER)
    if any(isinstance(handler, MessageHandler) for handler in logger.handlers):
        return
    logger.addHandler(MessageHandler())
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def attach_to_stderr_by_default() -> None:
    """Does as `attach_to_stderr` unless this process has configured logging by itself."""
    if not logging.getLogger(PACKAGE_LOGGER).hasHandlers():
        attach_to_stderr()


def reported(text: str) -> str:
    """Returns an error that was reported to the agent as a worker's log has it."""
    return f"{REPORTED}\n{text.rstrip()}\n{REPORTED_END}\n"


class LogFile(io.RawIOBase):
    """Writes to the file of a standard stream, counts what cannot be written, and raises nothing.

    A line in the file says how much is missing, once it can be written again. A file that was
    deleted is made again, once its directory is there.
    """

    def __init__(self, fd: int, name: str) -> None:
        """Takes a descriptor, which it never closes.

        Args:
            fd: The descriptor.
            name: Name of the stream, as `<stdout>`.
        """
        self.name, self.mode = name, "wb"
        self.missing_bytes = 0
        """Number of bytes that could not be written so far."""
        self.why = ""
        """Why the last of them could not be written."""
        self._fd = fd
        self._untold_bytes = 0
        self._sought_s = time.monotonic()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any, /) -> int:
        now_s = time.monotonic()
        if now_s - self._sought_s >= SEEK_FILE_S:
            self._sought_s = now_s
            with suppress(OSError):
                _make_again(self._fd)
        try:
            if self._untold_bytes:
                self._tell()
            return os.write(self._fd, data)
        except OSError as error:
            self.missing_bytes += len(data)
            self._untold_bytes += len(data)
            self.why = error.strerror or type(error).__name__
            return len(data)

    def _tell(self) -> None:
        text = f"elasticzero: {self._untold_bytes} bytes of output are missing here: {self.why}\n"
        os.write(self._fd, text.encode())
        self._untold_bytes = 0


def _make_again(fd: int) -> None:
    """Makes the file of a descriptor again where it has been deleted and its directory exists."""
    status = os.fstat(fd)
    if status.st_nlink or not stat.S_ISREG(status.st_mode):
        return
    path = os.readlink(f"/proc/self/fd/{fd}").removesuffix(DELETED)
    if path.startswith("/memfd:"):
        return
    mode = stat.S_IMODE(status.st_mode)
    new = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode)
    os.dup2(new, fd)
    os.close(new)


def keep_write_errors() -> None:
    """Puts streams that raise no write errors in the place of this process's standard ones.

    What a script has put there itself stays.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            with suppress(OSError, ValueError):
                kept = _kept(stream, name)
                setattr(sys, name, kept)
                setattr(sys, f"__{name}__", kept)


def _kept(stream: io.TextIOWrapper, name: str) -> io.TextIOWrapper:
    raw = getattr(stream.buffer, "raw", stream.buffer)
    if isinstance(raw, LogFile):
        return stream
    stream.flush()
    file = LogFile(stream.fileno(), f"<{name}>")
    return io.TextIOWrapper(
        file if stream.write_through else io.BufferedWriter(file),
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def missing_output() -> tuple[int, str]:
    """Returns the number of bytes that this process's standard streams could not write, and why."""
    streams = (sys.__stdout__, sys.__stderr__)
    buffers = [stream.buffer for stream in streams if isinstance(stream, io.TextIOWrapper)]
    files = [getattr(buffer, "raw", buffer) for buffer in buffers]
    kept = [file for file in files if isinstance(file, LogFile) and file.missing_bytes]
    return sum(file.missing_bytes for file in kept), kept[-1].why if kept else ""
