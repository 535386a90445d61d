"""Defines the message about the error of a worker. Pure.

It stands apart from the other messages because documents in the store hold failures too, and the
commands that read those run for milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from elasticzero.ipc.assignment import LeftOutBatch
from elasticzero.serialization import OMIT_DEFAULT

Blame = Literal[
    "user",
    "checkpoint",
    "storage",
    "environment",
    "memory",
    "rollback",
    "hung",
    "killed",
    "other",
    "peer",
]
"""Cause of a failure, those that explain others first.

user: the script or its input; checkpoint: a damaged checkpoint; storage: the last checkpoint could
not be written; environment: anything else outside; memory: it did not suffice for a micro-batch
that can be halved; rollback: all ranks go back to a held state, and leave a global batch out; hung:
its agent saw no step in time; killed: a signal; other: a word of a later release; peer: another
rank is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Worker to agent: an exception left the training function."""

    step: int
    """Last step that was finished before the error."""
    blame: Blame
    message: str
    """The error in one line, without traceback."""
    traceback: str
    final: bool = False
    """True if the same input would fail in the same way, so that a retry is useless."""
    bad_step: int | None = None
    """Step of the checkpoint that was found damaged."""
    odd: bool = False
    """True if this rank's state differs from that of a majority, so that its node is
    quarantined."""
    verified: int | None = None
    """Newest step at which the ranks were found equal, if they differ now; state of later steps may
    differ. None: no difference was found."""
    micro_batch: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """Blame `memory`: samples of the micro-batches that are tried next."""
    left_out: LeftOutBatch | None = field(default=None, metadata=OMIT_DEFAULT)
    """Blame `rollback`: the global batch that is left out from now on."""
