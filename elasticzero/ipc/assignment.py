"""The agent's first message to a worker: its rank, its generation, and the source of its state.

Pure. `torchrun_environment` has the same for scripts that read torchrun's variables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where one rank's shard of a snapshot can be read."""

    rank: int
    """Rank in the world that wrote the snapshot."""
    node: str
    address: str
    """`host:port` of the HTTP server of the agent that holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The state a generation starts from."""

    tier: Literal["fresh", "ram", "storage"]
    step: int = 0
    generation: int = 0
    """RAM tier: the generation that wrote the snapshot."""
    sources: tuple[Source, ...] = ()
    """RAM tier: one for each rank of the snapshot's world; more than one for a rank are
    alternatives, nearest not first. A snapshot that is complete has world size 1 and only sources
    of rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownError:
    """An error that ended a generation before this one; its traceback has been printed."""

    message: str
    node: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What every worker of a node finds in its environment, as under torchrun."""

    role: str = "default"
    max_restarts: int = 0
    threads: int | None = None
    """OMP_NUM_THREADS that the launcher has chosen; None: the user did, or there is one worker."""
    devices: tuple[str, ...] | None = None
    """The GPU that each local rank sees as its only one, in CUDA's words; None: all see all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Agent to worker, first: who you are in which generation, and where its state comes from."""

    job: str
    node: str
    generation: int
    token: str
    """The generation's own: in checkpoint file names."""
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int
    """Index of this worker's node in the generation's order of members."""
    master_address: str
    master_port: int
    store_fd: int | None
    """Rank 0: an inherited socket bound to `master_port`, not yet listening."""
    strategy: str
    resume: Resume
    snapshot_root: str
    """Directory in shared memory, owned by the agent, that holds this node's snapshots."""
    overflow_root: str = ""
    """The same on a disk, for snapshots that find no room in shared memory; empty: none."""
    host: str = "127.0.0.1"
    """Where other nodes reach this one."""
    checkpoint_dir: str | None = None
    checkpoint_every: int = 0
    snapshot_every: int | None = None
    """Steps from one snapshot to the next; 0: none are taken; None: rank 0 chooses."""
    verify_every: int | None = None
    """Steps from one comparison of what must be equal on all ranks to the next; 0: none; None: rank
    0 chooses."""
    trained: bool = False
    """This node has made steps with this job in an earlier generation."""
    bad_steps: tuple[int, ...] = ()
    """Checkpoints found damaged: a save of such a step replaces what stands there."""
    connect_timeout_s: float = 30.0
    """For what needs no other rank's script: rank 0's host, and the process group of those that are
    there."""
    start_timeout_s: float = 300.0
    """Until every rank's script has come to `elasticzero.run`."""
    collective_timeout_s: float = 600.0
    save_timeout_s: float = 600.0
    """The last checkpoint is tried again for so long where the worker alone holds its state."""
    password: str = field(default="", repr=False)
    """The job's token, which other nodes' snapshots are read with."""
    keep: bool = False
    """The process may outlive its generation and take part in the next."""
    known_errors: tuple[KnownError, ...] = ()
    """Of generations that came no further, newest last."""
    nodes: int = 1
    """Members of the generation's world."""
    error_file: str = ""
    """Where torch's `record` puts the error that ends the script."""
    settings: WorkerSettings = field(default_factory=WorkerSettings)

    @property
    def visible_local_rank(self) -> int:
        """The index of this worker's GPU among those that it sees."""
        return self.local_rank if self.settings.devices is None else 0


def torchrun_environment(assignment: Assignment) -> dict[str, str]:
    """The variables that torchrun sets, for scripts written for it."""
    settings = assignment.settings
    more = {}
    if settings.threads is not None:
        more["OMP_NUM_THREADS"] = str(settings.threads)
    if settings.devices is not None:
        more["CUDA_VISIBLE_DEVICES"] = settings.devices[assignment.local_rank].strip()
    return {
        "RANK": str(assignment.rank),
        "LOCAL_RANK": str(assignment.visible_local_rank),
        "WORLD_SIZE": str(assignment.world_size),
        "LOCAL_WORLD_SIZE": str(assignment.local_world_size),
        "GROUP_RANK": str(assignment.group_rank),
        "GROUP_WORLD_SIZE": str(assignment.nodes),
        "ROLE_NAME": settings.role,
        "ROLE_RANK": str(assignment.rank),
        "ROLE_WORLD_SIZE": str(assignment.world_size),
        "MASTER_ADDR": assignment.master_address,
        "MASTER_PORT": str(assignment.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(assignment.generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(settings.max_restarts),
        "TORCHELASTIC_RUN_ID": assignment.job,
        "TORCHELASTIC_ERROR_FILE": assignment.error_file,
        **more,
    }
