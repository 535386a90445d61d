"""Defines the error tree: every error that this project raises on purpose, by who must act on
it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Lists the exit statuses of an agent, which its starter reads (such as a Job controller)."""

    DONE = 0
    """The job finished, and the key `done` is written. Nothing else uses this code."""
    USAGE = 64
    """The input is bad; another try without a change is useless."""
    UNAVAILABLE = 69
    """etcd, or the requested number of nodes, could not be reached in time."""
    FAILED = 70
    """The job failed and must not be retried."""
    LEFT = 75
    """This node left (drained, evicted); it may come back."""
    INTERRUPTED = 130
    """The user pressed Ctrl-C."""


class ElasticZeroError(Exception):
    """Root of the tree. A message says what happened, where, and what to do next."""

    exit_code = ExitCode.FAILED


class UserError(ElasticZeroError):
    """The user must change something: an option, a script, a model."""

    exit_code = ExitCode.USAGE


class OperatorError(ElasticZeroError):
    """The operator must repair the environment: etcd, a disk, a network."""

    exit_code = ExitCode.UNAVAILABLE


class RetryError(ElasticZeroError):
    """No one must act: another try of the same operation may succeed."""

    exit_code = ExitCode.LEFT


class StoreUnavailable(OperatorError):
    """The coordination store did not answer in time."""


class AccessRefused(StoreUnavailable):
    """The coordination store denies access: certificate, user, password or permission."""


class CheckpointDamaged(OperatorError):
    """Bytes of a checkpoint are missing or differ from what was written."""

    exit_code = ExitCode.FAILED


class CheckpointMismatch(UserError):
    """A whole checkpoint does not fit the model, optimizer or objects that it is loaded into."""


class NotFinite(ElasticZeroError):
    """A loss, a gradient, a parameter or optimizer state is NaN or infinite."""


class StorageError(OperatorError):
    """A directory or server that holds checkpoints cannot be used."""

    exit_code = ExitCode.USAGE


class LastSaveFailed(StorageError):
    """The last checkpoint could not be written; the fault is the storage's, and no node's."""

    exit_code = ExitCode.FAILED


class ReplicaMismatch(OperatorError):
    """Ranks differ in state that must be equal on all of them, and that no rank may resume from."""

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, *, verified: int, odd: bool) -> None:
        super().__init__(message)
        self.verified = verified
        """The newest step at which the ranks were equal."""
        self.odd = odd
        """True if this rank differs from a majority."""


class PeerSetAside(RetryError):
    """Another rank differs from a majority that includes this rank."""


def is_final(error: BaseException) -> bool:
    """Returns whether the same script and input would fail in the same way, so that a retry is
    useless."""
    return isinstance(error, (UserError, NotFinite, ImportError, SyntaxError))


def one_line(error: BaseException) -> str:
    """Returns an error as one line: this project's errors by their message, others with their
    class."""
    if isinstance(error, ElasticZeroError):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {error}".splitlines()[0]


CALLERS_OF_SCRIPTS = (
    "elasticzero.entry_point",
    "elasticzero.launcher.workers.fork_server",
    "runpy",
)
"""Modules whose frames stand before a script's own in a traceback."""


def script_traceback(error: BaseException) -> str:
    """Returns an error's traceback from the script's first frame on."""
    import traceback  # not needed where nothing fails

    trace = error.__traceback__
    while trace is not None and _leads_to_script(trace.tb_frame.f_globals):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _leads_to_script(names: Mapping[str, Any]) -> bool:
    """Returns whether a frame is of a module that only calls the script. names: its globals."""
    spec = names.get("__spec__")  # of a module that runs as `__main__` it has the name
    return (getattr(spec, "name", None) or names.get("__name__")) in CALLERS_OF_SCRIPTS


NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def same_error(one: str, other: str) -> bool:
    """Returns whether two errors in one line are the same, except for the numbers in them."""
    return NUMBERS.sub("#", one) == NUMBERS.sub("#", other)
