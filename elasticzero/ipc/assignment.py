"""Defines the agent's first message to a worker: its rank, its generation, and the source of its
state.

Pure. `torchrun_environment` gives the same to scripts that read torchrun's variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from elasticzero.options.settings import TrainingSettings
from elasticzero.security.certificates import Credentials
from elasticzero.serialization import OMIT_DEFAULT
from elasticzero.spans import ShardOver

Tier = Literal["other", "fresh", "ram", "live", "storage"]
"""Names where the state of a generation is read from. `other`: a word of a later release, which no
agent gives to a worker. `live`: workers that have entered the generation inside their loops have it
already, and a worker that begins in it gets the state of their boundary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Locates one rank's shard of a snapshot on a node."""

    rank: int
    """Rank in the world that wrote the snapshot."""
    node: str
    address: str
    """`host:port` of the HTTP server of the agent that holds the shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Names the state that a generation starts from."""

    tier: Tier
    step: int = 0
    generation: int = 0
    """RAM tier: the generation that wrote the snapshot. Live tier of a worker that begins: the
    generation that the others leave."""
    sources: Sequence[Source] = ()
    """RAM tier, and live tier of a worker that begins: one source for each rank of the snapshot's
    world; several for one rank are alternatives, not ordered by distance. Where every node holds
    the whole state, the snapshot's world is that of one node, or one rank: "ddp" has only sources
    of rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownError:
    """Records an error that ended an earlier generation; its traceback has been printed."""

    message: str
    """The error in one line, without traceback."""
    node: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutBatch:
    """Names a global batch without a step of the optimizer: one that was left out, or will be."""

    step: int = field(default=0, metadata=OMIT_DEFAULT)
    """Number of the boundary after it, where training is to leave it out after a rollback; 0: it is
    left out already."""
    dataset: int
    """Number of its dataset object, from 0, in the order in which loops first used them."""
    epoch: int
    start: int
    stop: int
    """It has the positions `[start, stop)` of the epoch's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Holds the settings that every worker of a node finds in its environment, as under
    torchrun."""

    role: str = "default"
    max_restarts: int = 0
    threads: int | None = None
    """The launcher's value of OMP_NUM_THREADS; None: the user has set it, or there is one
    worker."""
    devices: tuple[str, ...] | None = None
    """The GPU that each local rank sees as its only one, in CUDA's notation; None: all see all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment(TrainingSettings):
    """Tells a worker its settings, its rank, its generation and the source of its state; the agent
    sends it first."""

    FIELDS_FIRST = (
        *("job", "node", "generation", "token", "rank", "local_rank", "world_size"),
        *("local_world_size", "group_rank", "master_address", "master_port", "store_fd"),
        *("strategy", "resume", "snapshot_root", "overflow_root", "host"),
    )
    job: str
    node: str
    generation: int
    token: str
    """The generation's own random token, which is part of checkpoints' file names."""
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int
    """Index of this worker's node in the generation's order of members."""
    master_address: str
    master_port: int
    store_fd: int | None
    """On rank 0, an inherited socket bound to `master_port`, not yet listening."""
    strategy: str
    resume: Resume
    returns: int = 0
    """Number of times that the job went back to an earlier step."""
    running_since: float = 0.0
    """Unix time at which the job would have begun, had it never waited for nodes."""
    snapshot_root: str
    """Directory in shared memory, owned by the agent, that holds this node's snapshots."""
    overflow_root: str = ""
    """Directory on a disk for snapshots that find no room in shared memory; empty: none."""
    host: str = "127.0.0.1"
    """Address at which other nodes reach this one."""
    trained: bool = False
    """True if this node has made steps with this job in an earlier generation."""
    micro_batch: int | None = None
    """Most samples of a micro-batch of automatic size; None: memory has sufficed so far."""
    left_out: tuple[LeftOutBatch, ...] = ()
    """Global batches that are left out because training was rolled back."""
    bad_steps: tuple[int, ...] = ()
    """Checkpoints that were found damaged; a save of such a step replaces the damaged one."""
    connect_timeout_s: float = 30.0
    """Time limit in seconds for work that needs no other rank's script: reaching rank 0's host, and
    setting up the process group of ranks that have registered."""
    start_timeout_s: float = 300.0
    """Time limit in seconds until every rank's script has called `elasticzero.run`."""
    collective_timeout_s: float = 600.0
    save_timeout_s: float = 600.0
    """Time in seconds for which the last checkpoint is retried if the worker alone holds its
    state."""
    password: str = field(default="", repr=False)
    """Secret of the job's run, by which a worker proves that it belongs to it."""
    tls: Credentials | None = field(default=None, repr=False)
    """Certificate of the node, and the authorities of the job's; None: the job is without TLS."""
    keep: bool = False
    """True if the process may outlive its generation and take part in the next."""
    known_errors: tuple[KnownError, ...] = ()
    """Errors of generations that made no progress, newest last."""
    nodes: int = 1
    """Number of members of the generation's world."""
    shard: ShardOver = "world"
    """Ranks among which a strategy divides state."""
    error_file: str = ""
    """File for the error that ends the script, which torch's `record` names."""
    settings: WorkerSettings = field(default_factory=WorkerSettings)
    mirrors: tuple[int, ...] = ()
    """Ranks whose part of the state this worker keeps a live copy of."""
    run: int = 1
    """Number of the job's run; a later one begins by `--restart`."""
    mirrored_by: int | None = None
    """Rank that keeps a live copy of this worker's part; None: none does."""
    proofs: bool = True
    """True if the nodes prove the secret to each other; False: one may be of the release before,
    which expects to be shown it."""
    changes_inside: bool = field(default=False, metadata=OMIT_DEFAULT)
    """True if a planned change may be made inside the loops of this generation."""
    changes_with_nccl: bool = field(default=False, metadata=OMIT_DEFAULT)
    """True if that holds where ranks use NCCL too."""

    @property
    def one_release(self) -> bool:
        """Returns whether no rank is of the release before."""
        return self.proofs

    @property
    def enters_inside(self) -> bool:
        """Returns whether a worker that begins with this comes into a generation that the others
        enter inside of their loops."""
        return self.resume.tier == "live"

    @property
    def row(self) -> int:
        """Returns the number of ranks among which state is divided."""
        return self.local_world_size if self.shard == "node" else self.world_size

    @property
    def node_place(self) -> NodePlace:
        """Returns what this worker is on its node, in whatever world."""
        return NodePlace(
            job=self.job,
            local_rank=self.local_rank,
            local_world_size=self.local_world_size,
            error_file=self.error_file,
            settings=self.settings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """Holds what a worker is on its node, in whatever world."""

    job: str
    local_rank: int
    local_world_size: int
    error_file: str
    settings: WorkerSettings

    @property
    def visible_local_rank(self) -> int:
        """Returns the index of the worker's GPU among those that it sees."""
        return self.local_rank if self.settings.devices is None else 0

    def environment(self) -> dict[str, str]:
        """Returns the variables of torchrun's that follow from it alone."""
        settings = self.settings
        optional = {}
        if settings.threads is not None:
            optional["OMP_NUM_THREADS"] = str(settings.threads)
        if settings.devices is not None:
            optional["CUDA_VISIBLE_DEVICES"] = settings.devices[self.local_rank].strip()
        return {
            "LOCAL_RANK": str(self.visible_local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "ROLE_NAME": settings.role,
            "TORCHELASTIC_MAX_RESTARTS": str(settings.max_restarts),
            "TORCHELASTIC_RUN_ID": self.job,
            "TORCHELASTIC_ERROR_FILE": self.error_file,
            **optional,
        }


def torchrun_environment(assignment: Assignment) -> dict[str, str]:
    """Returns the variables that torchrun sets, for scripts written for it."""
    return {
        "RANK": str(assignment.rank),
        "WORLD_SIZE": str(assignment.world_size),
        "GROUP_RANK": str(assignment.group_rank),
        "GROUP_WORLD_SIZE": str(assignment.nodes),
        "ROLE_RANK": str(assignment.rank),
        "ROLE_WORLD_SIZE": str(assignment.world_size),
        "MASTER_ADDR": assignment.master_address,
        "MASTER_PORT": str(assignment.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(assignment.generation - 1),
        **assignment.node_place.environment(),
    }
