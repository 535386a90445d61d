"""Arranges the ranks of a world in rows: a row holds the whole state, and all rows hold the same.

A row is the world or one node (`--shard`). State is divided in one shard for each place in a row;
the ranks at one place of all rows, the replicas of a shard, hold the same elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Holds one rank's place among the rows, and its process groups."""

    shard: int
    """This rank's place in its row, which is the index of its shard."""
    shards: int
    """Number of ranks in a row."""
    replica: int = 0
    """Index of this rank's row."""
    replicas: int = 1
    """Number of rows."""
    shard_group: Any = None
    """Process group of the ranks of this row; None: all ranks."""
    replica_group: Any = None
    """Process group of the replicas of this rank's shard; None: there is one row."""

    @classmethod
    def of_world(cls, rank: int, world_size: int) -> Mesh:
        """Returns the mesh of one row."""
        return cls(shard=rank, shards=world_size)

    @property
    def world_size(self) -> int:
        return self.shards * self.replicas

    def rank_of(self, shard: int) -> int:
        """Returns the rank that holds a shard in this row."""
        return self.replica * self.shards + shard

    @property
    def rank(self) -> int:
        """Returns this rank's number."""
        return self.rank_of(self.shard)

    def replicas_of(self, shard: int) -> list[int]:
        """Returns the ranks that hold a shard, one of each row."""
        return list(range(shard, self.world_size, self.shards))

    def rows(self) -> list[list[int]]:
        """Returns the ranks of each row."""
        return [
            list(range(first, first + self.shards))
            for first in range(0, self.world_size, self.shards)
        ]
