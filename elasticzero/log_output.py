"""Writes this package's log records on standard error, each as its message alone.

Every module logs by `logging.getLogger(__name__)`. In a process of ours (a worker that an agent has
started, a command) what `attach_to_stderr` attaches shows the records. In a process of somebody
else's the records belong to whatever that process has configured; where it has configured nothing,
`attach_to_stderr_by_default` shows them, so that `python train.py` says what it does.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

PACKAGE_LOGGER = "elasticzero"


class MessageHandler(logging.Handler):
    """Writes each record's message to the present `sys.stderr`, and its traceback if it has one."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr  # a process may have none
        with suppress(Exception):  # a note that cannot be written must not end what it tells of
            stream.write(self.format(record) + "\n")
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
