"""Sets up logging for the process of an agent: the level, the format and where a line goes.

It is set up once, by the command, on the logger of this package. The logging of the training script
is untouched. Lines go to standard error; if it cannot be written, a line is lost and nothing else.
An agent writes them in the background: see `output.py`.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from elasticzero.launcher.observability.output import terminal
from elasticzero.log_output import PACKAGE_LOGGER, MessageHandler
from elasticzero.text import printable

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


@dataclass(slots=True)
class LogContext:
    """Holds the fields of every record of an agent's process that has no value of its own."""

    node: str = ""
    generation: int | None = None
    """Generation of the world that the agent has read; None: it has read none yet."""


context = LogContext()
"""Context of this process; the agent changes it as it gets its name and its generation."""


class TextFormatter(logging.Formatter):
    """Formats a record as `[TIME NODE] MESSAGE`, or as its message alone if it is `bare`."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if getattr(record, "bare", False):
            return text
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        return f"[{clock} {getattr(record, 'node', context.node)}] {text}"


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object; a traceback is part of its message."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "node": getattr(record, "node", context.node),
            "generation": context.generation,
            "rank": getattr(record, "rank", None),
            "message": super().format(record),
        }
        return json.dumps(fields)


class TerminalHandler(MessageHandler):
    """Writes each record on the terminal of this process, without a wait where that is an
    agent's."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # a note that cannot be formatted must not end what it tells of
            terminal.log_line(printable(self.format(record)) + "\n")


def set_up(node: str = "", level: str = "info", format: str = "text") -> None:
    """Has the records of this package written on standard error; a second call replaces the first.

    Args:
        node: Name of the node in each record that has none.
        level: The lowest level that is written, one of LEVELS.
        format: One of FORMATS.
    """
    context.node, context.generation = node, None
    logger = logging.getLogger(PACKAGE_LOGGER)
    for handler in [h for h in logger.handlers if isinstance(h, MessageHandler)]:
        logger.removeHandler(handler)
    handler = TerminalHandler()
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
