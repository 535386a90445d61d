"""Defines the error tree: every error that this project raises on purpose, by who must act on
it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
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
    DEFECT = 71
    """This agent cannot go on, and the job goes on without its node, which may come back: its loop
    failed again and again, by a defect or by trouble of its machine, or it met a mistake of this
    node, such as another token than the job's, after it was registered."""
    LEFT = 75
    """This node left (drained, evicted); it may come back."""
    SUPERSEDED = 76
    """The job was begun again (`--restart`) while this process of an earlier run was away. It has
    written nothing since; do not start it again with its old options."""
    INTERRUPTED = 130
    """The user pressed Ctrl-C."""


class ElasticZeroError(Exception):
    """All errors of this project are of this class. A message says what happened, where, and what
    to do next."""

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


class RunEnded(ElasticZeroError):
    """A later run of the job has taken the place of this process's run; nothing was written."""

    exit_code = ExitCode.SUPERSEDED

    def __init__(self, run: int, later: int) -> None:
        """Makes the error of a process of an earlier run.

        Args:
            run: Number of the process's run.
            later: Number of the run that has taken its place.
        """
        super().__init__(later_run_text(run, later))
        self.later = later
        """Number of the run that has taken the place of the process's run."""


def later_run_text(run: int, later: int) -> str:
    """Returns the sentence with which a process of an earlier run ends.

    Args:
        run: Number of the process's run.
        later: Number of the run that has taken its place.
    """
    return (
        f"run {later} of the job has taken the place of run {run}, to which this node belongs: it "
        "writes nothing and exits"
    )


class CheckpointDamaged(OperatorError):
    """Bytes of a checkpoint are missing or differ from what was written."""

    exit_code = ExitCode.FAILED


class CheckpointMismatch(UserError):
    """A whole checkpoint does not fit the model, optimizer or objects that it is loaded into."""


class NotFinite(ElasticZeroError):
    """A loss, a gradient, a parameter or optimizer state is NaN or infinite."""

    ADVICE = "lower the learning rate, or clip gradients by session.step(max_grad_norm=…)"
    """Says what helps where training diverges, for the end of a message."""


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
        """Makes the error of one rank.

        Args:
            message: What differs, on which ranks, and what to do.
            verified: The newest step at which the ranks were equal.
            odd: True if this rank differs from a majority.
        """
        super().__init__(message)
        self.verified = verified
        """The newest step at which the ranks were equal."""
        self.odd = odd
        """True if this rank differs from a majority."""


class EntryRefused(RetryError):
    """A rank cannot enter its world inside of the others' loops; it can by a stop of all."""


class PeerSetAside(RetryError):
    """Another rank differs from a majority that includes this rank."""


def is_final(error: BaseException) -> bool:
    """Returns whether the same script and input would fail in the same way, so that a retry is
    useless."""
    if isinstance(error, SystemExit):
        return error.code == _WRONG_ARGUMENTS and _raised_in(error) in _ARGUMENT_PARSERS
    return isinstance(error, (UserError, NotFinite, ImportError, SyntaxError))


_WRONG_ARGUMENTS = 2
"""Exit status of a program that is called with wrong arguments."""
_ARGUMENT_PARSERS = ("argparse", "click", "typer")
"""Packages that end a script so."""


def _raised_in(error: BaseException) -> str:
    """Returns the name of the top package whose code raised an error; empty: it is not known."""
    import traceback  # not needed where nothing fails

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module: str = frames[-1].f_globals.get("__name__", "") if frames else ""
    return module.partition(".")[0]


def one_line(error: BaseException) -> str:
    """Returns an error as one line: this project's errors by their message, others with their
    class."""
    if isinstance(error, ElasticZeroError):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {error}".splitlines()[0]


def directory_problem(error: OSError) -> str:
    """Returns why a directory could not be made or written, without the error's number.

    The system says "File exists" of a file that has the directory's name, which is no reason to the
    user of an option that names a directory.
    """
    if isinstance(error, FileExistsError):
        return f"{error.filename} is a file, and no directory"
    if isinstance(error, NotADirectoryError):
        return "a part of its path is a file"
    return error.strerror or str(error) or type(error).__name__


CALLERS_OF_SCRIPTS = (
    "elasticzero.entry_point",
    "elasticzero.launcher.workers.forking.server",
    "runpy",
)
"""Modules whose frames stand before a script's own in a traceback."""


def script_traceback(error: BaseException) -> str:
    """Returns an error's traceback from the script's first frame on."""
    import traceback  # not needed where nothing fails

    trace = error.__traceback__
    while trace is not None and leads_to_script(trace.tb_frame.f_globals):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def leads_to_script(names: Mapping[str, Any]) -> bool:
    """Returns whether a frame is of a module that only calls the script.

    Args:
        names: The frame's globals.
    """
    spec = names.get("__spec__")  # of a module that runs as `__main__` it has the name
    return (getattr(spec, "name", None) or names.get("__name__")) in CALLERS_OF_SCRIPTS


NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def same_error(one: str, other: str) -> bool:
    """Returns whether two errors in one line are the same, except for the numbers in them."""
    return NUMBERS.sub("#", one) == NUMBERS.sub("#", other)


PEER_ERROR_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "connection aborted")
"""Words in lower case; one of them is in the message of a `RuntimeError` that a lost peer
causes."""


def is_peer_error(error: BaseException) -> bool:
    """Returns whether this exception, or one of its causes, comes from the end of another rank.

    torch has types for these errors, all of them under `torch.distributed.DistError`. Gloo alone
    raises a plain `RuntimeError`, whose message begins with the C++ file that raised it
    ("[…/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), and NCCL does
    so in some wrappers. So for a `RuntimeError` the words of the message decide. No other function
    reads the words of a message.

    Check after an upgrade of torch:
     - `DistError` is still the base class of `DistBackendError`, `DistNetworkError` and
       `DistStoreError`;
     - what `all_reduce`, `recv`, `broadcast` and a backward of DistributedDataParallel raise when a
       peer is killed (tests/integration/test_elastic_training.py kills ranks under gloo, tests/gpu
       under NCCL): a type under `DistError`, or a message with one of PEER_ERROR_WORDS.
    """
    return any(_is_peer_error(cause) for cause in _with_causes(error))


def _is_peer_error(error: BaseException) -> bool:
    """Returns whether this exception itself comes from the end of another rank."""
    if isinstance(error, (RetryError, *_torch_errors())):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in PEER_ERROR_WORDS)


def _torch_errors() -> tuple[type[BaseException], ...]:
    """Returns torch's class of these errors; nothing in a process that has not imported torch."""
    distributed: Any = sys.modules.get("torch.distributed")
    kind = getattr(distributed, "DistError", None)
    return () if kind is None else (kind,)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and its causes, each once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__
