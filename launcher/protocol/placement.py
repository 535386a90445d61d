"""Orders the members of a world, and chooses which member holds the replicas of which other one.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from elasticzero.launcher.protocol.documents import Member, World
from elasticzero.spans import ShardOver


def replica_sources(zones: Sequence[str]) -> tuple[int, ...]:
    """Returns, for each member, the index of the member whose shards it replicates.

    Members replicate each other's in pairs; of an odd number the last three do so in a ring, and a
    single one replicates nothing (empty). So two lost nodes lose a shard only if they are a pair,
    or both in the ring. A pair lies in two zones, unless one zone has more than half of the
    members; where zones are not known, neighbours in the order of members are a pair.

    Args:
        zones: Zones of the members, in the order of members; empty where not known.
    """
    count = len(zones)
    if count < 2:
        return ()
    order = _by_pairs(zones)
    ring = count - 3 if count % 2 else count
    sources = [0] * count
    for place, index in enumerate(order):
        source = place ^ 1 if place < ring else ring + (place - ring + 2) % 3
        sources[index] = order[source]
    return tuple(sources)


def _by_pairs(zones: Sequence[str]) -> list[int]:
    """Returns the indices of members with those of a pair side by side.

    The members of a zone stand together in `row`, so that those half a row apart differ in it.
    """
    count, half = len(zones), (len(zones) + 1) // 2
    if len(set(zones)) == 1:
        return list(range(count))
    row = sorted(range(count), key=lambda index: zones[index])
    pairs = [[row[place], row[place + half]] for place in range(count // 2)]
    return [index for pair in pairs for index in pair] + ([row[half - 1]] if count % 2 else [])


def alike(
    members: Sequence[Member], shard: ShardOver | Literal["other"], workers: int | None = None
) -> list[Member]:
    """Returns the members that one world may have: where each node divides the whole state among
    its workers, those with the same number of workers.

    Args:
        members: Candidates; all are returned where the whole world divides the state.
        shard: Ranks among which the strategy divides state.
        workers: Number of workers that a node must have; None: as many as the first candidate.
    """
    if shard == "world" or not members:
        return list(members)
    nproc = members[0].nproc if workers is None else workers
    return [member for member in members if member.nproc == nproc]


def mirroring_ranks(world: World) -> dict[int, int]:
    """Returns, for each rank, the rank that keeps a live copy of its part of the state.

    It is a worker of the node that holds the rank's replicas. Empty: the world has one node, keeps
    no live copies, or has the whole state on each node.
    """
    count = len(world.members)
    if world.redundancy != "mirror" or world.shard == "node" or count < 2:
        return {}
    keepers: dict[int, int] = {}
    sources = replica_sources(world.zones)
    for index, source in enumerate(sources):
        ranks = world.ranks(index)
        keepers |= {rank: ranks[n % len(ranks)] for n, rank in enumerate(world.ranks(source))}
    return keepers


def order_members(
    world: World | None, joiners: Sequence[Member], staying: Iterable[Member], most: int
) -> tuple[Member, ...]:
    """Returns the members of the next world: those that stay have their old order, new ones come
    last.

    Args:
        world: The world before; None: this is the first one, and no member stays.
        joiners: New members, in the order in which they come.
        staying: Members of `world` that stay.
        most: Maximum number of members; the last in the order are left out.
    """
    kept = list(staying)
    if world is not None:
        position = {member.node: index for index, member in enumerate(world.members)}
        kept.sort(key=lambda member: position[member.node])
    return tuple([*kept, *joiners][:most])
