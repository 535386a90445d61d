"""Defines the messages between an agent and its workers, one dataclass each. Pure.

`channel` carries them over the socket that a worker inherits. The agent sends the first, the
worker's `Assignment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticzero.ipc.assignment import Assignment, Tier
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.rounds import IslandAt, JoinRounds, RoundNews
from elasticzero.options.settings import DataChange
from elasticzero.serialization import OMIT_DEFAULT

FLAG_LEAVE, FLAG_GROW, FLAG_STOP, FLAG_FINISH = 1, 2, 4, 8
"""Bits of the control word: a node leaves, the world grows, an operator stops the job, the script
ends training by `session.stop`."""

FLAG_REASONS = {
    FLAG_LEAVE: "a node leaves",
    FLAG_GROW: "the world grows",
    FLAG_STOP: "the job is stopped",
}
"""Reasons for which a generation ends at a boundary, by flag."""

FAULT_STEPS_VARIABLE = "ELASTICZERO_FAULT_STEPS"
"""Environment variable with the steps at whose boundaries a worker sends `AwaitsFault`, separated
by commas."""

CPU = "the CPU"
"""A worker's device in words, where it has no GPU."""
TOKENS = "tokens"
"""Name in `session.log` whose values are added up; of others the mean counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Agent to worker: put these flags into the control word from now on."""

    flags: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Agent to worker: the generation has ended; shut the group's sockets and stop at once."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Locate:
    """Agent to worker, if no step came for long: report where the main thread is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """Agent to worker, in answer to `Stopping`: write the state as a snapshot, or do not."""

    write: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Agent to worker: connect the next generation beside the training, and go over to it at the
    boundary at which all ranks are prepared."""

    token: str
    """Token of the next generation."""
    assignment: Assignment | None = None
    """Place of this worker in the next generation, whose `resume` has the tier `live`; rank 0's
    socket comes with the message. None: its node leaves at that boundary."""
    joins: bool = field(default=False, metadata=OMIT_DEFAULT)
    """True if ranks that are not of this generation come into the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Agent to worker: forget what `Prepare` with this token has begun.

    It comes too late for a worker that has said in its control word that it is prepared, if all
    others say so in the same step: then `Switched` follows on all that stay.
    """

    token: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareFailed:
    """Worker to agent: it cannot go over to the next generation inside its loop.

    Until it is withdrawn the worker is not prepared, and training goes on.
    """

    token: str
    reason: str
    final: bool = False
    """True if no later generation can be entered from this one inside the loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switched:
    """Worker to agent: it has gone over to the next generation inside its loop. Its later messages
    are of that generation."""

    token: str
    """Token of the generation that it has entered."""
    step: int
    """Boundary at which all ranks did so."""
    seconds: float
    """Time in seconds that training waited for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitsBoundary:
    """Worker to agent: its script has come to `session.restore` in a generation that others enter
    inside of their loops, and it will connect to them. `Switched` follows at their boundary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """Worker to agent: the script called `elasticzero.run`; the worker will obey requests."""

    pid: int
    resident_bytes: int = 0
    """Memory that the process has in RAM; 0: not stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandsBy:
    """Process that stands by to agent: the script has come to `elasticzero.run`. It waits for its
    assignment."""

    private_bytes: int
    """Memory that the process shares with no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outdated:
    """Process that stands by to agent, last: another process would begin otherwise by now."""

    path: str
    """File that is not as it was when the script read it."""
    stamp: str
    """Time of its last change, and its size, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """Agent to process that stands by: say whether you could be a worker now. The answer is
    `StandsBy` or `Outdated`; after the first of these only the agent ends the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CannotStandBy:
    """Process that stands by to agent, last: no process can run this script before it has its
    place in a world."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTaken:
    """Worker to agent, from the first worker of a node: which network NCCL takes between nodes, by
    its own log of its first communicator."""

    network: str
    """InfiniBand, RoCE, EFA, TCPXO, sockets, or NCCL's own name for another one."""
    version: str = ""
    """Version of NCCL; empty: the log does not state it."""
    gpu_direct: bool | None = None
    """True if the network reads and writes the GPUs' memory by itself; None: no connection of the
    worker goes over it."""
    warning: str = ""
    """Says that the machine has a faster network; empty: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Worker to agent: the state of `step` is loaded and training continues."""

    step: int
    tier: Tier
    connect_s: float
    """Time in seconds to set up the process group."""
    build_s: float
    """Time in seconds from there to `session.restore()`, which the script spends on model and
    optimizer."""
    restore_s: float
    bytes_read: int = 0
    device: str = ""
    """Device that the worker computes on, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataChanged:
    """Worker to agent, from rank 0: a loop goes on with another batch size or other data."""

    step: int
    """Number of global batches until then."""
    allowed: tuple[DataChange, ...]
    """The changes for which the user's permission was needed."""
    message: str
    """Says what has changed, and where the loop goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesChanged:
    """Worker to agent, from rank 0: ranks have other parts of each global batch than before, which
    follow their speeds."""

    step: int
    """Number of global batches until then."""
    message: str
    """Says which ranks have how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualLost:
    """Worker to agent, from rank 0: what lost ranks had not sent of gradients yet, by `--wire`, is
    gone with them."""

    step: int
    """Number of global batches until then."""
    ranks: int
    """Number of these ranks."""
    norm: float | None
    """About the norm of it; None: it is not known."""
    message: str
    """Says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """Worker to agent: one global batch is applied."""

    step: int
    at_s: float
    """Time of the step by the machine's monotonic clock; the agent receives the message later."""
    step_s: float
    data_wait_s: float
    samples: int
    """Number of samples in the global batch."""
    total: int = 0
    """Number of steps of the whole run; 0: not known."""
    gradient_norm: float | None = None
    """Norm of the gradient of the newest step that was applied, before clipping; None: none was."""
    compute_s: float | None = None
    """Time of this rank's own forwards and backwards, without waits for data or for collectives;
    None: it is not known."""
    held: int | None = None
    """Newest step of which every node holds its snapshot, or the one that the generation started
    from. None: no snapshots are taken, or a lost node costs none of the steps since."""
    wire_bytes: Mapping[str, int] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    """Bytes that the worker has sent and received since it was made, by what they are and by
    direction, such as `gradients sent`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Worker to agent: the script passed these scalars to `session.log`."""

    step: int
    scalars: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Worker to agent: it enters a section that makes no steps, or (None) leaves it."""

    doing: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitsFault:
    """Worker to agent: it is at the boundary of a step for which `elasticzero local` has a fault,
    and waits there for `FaultStruck`."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultStruck:
    """Agent to worker: the faults of this step and of those before it have come; go on."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopExited:
    """Worker to agent: it has left the loop over batches, and no step is due until the next
    begins."""

    awaits: bool = False
    """True if it left the loop before its end and waits for the other ranks to do so. That wait is
    shorter than the time that a script may take after its loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Worker to agent, in answer to `Locate`; a separate thread sends it."""

    place: str
    """File, line and function of the script that the main thread is in."""
    waits: bool
    """True if it is inside a collective, a backward that ends in one, or uses a GPU, whose
    collectives are waited for anywhere: it may wait for its peers."""
    left: bool = False
    """True if it left its loop before the end and waits for the other ranks to do so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Worker to agent: this rank's shard of a step's state lies in shared memory, unsealed."""

    step: int
    generation: int
    rank: int
    world_size: int
    """World size of the snapshot: 1, with rank 0, for a complete one."""
    seconds: float = 0.0
    """Time in seconds that training waited for it."""
    bytes: int = 0
    replicate: bool = False
    """True if another node replicates the shard."""
    checkpoint: bool = False
    """True if it is to become a checkpoint."""
    direct: bool = False
    """True if memory was short: the shard was written to storage instead, and there is no
    snapshot."""
    manifest: str = ""
    """The shard's own manifest if `direct`; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonSave:
    """Worker to agent: the checkpoint of this step could not be written on another node."""

    step: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TagStep:
    """Worker to agent, from rank 0: have these tags name a step that is saved, or is being saved.

    The tags of a state that is yet to be captured are in its manifest instead.
    """

    step: int
    generation: int
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInterval:
    """Worker to agent, from rank 0: from now on snapshots are taken at this interval, in steps."""

    every: int
    cost_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShort:
    """Worker to agent, from local rank 0: shared memory is too small for this node's snapshots."""

    needed_bytes: int
    """Bytes that all workers of the node and the replicas that it keeps need."""
    free_bytes: int
    """Bytes that are free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeld:
    """Agent to worker: this node holds its part of a snapshot, or (`error`) cannot."""

    step: int
    generation: int
    error: str | None = None
    not_finite: bool = False
    """True if the reason is NaN or infinity in the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Agent to worker: the save of this step has ended: the checkpoint is committed, or (`error`)
    not."""

    step: int
    generation: int
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged:
    """Agent to worker, in answer to `TagStep`: the tags name the step or a newer one, or (`error`)
    not."""

    step: int
    generation: int
    tags: tuple[str, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Worker to agent: it has left the loop and waits for `SaveState`."""

    step: int
    clean: bool
    """False if the state is torn and cannot be saved."""
    complete: bool
    """True if this worker alone holds the whole state (DDP, or a world of one)."""
    reason: str
    switched: str = ""
    """Token of the next generation, if the others have gone over to it at this boundary, without
    this worker; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Worker to agent, last of a generation: the process can take part in another generation.

    Its state is handed over, and nothing of the generation is left in this process.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Worker to agent: the training function returned after `step` steps."""

    step: int
    reason: str = ""
    """Reason that the script gave to `session.stop`, the same on all ranks; empty: it did not call
    it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptEnded:
    """Worker to agent, last: the script and its exit functions have ended, and the process will
    end."""

    exit_code: int
    missing_bytes: int = 0
    """Bytes of output that could not be written into the logs."""
    missing_why: str = ""


Message = (
    Assignment
    | Request
    | Abort
    | Locate
    | SaveState
    | RoundNews
    | Prepare
    | Withdraw
    | PrepareFailed
    | Switched
    | AwaitsBoundary
    | StandsBy
    | Outdated
    | Confirm
    | CannotStandBy
    | Attached
    | NetworkTaken
    | Restored
    | JoinRounds
    | IslandAt
    | DataChanged
    | SharesChanged
    | ResidualLost
    | Stepped
    | Logged
    | Busy
    | AwaitsFault
    | FaultStruck
    | LoopExited
    | Located
    | Captured
    | AbandonSave
    | TagStep
    | SnapshotInterval
    | MemoryShort
    | SnapshotHeld
    | Saved
    | Tagged
    | Stopping
    | Waiting
    | Finished
    | Failed
    | ScriptEnded
)
