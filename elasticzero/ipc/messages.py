"""The messages between an agent and its workers, one dataclass each. Pure.

`channel` carries them over the socket that a worker inherits. The agent sends the first, the
worker's `Assignment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from elasticzero.ipc.assignment import Assignment

FLAG_LEAVE, FLAG_GROW, FLAG_STOP, FLAG_FINISH = 1, 2, 4, 8
"""Bits of the control word: a node leaves, the world grows, the job is stopped by an operator; the
script ends training by `session.stop`."""

Blame = Literal["user", "peer", "checkpoint", "storage", "environment", "killed"]
"""Of a failure. user: the script or its input; peer: another rank went away; checkpoint: a damaged
checkpoint; storage: the last checkpoint could not be written; environment: anything else outside;
killed: a signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Agent to worker: put these flags into the control word from now on."""

    flags: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Agent to worker: the generation is over; shut the group's sockets and stop where you are."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Locate:
    """Agent to worker, when no step came for long: where are you?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """Agent to worker, in answer to `Stopping`: write your state as a snapshot, or do not."""

    wanted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """Worker to agent: the script called `elasticzero.run`; it will obey requests."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Worker to agent: the state of `step` is in place and training goes on."""

    step: int
    tier: Literal["fresh", "ram", "storage"]
    connect_s: float
    """Setting up the process group."""
    build_s: float
    """From there to `session.restore()`: the user's model and optimizer."""
    restore_s: float
    bytes_read: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """Worker to agent: one global batch is applied."""

    step: int
    at_s: float
    """When, by the machine's monotonic clock: the agent hears of it later."""
    step_s: float
    data_wait_s: float
    samples: int
    """In the global batch."""
    total: int = 0
    """Steps of the whole run; 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Worker to agent: the scalars of `session.log`."""

    step: int
    scalars: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Worker to agent: in a section that makes no steps, or (None) out of it."""

    doing: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopExited:
    """Worker to agent: out of the loop over batches; no step is due until the next begins."""

    awaits: bool = False
    """It left the loop before its end, and waits for the other ranks to do so: not for as long as
    what a script does after its loop may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Worker to agent, in answer to `Locate`; said by a thread of its own."""

    place: str
    """File, line and function of the script that the main thread is in."""
    waits: bool
    """It is inside a collective, a backward that ends in one, or uses a GPU, whose collectives are
    waited for anywhere: it may wait for its peers."""
    left: bool = False
    """It left its loop before the end, and waits for the other ranks to do so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Worker to agent: this rank's shard of a step's state stands in shared memory, unsealed."""

    step: int
    generation: int
    rank: int
    world_size: int
    """Of the snapshot: 1 with rank 0 for a complete one."""
    seconds: float = 0.0
    """How long training waited for it."""
    bytes: int = 0
    replicate: bool = False
    """A buddy's replica belongs to it."""
    checkpoint: bool = False
    """It is to become a checkpoint."""
    direct: bool = False
    """Memory was short: the shard was written to storage instead, and there is no snapshot."""
    manifest: str = ""
    """Where `direct`: the shard's own manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonSave:
    """Worker to agent: the checkpoint of this step could not be written on another node."""

    step: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInterval:
    """Worker to agent, of rank 0: snapshots are taken every so many steps from now on."""

    every: int
    cost_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShort:
    """Worker to agent, of local rank 0: shared memory is too small for this node's snapshots."""

    needed_bytes: int
    """By all workers of the node, and by the replicas that it keeps."""
    free_bytes: int
    """Of that, what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeld:
    """Agent to worker: this node holds its part of a snapshot, or (`error`) cannot."""

    step: int
    generation: int
    error: str | None = None
    not_finite: bool = False
    """Because the state holds NaN or infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Agent to worker: the save of this step is over: the checkpoint stands, or (`error`) not."""

    step: int
    generation: int
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Worker to agent: out of the loop; awaiting `SaveState`."""

    step: int
    clean: bool
    """False: the state is torn and cannot be saved."""
    complete: bool
    """True: this worker alone holds the whole state (DDP, or a world of one)."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Worker to agent, last of a generation: its state is handed over, nothing of the generation is
    left in this process, and it can take part in another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Worker to agent: the training function returned after `step` steps."""

    step: int
    reason: str = ""
    """Why the script ended training early, by `session.stop`; the same on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Worker to agent: an exception left the training function."""

    step: int
    blame: Blame
    message: str
    """One line, without traceback."""
    traceback: str
    final: bool = False
    """The same input would fail in the same way: do not try again."""
    bad_step: int | None = None
    """The checkpoint that was found damaged."""
    odd: bool = False
    """This rank has another state than a majority: its node is set aside."""
    verified: int | None = None
    """State of later steps may differ between ranks; None: nothing was found to differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptEnded:
    """Worker to agent, last: the script and its exit functions have ended; the process is to."""

    exit_code: int


Message = (
    Assignment
    | Request
    | Abort
    | Locate
    | SaveState
    | Attached
    | Restored
    | Stepped
    | Logged
    | Busy
    | LoopExited
    | Located
    | Captured
    | AbandonSave
    | SnapshotInterval
    | MemoryShort
    | SnapshotHeld
    | Saved
    | Stopping
    | Waiting
    | Finished
    | Failed
    | ScriptEnded
)
