"""Reads the documents of a job in the store, whatever bytes stand at their keys.

Everybody who reaches etcd can write there, and an agent of a later release writes what this one
does not know. So each document is read by itself: it is one of its kind, or a `RecordError` says
what is wrong with it, and `MEANINGS` what follows from that. No other error leaves this file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from elasticzero.launcher.protocol.documents import (
    FIRST_RUN,
    Alarm,
    Control,
    Done,
    Holding,
    Member,
    Proposal,
    Report,
    Run,
    World,
    world_from_bytes,
)
from elasticzero.launcher.store.api import Entry
from elasticzero.serialization import OTHER, RecordError, column, decode, parse_json
from elasticzero.spans import REDUNDANCIES
from elasticzero.text import shown

T = TypeVar("T")
MAX_RANKS = 1 << 20
"""Maximum number of ranks of a world, and of workers of a node."""
MAX_PORT = 65535
MAX_LABEL = 63
"""Number of characters of a part of a host's name, between dots."""
MAX_REASON_CHARACTERS = 200
"""Number of characters of what is wrong with a document that a line repeats."""
MAX_BYTES: Mapping[type[Any], int] = {Member: 1 << 14, Report: 1 << 18, Alarm: 1 << 18}
"""Maximum number of bytes of documents from which worlds are made: many times what an agent writes.
etcd would refuse a world that repeats the texts of a larger one."""
HOSTS_KEPT = 4096
"""Number of addresses that are checked once, though each world names them again."""
_ABSENT = "it counts as absent; delete the key unless an agent of another release wrote it"
MEANINGS: Mapping[type[Any], str] = {
    Member: _ABSENT,
    Report: _ABSENT,
    Proposal: _ABSENT,
    Control: _ABSENT,
    Alarm: "it counts as an alarm, which ends its generation",
    World: "this node leaves with its state",
    Done: "the job goes on, and no new agent of it starts until the key is deleted",
    Run: "no world and no end is written, and this node leaves with its state",
}
"""Says, for each kind, what a document means that cannot be read."""


def document(kind: type[T], data: bytes) -> T:
    """Returns the document of this kind that the store holds as `data`; raises `RecordError` if it
    is none."""
    if len(data) > (most := MAX_BYTES.get(kind, len(data))):
        place = kind.__name__.lower()
        raise RecordError(f"{place}: at most {most} bytes were expected, not {len(data)}")
    if kind is World:
        read: Any = world_from_bytes(data)
    else:
        name = kind.__name__.lower()
        read = decode(kind, parse_json(data, name), name)
    _check(read)
    result: T = read
    return result


def member_at(entry: Entry) -> Member:
    """Returns the registration that an entry holds; raises `RecordError` if it is none, or that of
    a node of another name."""
    member = document(Member, entry.value)
    check_place(entry, member)
    return member


def check_place(entry: Entry, read: Any) -> None:
    """Raises `RecordError` for a registration at any other key than its node's.

    A key in a folder of its own is another one too: one node would have two registrations.
    """
    if isinstance(read, Member) and entry.key.partition("/")[2] != read.node:
        raise RecordError(f"member.node: the key's name was expected, not {read.node!r:.60}")


def check_followed(read: Any, strategies: Collection[str]) -> None:
    """Raises `RecordError` for a world that an agent of this release cannot take part in.

    A later release may have words for how state is divided, or for where it is read from, that this
    one does not know. Commands show such a world.

    Args:
        read: A document; all but worlds pass.
        strategies: Names of the strategies that are known.
    """
    if not isinstance(read, World):
        return
    unknown = {
        "world.resume.tier": read.resume.tier == OTHER,
        "world.shard": read.shard == OTHER,
        "world.strategy": read.strategy not in strategies,
        "world.redundancy": read.redundancy not in REDUNDANCIES,
    }
    if places := [place for place, is_unknown in unknown.items() if is_unknown]:
        raise RecordError(f"{' and '.join(places)}: a word of this release was expected")


def is_member(entry: Entry) -> bool:
    """Returns whether an entry holds a registration that can be read."""
    try:
        member_at(entry)
    except RecordError:
        return False
    return True


def counts_as_node(entry: Entry) -> bool:
    """Returns whether an agent may live that has registered itself so.

    What cannot be read is that of a living agent of another release as long as it has a lease.
    """
    return entry.leased or is_member(entry)


