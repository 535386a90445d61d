"""Gives an island that begins the newest snapshot that another one lends.

It has the inner optimizer of that island, its schedulers and all else that workers restore. The
outer parameters it takes from the rounds, as every island that comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol
from zlib import crc32

from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.checkpoint.ram.transfer import copy_shard
from elasticzero.checkpoint.storage.base import Readable
from elasticzero.errors import ElasticZeroError, one_line
from elasticzero.launcher.islands.documents import REPORTS
from elasticzero.launcher.islands.newcomers.lending import LENT
from elasticzero.launcher.protocol.documents import Holding, Member, Report, World
from elasticzero.launcher.protocol.resume import choose_resume
from elasticzero.launcher.store.api import Store
from elasticzero.launcher.store.decoding import document
from elasticzero.launcher.store.watch_cache import WORLD
from elasticzero.options.diloco import FOLDER
from elasticzero.serialization import RecordError, decode

ANSWER_S, LEND_S = 2.0, 60.0
"""Seconds within which an agent says what it holds, and within which it has made a copy of that."""
TRIES, REST_S = 5, 0.5
"""Number of times that islands are asked in turn, and seconds between two: what one holds may be
replaced before it is lent, or another island that comes may be reading from there."""


class Ask(Protocol):
    """Asks an agent for an object; None: it serves none in time."""

    def __call__(self, member: Member, path: str, timeout_s: float) -> Mapping[str, Any] | None: ...


class ClosableFiles(Readable, Protocol):
    """Reads files over connections."""

    def close(self) -> None:
        """Closes them."""


class Open(Protocol):
    """Opens a folder of files that an agent serves."""

    def __call__(self, address: str, run: int, folder: str) -> ClosableFiles: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Holds how agents of other islands are reached."""

    ask: Ask
    open: Open
    cancelled: Callable[[], bool]
    """Returns whether to give up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """Describes the state that a node has brought into its memory."""

    island: str
    """Island that it comes from."""
    step: int
    shards: int
    """Number of its shards."""


def bring_snapshot(
    store: Store,
    island: str,
    reach: Reach,
    snapshots: SnapshotStore,
    log_line: Callable[[str], None],
) -> Brought | None:
    """Copies the newest snapshot of another island into this node's memory, where it is of
    generation 0.

    Args:
        store: The part of etcd that all islands share.
        island: Name of this island.
        reach: How agents are reached.
        snapshots: This node's snapshots.
        log_line: Receives a line about what could not be copied.

    Returns:
        What was copied; None: no island holds a whole snapshot, or none could be copied.

    Raises:
        StoreUnavailable: The store does not answer.
    """
    why = ""
    for number in range(TRIES):
        if number and not why:
            return None
        time.sleep(REST_S if number else 0.0)
        why = ""
        for name, world in _others(store, island):
            try:
                if (brought := _copied(name, world, reach, snapshots)) is not None:
                    return brought
            except (ElasticZeroError, FileNotFoundError) as error:
                snapshots.keep_only(())
                why = f"{name}: {one_line(error)}"
            if reach.cancelled():
                return None
    log_line(f"no island lends this one its newest state ({why})")
    return None


def _others(store: Store, island: str) -> Iterator[tuple[str, World]]:
    """Yields the other islands that are in the rounds, with their worlds, in an order by the name
    of this one: several that come so read from several."""
    names = sorted({key.removeprefix(REPORTS) for key in store.read(REPORTS).entries} - {island})
    first = crc32(island.encode()) % max(1, len(names))
    for name in names[first:] + names[:first]:
        key = f"{FOLDER}/{name}/{WORLD}"
        entry = store.read(key).entries.get(key)
        try:
            if entry is not None:
                yield name, document(World, entry.value)
        except RecordError:
            continue  # of another release


def _copied(name: str, world: World, reach: Reach, snapshots: SnapshotStore) -> Brought | None:
    """Copies the newest snapshot of an island; returns None if it holds none.

    Args:
        name: The island's name.
        world: Its world.
        reach: How its agents are reached.
        snapshots: This node's snapshots.

    Raises:
        ElasticZeroError: It was replaced, or cannot be read or kept.
        FileNotFoundError: It was removed.
    """
    reports = {}
    for member in world.members:
        if (answer := reach.ask(member, f"/{LENT}", ANSWER_S)) is not None:
            reports[member.node] = Report(
                incarnation=member.incarnation,
                phase="stopped",
                holdings=decode(tuple[Holding, ...], answer.get("held", []), "held"),
            )
    resume = choose_resume(world, reports, None)
    if resume.tier != "ram" or not resume.step:
        return None
    lenders = {source.rank: source.node for source in reversed(resume.sources)}
    members = {member.node: member for member in world.members}
    query = f"/{LENT}?generation={resume.generation}&step={resume.step}"
    for node in sorted({*lenders.values()}):
        reach.ask(members[node], query, LEND_S)
        with closing(reach.open(members[node].address, members[node].run, LENT)) as source:
            for rank in (rank for rank, lender in lenders.items() if lender == node):
                shard = ShardName(resume.generation, resume.step, rank, len(lenders))
                copy_shard(source, snapshots, shard, kept_as=0, cancelled=reach.cancelled)
    return Brought(island=name, step=resume.step, shards=len(lenders))
