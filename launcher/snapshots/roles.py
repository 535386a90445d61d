"""Defines what one node does for the snapshots and checkpoints of a generation.

Pure values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticzero.checkpoint.ram.store import ShardName
from elasticzero.ipc.messages import Captured


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSource:
    """Another node, whose shards this one keeps replicas of."""

    address: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRole:
    """This node's part in the snapshots and checkpoints of one generation."""

    generation: int
    token: str
    world_size: int
    ranks: tuple[int, ...]
    replica_source: ReplicaSource | None = None
    password: str = field(default="", repr=False)
    """The job's token, which other nodes' snapshots are read with."""
    bad_steps: frozenset[int] = frozenset()
    """Checkpoints found damaged: a save of such a step replaces what stands there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """The shards that this node's workers have captured of one step so far."""

    role: SnapshotRole
    number: int
    captured: Mapping[int, Captured] = field(default_factory=dict)
    """By rank."""

    @property
    def complete(self) -> bool:
        """True if every worker of this node has captured it."""
        return len(self.captured) == len(self.role.ranks)

    @property
    def shards(self) -> tuple[ShardName, ...]:
        """The shards of it that are in memory."""
        return tuple(
            ShardName(self.role.generation, self.number, rank, self.role.world_size)
            for rank, part in self.captured.items()
            if not part.direct
        )
