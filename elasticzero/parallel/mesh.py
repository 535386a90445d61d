"""Arranges the ranks of a world in rows: a row holds the whole state, and all rows hold the same.

A row is the world or one node (`--shard`). State is divided in one shard for each place in a row;
the ranks at one place of all rows, the replicas of a shard, hold the same elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticzero.rank_groups.group import ALONE, RankGroup


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
    world_group: RankGroup = ALONE
    """Group of all ranks."""
    shard_group: RankGroup = ALONE
    """Group of the ranks of this row; that of all ranks where there is one row."""
    replica_group: RankGroup = ALONE
    """Group of the replicas of this rank's shard, where there are several rows."""

    @classmethod
    def of_world(cls, rank: int, world_size: int, group: RankGroup = ALONE) -> Mesh:
        """Returns the mesh of one row.

        Args:
            rank: This rank.
            world_size: Number of ranks.
            group: The group of all ranks.
        """
        return cls(shard=rank, shards=world_size, world_group=group, shard_group=group)

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
