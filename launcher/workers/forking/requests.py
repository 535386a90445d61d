"""Defines what the agent sends to its fork server, and what that answers. Pure.

A message is one JSON object; a worker's descriptors come with the request for it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from elasticzero.security.certificates import Credentials
from elasticzero.serialization import encode

COMMAND = "elasticzero.launcher.workers.forking.server"
MAX_MESSAGE_BYTES = 1 << 20
CLEAN_UP_S = 5.0
"""Seconds within which processes must exit after SIGKILL; one that waits for a disk may take
long."""


def to_json(record: Any) -> str:
    return json.dumps(encode(record))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Says what a worker runs: a script or module, its arguments and its whole environment."""

    target: str
    """Path of a script, or name of a module."""
    is_module: bool
    is_program: bool = False
    """True if `target` is the path of a program that is executed without Python."""
    separate_stdout: bool = False
    """True if stdout has a file of its own, the last of the descriptors."""
    arguments: tuple[str, ...]
    environment: dict[str, str]
    directory: str
    exit_timeout_s: float = 30.0
    """Seconds within which the process must exit after its script and the exit functions; 0: no
    limit."""
    stands_by: bool = False
    """True if the process has no rank yet, and waits for one at `elasticzero.run`."""

    @property
    def import_directory(self) -> str:
        """Returns the directory from which a script or module imports others first."""
        script = os.path.dirname(os.path.abspath(self.target))
        return self.directory if self.is_module else script


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Says what the server makes for the workers to inherit; it answers nothing."""

    tls: Credentials
    """Certificate of the node, whose contexts are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """Says that a process that stood by is a worker from now on; the server answers nothing."""

    promoted: int
    """Process id of the new worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Says to the agent what has happened to the server, or to a worker."""

    ready: int | None = None
    """Process id of the server, once it has done the imports."""
    not_imported: tuple[str, ...] = ()
    """Why modules that the user names are not imported."""
    started: int | None = None
    """Process id of a worker that was forked."""
    fds: tuple[int, ...] = ()
    """Numbers of the worker's descriptors."""
    ended: int | None = None
    """Process id of a worker that has exited."""
    status: int = 0
    """The exit code of the process."""
    refused: str = ""
    """Reason for which no worker was forked."""
