"""The error tree: every error that this project raises on purpose, by who must act on it."""

from __future__ import annotations

import re
from enum import IntEnum


class ExitCode(IntEnum):
    """What an agent's exit status says to whatever started it (under Kubernetes: the Job
    controller)."""

    DONE = 0
    """`done` is written: the job finished. Never used for anything else."""
    USAGE = 64
    """Bad input: trying again without a change is useless."""
    UNAVAILABLE = 69
    """etcd, or the nodes asked for, could not be reached in time."""
    FAILED = 70
    """The job failed and must not be retried."""
    LEFT = 75
    """This node left (drained, evicted); it may come back."""
    INTERRUPTED = 130
    """Ctrl-C."""


class ElasticZeroError(Exception):
    """The root. A message says what happened, where, and what to do next."""

    exit_code = ExitCode.FAILED


class UserError(ElasticZeroError):
    """The user must change something: an option, a script, a model."""

    exit_code = ExitCode.USAGE


class OperatorError(ElasticZeroError):
    """The environment must be mended: etcd, a disk, a network."""

    exit_code = ExitCode.UNAVAILABLE


class RetryError(ElasticZeroError):
    """Nobody must act: the same thing tried again may work."""

    exit_code = ExitCode.LEFT


class StoreUnavailable(OperatorError):
    """The coordination store did not answer in time."""


class AccessRefused(StoreUnavailable):
    """The coordination store does not let us in: certificate, user, password or permission."""


class CheckpointDamaged(OperatorError):
    """Bytes of a checkpoint are missing or are not what was written."""

    exit_code = ExitCode.FAILED


class CheckpointMismatch(UserError):
    """A whole checkpoint that does not fit what it is to be loaded into."""


class NotFinite(ElasticZeroError):
    """A loss, a gradient, a parameter or optimizer state is NaN or infinite."""


class StorageError(OperatorError):
    """A directory or server that holds checkpoints cannot be used."""

    exit_code = ExitCode.USAGE


class LastSaveFailed(StorageError):
    """The last checkpoint could not be written; the storage is to blame, and no node."""

    exit_code = ExitCode.FAILED


class ReplicaMismatch(OperatorError):
    """Ranks differ in what must be equal on all of them: state that nobody may go on from."""

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, *, verified: int, odd: bool) -> None:
        super().__init__(message)
        self.verified = verified
        """The newest step at which they were equal."""
        self.odd = odd
        """This rank differs from a majority."""


class PeerSetAside(RetryError):
    """Another rank differs from a majority that this rank belongs to."""


def is_final(error: BaseException) -> bool:
    """Whether the same script and input would fail in the same way: trying again is useless."""
    return isinstance(error, (UserError, NotFinite, ImportError, SyntaxError))


def one_line(error: BaseException) -> str:
    """An error in one line: our own in their words, others with their kind."""
    if isinstance(error, ElasticZeroError):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {error}".splitlines()[0]


NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def same_error(one: str, other: str) -> bool:
    """Whether two errors in one line are the same, but for the numbers in them."""
    return NUMBERS.sub("#", one) == NUMBERS.sub("#", other)
