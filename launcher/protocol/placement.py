"""Chooses which nodes a world may have, their order, and which member holds whose replicas.

Pure. Rules of builds, for nodes of several releases beside each other:
 BD1  The members of a world have one build: one minor version of ElasticZero, one minor version of
      torch, and one local build of torch, such as `+cpu`. Other nodes are set aside. Smaller
      differences are allowed. A node that states no versions is of a release before 0.2, whose
      messages this release has: it fits every build.
 BD2  The build that trains stays as long as MIN nodes have it. No generation ends for another one.
 BD3  When the next world is written for any reason, that build gives way to a newer one that MIN
      nodes have, and more nodes than have the build that trains. Newer is a build of no lower
      version, of at least one higher version, and of the same local build.
 BD4  If fewer than MIN nodes have the build that trains, the one that most nodes have takes its
      place, of those that MIN nodes have; among equals the newer one. That may be an older one: a
      release reads the documents and checkpoints of the next one.
 BD5  If MIN nodes have none of them, the job waits for more nodes of one build.
Invariant: if MIN registered nodes have one build, there is a world that they may form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from elasticzero.launcher.protocol.documents import Member, World
from elasticzero.spans import ShardOver
from elasticzero.text import count_text, shown

_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})[^+]*(?:\+(.*))?", re.DOTALL)
"""The major and minor number of a version, and its local build."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Holds what the members of a world must have alike (BD1)."""

    release: tuple[int, int]
    """Major and minor version of ElasticZero."""
    torch: tuple[int, int]
    """Major and minor version of torch."""
    local: str
    """Local build of torch, such as `cpu`; empty: it names none."""

    def follows(self, other: Build) -> bool:
        """Returns whether this build is newer than another one (BD3)."""
        no_lower = self.release >= other.release and self.torch >= other.torch
        return self != other and no_lower and self.local == other.local


def build_of(versions: Member | World) -> Build | None:
    """Returns the build that a document states; None: it states none, or no versions that can be
    compared."""
    return _build(versions.release, versions.torch)


@lru_cache(maxsize=256)
def _build(release_text: str, torch_text: str) -> Build | None:
    release, torch = (_VERSION.match(text) for text in (release_text, torch_text))
    if release is None or torch is None:
        return None
    return Build(
        release=(int(release[1]), int(release[2])),
        torch=(int(torch[1]), int(torch[2])),
        local=torch[3] or "",
    )


def fits(member: Member, build: Build | None) -> bool:
    """Returns whether a node may be in a world of a build; None: no member of it states one."""
    its = build_of(member)
    return its is None or build is None or its == build


def choose_build(
    members: Sequence[Member], present: Build | None, least: int, most: int
) -> Build | None:
    """Returns the build of the next world: BD2 to BD5.

    Args:
        members: Nodes that the world could have, in the order in which it would take them.
        present: Build that trains; None: none does, or it is not known.
        least: Fewest nodes of a world.
        most: Maximum number of nodes of a world; more of one build count as so many.

    Returns:
        The build; it has fewer than `least` nodes only if every build has. None: no node states
        one.
    """
    builds = dict.fromkeys(build for m in members if (build := build_of(m)) is not None)
    sizes = {build: min(most, len(of_build(members, build))) for build in builds}
    able = [build for build in builds if sizes[build] >= least]
    if present in able:
        newer = [b for b in able if b.follows(present) and sizes[b] > sizes[present]]
        return max(newer, key=lambda b: (sizes[b], b.release, b.torch), default=present)
    if not able and present is not None:
        return present
    return max(able or builds, key=lambda b: (sizes[b], b.release, b.torch), default=None)


def of_build(members: Iterable[Member], build: Build | None) -> list[Member]:
    """Returns the nodes that may be in a world of a build, in their order."""
    return [member for member in members if fits(member, build)]


def stated_versions(members: Iterable[Member]) -> tuple[str, str]:
    """Returns the versions of ElasticZero and torch of the first node that states a build; empty
    texts: none does."""
    stated = ((m.release, m.torch) for m in members if build_of(m) is not None)
    return next(stated, ("", ""))


def as_registered(member: Member, registrations: Mapping[str, Member] | None) -> Member:
    """Returns a member of a world with the zone, run and versions that it registered with, which
    the world lacks if one of its members had none.

    Args:
        member: A member, as the world names it.
        registrations: Registrations by node; None: they are not known.
    """
    last = (registrations or {}).get(member.node)
    if last is None or last.incarnation != member.incarnation:
        return member
    if last == member:  # as of most
        return last
    return replace(member, zone=last.zone, run=last.run, release=last.release, torch=last.torch)


def unlike(odd: Member, member: Member) -> str:
    """Returns why a node cannot be in a world with another one, and what to do; both nodes print
    the same.

    Args:
        odd: Node that is set aside.
        member: A node of the world; both state the builds that are compared.
    """
    if fits(odd, build_of(member)):
        return (
            f"{odd.node} has {count_text(odd.nproc, 'worker')}, and {member.node} has "
            f"{member.nproc}; --shard node needs the same --nproc-per-node on all nodes"
        )
    its, theirs = build_of(odd), build_of(member)
    assert its is not None and theirs is not None, "a node without a build fits every one"
    names = ["ElasticZero"] * (its.release != theirs.release)
    names += ["torch"] * ((its.torch, its.local) != (theirs.torch, theirs.local))
    odd_versions, versions = _named(odd, names), _named(member, names)
    text = f"{odd.node} has {odd_versions}, and {member.node} has {versions}; "
    if its.follows(theirs):
        return (
            f"{text}upgrade the other nodes to {odd_versions}, and the job goes over once most "
            f"nodes have it, or install {versions} on {odd.node}"
        )
    return f"{text}install {versions} on {odd.node}, or {odd_versions} on the other nodes"


def version_line(member: Member, world: World) -> str:
    """Returns the line about a node whose versions differ from a world's; empty: they do not.

    Args:
        member: A registration.
        world: World that trains.
    """
    if fits(member, build_of(world.members[0])):
        return slight_difference(member, world.members[0])
    if world.names(member):  # an agent of a release before 0.2 has taken it
        return ""
    return f"{member.node} is set aside: {unlike(member, world.members[0])}"


def slight_difference(odd: Member, member: Member) -> str:
    """Returns a line on versions that differ, though both nodes may be in one world; empty: they do
    not differ, or a node does not state them.

    Args:
        odd: A node.
        member: A node of its world, or of the world that it waits for.
    """
    if build_of(odd) is None or build_of(odd) != build_of(member):
        return ""
    names = ["ElasticZero"] * (odd.release != member.release)
    names += ["torch"] * (odd.torch != member.torch)
    if not names:
        return ""
    return (
        f"{odd.node} has {_named(odd, names)}, and {member.node} has {_named(member, names)}: they "
        "train together, and results may depend on the node"
    )


def _named(member: Member, names: Sequence[str]) -> str:
    """Returns some of the versions that a node states, with the names of the packages."""
    versions = {"ElasticZero": member.release, "torch": member.torch}
    return " and ".join(f"{name} {shown(versions[name]):.40}" for name in names)


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
