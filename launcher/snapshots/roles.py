"""Defines what one node does for the snapshots and checkpoints of a generation.

Pure values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticzero.checkpoint.ram.store import ShardName
from elasticzero.ipc.messages import Captured
from elasticzero.launcher.tls.contexts import TlsContexts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSource:
    """Names another node, whose shards this one holds replicas of."""

    address: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRole:
    """Describes this node's part in the snapshots and checkpoints of one generation."""

    generation: int
    token: str
    world_size: int
    ranks: tuple[int, ...]
    replica_source: ReplicaSource | None = None
    password: str = field(default="", repr=False)
    """Secret of the job's run, with which other nodes' snapshots are read."""
    tls: TlsContexts | None = field(default=None, repr=False, compare=False)
    """Contexts of the connections to other nodes; None: the job is without TLS."""
    bad_steps: frozenset[int] = frozenset()
    """Steps whose checkpoints were found damaged; a save of such a step replaces the checkpoint."""
    run: int = 1
    """Number of the job's run."""
    proofs: bool = True
    """True if the nodes prove the secret to each other; False: one may be of the release before,
    which expects to be shown it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """Holds the shards of one step that this node's workers have captured so far."""

    role: SnapshotRole
    number: int
    captured: Mapping[int, Captured] = field(default_factory=dict)
    """Messages of the workers, by rank."""

    @property
    def complete(self) -> bool:
        """Returns whether every worker of this node has captured the step."""
        return len(self.captured) == len(self.role.ranks)

    @property
    def shards(self) -> tuple[ShardName, ...]:
        """Returns the names of its shards that are in memory."""
        return tuple(
            ShardName(self.role.generation, self.number, rank, self.role.world_size)
            for rank, part in self.captured.items()
            if not part.direct
        )