def unreadable_text(kind: type[Any], key: str, error: RecordError) -> str:
    """Returns one line that names a document which cannot be read, and says what follows.

    Args:
        kind: The document's class.
        key: Its key.
        error: What is wrong with it.
    """
    reason = shown(str(error))[:MAX_REASON_CHARACTERS]
    return f"{shown(key)} cannot be read ({reason}): {MEANINGS[kind]}"


def _check(read: Any) -> None:
    """Raises `RecordError` for a document whose numbers and names no agent can have written."""
    match read:
        case Member():
            _check_members((read,), "member")
        case World():
            _check_world(read)
        case Report():
            _check_port(read.store_port, "report.store_port")
            if not all(map(is_snapshot, read.holdings)):
                raise RecordError("report.holdings: a snapshot was expected")
        case Proposal(generation=generation, members=members):
            if generation < 1 or not members:
                raise RecordError("proposal: a generation with members was expected")
            _check_members(members, "proposal.members")
        case Run(number=number) if number < FIRST_RUN:
            raise RecordError(f"run.number: {FIRST_RUN} or more was expected, not {number}")
        case Control(nnodes=(least, most)):
            if not 1 <= least <= most <= MAX_RANKS:
                raise RecordError(f"control.nnodes: MIN:MAX was expected, not {least}:{most}")
        case _:
            pass


def _check_world(world: World) -> None:
    if not world.members or not world.names_each_once():
        raise RecordError("world.members: at least one was expected, each with a name of its own")
    _check_members(world.members, "world.members")
    resume = world.resume
    for ancestor in world.ancestors:
        if min(ancestor.generation, ancestor.first, ancestor.last) < 0:
            raise RecordError("world.ancestors: generations and their steps were expected")
    if min(world.generation - 1, world.entered, resume.step, resume.generation, world.trained) < 0:
        raise RecordError("world: numbers of a generation, and of a step, were expected")
    if world.micro_batch is not None and world.micro_batch < 1:
        raise RecordError("world.micro_batch: a number of samples was expected")
    if (spent := world.time_spent) is not None:
        times = (spent.until, *spent.seconds.values(), *(s for _, s in spent.steps))
        if not all(map(math.isfinite, times)):
            raise RecordError("world.time_spent: finite times were expected")


def is_snapshot(holding: Holding) -> bool:
    """Returns whether there can be a snapshot of these numbers."""
    numbers = (holding.generation, holding.step, *holding.ranks)
    return min(numbers) >= 0 and 0 < holding.world_size <= MAX_RANKS


def _check_members(members: Sequence[Member], where: str) -> None:
    for name in ("http_port", "store_port"):
        ports = column(members, name)
        _check_port(min(ports), f"{where}.{name}")
        _check_port(max(ports), f"{where}.{name}")
    for host in dict.fromkeys(column(members, "host")):
        if not _is_host(host):
            raise RecordError(f"{where}.host: an address was expected, not {host!r:.60}")
    steps, shards = column(members, "brought_step"), column(members, "brought_shards")
    brought = [*zip(steps, shards, strict=True)]
    if not all(0 <= n <= MAX_RANKS and s >= 0 and bool(n) == bool(s) for s, n in brought):
        raise RecordError(f"{where}.brought_shards: a number of shards was expected")
    workers = column(members, "nproc")
    if min(workers) < 1:
        raise RecordError(f"{where}.nproc: a number of workers was expected")
    if sum(workers) > MAX_RANKS:
        raise RecordError(f"{where}: at most {MAX_RANKS} workers were expected, not {sum(workers)}")


def _check_port(port: int, where: str) -> None:
    if not 0 <= port <= MAX_PORT:
        raise RecordError(f"{where}: a port was expected, not {port}")


@lru_cache(maxsize=HOSTS_KEPT)
def _is_host(host: str) -> bool:
    """Returns whether Python's sockets raise no other error for an address than an `OSError`."""
    if not host.isprintable():
        return False
    if not host.isascii():
        try:
            host.encode("idna")
        except UnicodeError:
            return False
        return True
    return all(0 < len(label) <= MAX_LABEL for label in host.removesuffix(".").split("."))
