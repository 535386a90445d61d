"""A schedule: the job, its policy, and which faults come when."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from elasticzero.launcher.protocol.policy import JobPolicy
from tests.simulation.releases import Release

HARMLESS = frozenset(
    {"pause-etcd", "kill-etcd", "wipe-etcd", "restore-etcd", "back-up-etcd", "busy-worker"}
)
"""These alone change no generation."""
CLEAN = frozenset({"join", "drain", "scale", "stop"})
"""These alone, and those above, recompute no step."""
MACHINES = frozenset(
    {"join", "drain", "scale", "stop", "kill-agent", "lose-node", "lose-node-silently"}
    | {"kill-source", "kill-saver", "sigterm", "sigterm-leader", "sigterm-two", "sigterm-again"}
)
"""Where nothing else happens, and etcd is well, no failure counts."""
LASTING = ("pause", "storage", "kill-etcd", "cut", "slow", "stop-agent", "hang", "busy", "outage")
"""What begins so lasts for a while."""
HANG_TIMEOUT_S = 2.5
LOSSES = ("wipe-etcd", "restore-etcd")
BAD_INPUTS = ("import", "model", "script", "crash")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens at a time, to the node that `pick` chooses among those there are."""

    at_s: float
    kind: str
    pick: float
    seconds: float
    """How long it lasts, where it does."""


OLDER, NEWER = ("0.2.0", "2.13.0+cpu"), ("0.3.1", "2.13.0+cpu")
"""Versions of the nodes of the two builds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One schedule."""

    seed: int
    nodes: int
    policy: JobPolicy
    ttl_s: int = 2
    nproc: int = 1
    strategy: str = "zero1"
    total_steps: int = 40
    step_s: float = 0.1
    snapshot_every: int = 5
    checkpoint_every: int = 0
    storage: bool = True
    connect_s: float = 3.0
    """What a process group may take when all are there."""
    start_s: float = 60.0
    """For so long those that are there wait for the others' scripts."""
    slow_start_s: float = 0.0
    """One script in four takes up to so much longer to start."""
    long_kernels: bool = True
    """Some workers are in one when they are to hear of something, and hear of it late."""
    crash_at: int = 0
    """The script fails at this step, each time; 0: never."""
    crash_rank: int = 0
    trouble: float = 0.003
    """The share of requests, and of watches' news, that is late or lost."""
    poll_s: float = 1.0
    """An agent to which nothing happens looks so often."""
    rests: bool = False
    """An agent rests until its next timer is due, as real ones do, and at most for poll_s."""
    pause_growth: float = 4.0
    """Until then each of its pauses is so many times the one before."""
    names_from: int = 1
    """The first node is node-1, the second node-(this + 1): with 10, its name begins with the
    first's."""
    apart_s: float = 0.5
    """The nodes come within so long."""
    runs: int = 1
    """So often the job is run: once it is over, it is begun again."""
    phased: bool = False
    """Saves are those of the real code, each of whose phases may be late, repeated or fail."""
    keep: int | None = None
    """Steps that retention leaves then; None: all."""
    releases: float = 0.0
    """So many of the nodes have another release than this one."""
    builds: bool = False
    """The nodes that come state one of two builds, mostly the older one first."""
    faults: tuple[Fault, ...] = field(default=())

    def release_of(self, number: int) -> Release:
        """That of the agents of the node that comes as the so many-th."""
        if not self.releases:
            return ""
        random = Random(f"{self.seed} release of {number}")
        return random.choice(["before", "after"]) if random.random() < self.releases else ""

    def versions_of(self, number: int) -> tuple[str, str]:
        """Versions of ElasticZero and torch of the node that comes as the so many-th; empty: it
        states none."""
        if not self.builds:
            return ("", "")
        random = Random(f"{self.seed} build of {number}")
        newer = random.random() < (0.3 if number <= self.nodes else 0.8)
        return NEWER if newer else OLDER

    @property
    def loses_data(self) -> bool:
        """Whether etcd loses its data at some time."""
        return any(fault.kind in (*LOSSES, "join-backed-up") for fault in self.faults)

    @property
    def faults_end_s(self) -> float:
        return max((fault.at_s + fault.seconds for fault in self.faults), default=0.0)
