"""Orders the members of a world, and chooses which member holds the replicas of which other one.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elasticzero.launcher.protocol.documents import Member, World
from elasticzero.spans import ShardOver


def replica_source_index(index: int, count: int) -> int | None:
    """Returns the index of the member whose shards the member at `index`, of `count`, replicates.

    Members replicate each other's in pairs; of an odd number the last three do so in a ring, and a
    single one replicates nothing. So two lost nodes lose a shard only if they are a pair, or both
    in the ring.
    """
    if count < 2:
        return None
    ring = count - 3 if count % 2 else count
    return index ^ 1 if index < ring else ring + (index - ring + 2) % 3


def alike(members: Sequence[Member], shard: ShardOver, workers: int | None = None) -> list[Member]:
    """Returns the members that one world may have: where each node divides the whole state among
    its workers, those with `workers` workers; None: with as many as the first has."""
    if shard == "world" or not members:
        return list(members)
    wanted = members[0].nproc if workers is None else workers
    return [member for member in members if member.nproc == wanted]


def mirroring_ranks(world: World) -> dict[int, int]:
    """Returns, for each rank, the rank that keeps a live copy of its part of the state.

    It is a worker of the node that holds the rank's replicas. Empty: the world has one node, keeps
    no live copies, or has the whole state on each node.
    """
    count = len(world.members)
    if world.redundancy != "mirror" or world.shard == "node" or count < 2:
        return {}
    keepers: dict[int, int] = {}
    for index in range(count):
        source = replica_source_index(index, count)
        assert source is not None
        own = world.ranks(index)
        keepers |= {rank: own[n % len(own)] for n, rank in enumerate(world.ranks(source))}
    return keepers


def order_members(
    world: World | None, joiners: Sequence[Member], staying: Iterable[Member], most: int
) -> tuple[Member, ...]:
    """Returns the members of the next world: those that stay have their old order, new ones come
    last."""
    kept = list(staying)
    if world is not None:
        position = {member.node: index for index, member in enumerate(world.members)}
        kept.sort(key=lambda member: position[member.node])
    return tuple([*kept, *joiners][:most])
