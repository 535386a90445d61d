"""Gives an island that begins a snapshot that another one lends.

It has the inner optimizer of that island, its schedulers and all else that workers restore. The
outer parameters it takes from the rounds, as every island that comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol
from zlib import crc32

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.checkpoint.ram.transfer import SealedShard, copy_shards
from elasticzero.checkpoint.storage.base import Readable
from elasticzero.errors import ElasticZeroError, StorageError, StoreUnavailable, one_line
from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.islands.documents import REPORTS
from elasticzero.launcher.islands.newcomers.lending import LENT, query_of
from elasticzero.launcher.protocol.documents import Holding, Member, Report, World
from elasticzero.launcher.protocol.resume import choose_resume
from elasticzero.launcher.store.api import Entry
from elasticzero.launcher.store.decoding import document, is_snapshot
from elasticzero.launcher.store.watch_cache import WORLD
from elasticzero.options.diloco import FOLDER
from elasticzero.serialization import RecordError, decode
from elasticzero.text import size_text

ANSWER_S, LEND_S = 2.0, 60.0
"""Seconds within which an agent says what it holds, and within which it has made a copy of that."""
TRIES, REST_S = 5, 0.5
"""Number of times that islands are asked in turn, and seconds between two: what one holds may be
replaced before it is lent."""
SPARE = 2
"""Multiple of the copy's bytes that stay free beside it, for the island's own snapshots."""

Read = Callable[[str], Mapping[str, Entry]]
"""Reads the entries below a key, again while the store does not answer."""
IsBehind = Callable[[Manifest], bool]
"""Returns whether a state is older than what the island has itself."""


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
    """Holds how agents are reached."""

    ask: Ask
    open: Open
    answers: Callable[[Member], bool]
    """Returns whether an agent lives."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lenders:
    """Says who lends the parts of a snapshot."""

    island: str
    snapshot: Resume
    ranks: Mapping[str, tuple[int, ...]]
    """Ranks whose shards are read from a node, by its name."""
    members: Mapping[str, Member]

    @property
    def shards(self) -> int:
        return sum(map(len, self.ranks.values()))

    def part(self, node: str) -> Holding:
        """Returns what a node lends."""
        return Holding(
            generation=self.snapshot.generation,
            step=self.snapshot.step,
            world_size=self.shards,
            ranks=self.ranks[node],
        )


class _NotNow(StorageError):
    """Says that a snapshot cannot be read now, and may be in a moment."""


class _Cancelled(Exception):
    """Says that the node is to leave."""


class MemoryReader:
    """Reads snapshots of other islands into this node's memory, as such of generation 0."""

    def __init__(
        self,
        read: Read,
        reach: Reach,
        snapshots: SnapshotStore,
        log_line: Callable[[str], None],
    ) -> None:
        """Reads nothing yet.

        Args:
            read: Reads the part of etcd that all islands share.
            reach: How agents are reached.
            snapshots: This node's snapshots.
            log_line: Receives lines about what is read, or could not be.
        """
        self._read, self._reach = read, reach
        self._snapshots, self._log = snapshots, log_line

    def bring(self, island: str, is_behind: IsBehind) -> Brought | None:
        """Copies the newest snapshot of another island.

        Args:
            island: Name of this island.
            is_behind: Returns whether a state is older than what this island has itself.

        Returns:
            What was copied; None: no island holds a whole snapshot that is newer, or none could be
            copied.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        errors: dict[str, str] = {}
        final: set[str] = set()
        for number in range(TRIES):
            time.sleep(REST_S if number else 0.0)
            may_change = False
            for name, world in self._others(island):
                if name in final:
                    continue
                try:
                    if (brought := self._copied(name, world, is_behind)) is not None:
                        return brought
                    continue
                except _Cancelled:
                    return None
                except StoreUnavailable:
                    raise
                except (_NotNow, FileNotFoundError) as error:
                    may_change, errors[name] = True, one_line(error)
                except (ElasticZeroError, OSError, RecordError, LookupError) as error:
                    final.add(name)
                    errors[name] = one_line(error)
                self._snapshots.keep_only(())
            if not may_change:
                break
        for name, why in errors.items():
            self._log(f"{name} cannot lend its state: {why}")
        return None

    def _others(self, island: str) -> Iterator[tuple[str, World]]:
        """Yields the other islands that are in the rounds, with their worlds, in an order by the
        name of this one: several that come so read from several."""
        names = sorted({key.removeprefix(REPORTS) for key in self._read(REPORTS)} - {island})
        first = crc32(island.encode()) % max(1, len(names))
        for name in names[first:] + names[:first]:
            key = f"{FOLDER}/{name}/{WORLD}"
            entry = self._read(key).get(key)
            try:
                if entry is not None:
                    yield name, document(World, entry.value)
            except RecordError:
                continue  # of another release

    def _copied(self, island: str, world: World, is_behind: IsBehind) -> Brought | None:
        """Copies the newest snapshot of an island; returns None if it holds none that is newer.

        Raises:
            ElasticZeroError: It was replaced, or cannot be read or kept.
            FileNotFoundError: It was removed.
        """
        answers = {m.node: self._reach.ask(m, f"/{LENT}", ANSWER_S) for m in world.members}
        # What is lent already, another island reads: all of it is there.
        lenders = _whole(island, world, answers, "lent") or _whole(island, world, answers, "held")
        if lenders is None:
            return None
        for node in lenders.ranks:
            part, member = lenders.part(node), lenders.members[node]
            answer = self._reach.ask(member, f"/{LENT}?{query_of(part)}", LEND_S) or {}
            if self._reach.cancelled():
                raise _Cancelled
            if not _lends(answer, part):
                raise _NotNow(f"{node} has no room for a copy, lends another one, or was too slow")
        with ExitStack() as stack:
            shards = []
            for node, ranks in lenders.ranks.items():
                member = lenders.members[node]
                source = self._reach.open(member.address, member.run, LENT)
                stack.callback(source.close)
                of = lenders.snapshot.generation, lenders.snapshot.step
                names = [ShardName(*of, rank, lenders.shards) for rank in ranks]
                shards += [SealedShard.read(source, name) for name in names]
            if is_behind(shards[0].manifest):
                return None
            size = sum(shard.file.bytes for shard in shards)
            root = self._snapshots.root_with(size, spare=SPARE * size)
            step = lenders.snapshot.step
            self._log(f"reads {size_text(size)} of what {island} had at step {step}")
            copy_shards(shards, self._snapshots.open(0, step, root), self._check)
        return Brought(island=island, step=step, shards=lenders.shards)

    def _check(self) -> None:
        if self._reach.cancelled():
            raise _Cancelled


def _whole(
    island: str, world: World, answers: Mapping[str, Mapping[str, Any] | None], key: str
) -> Lenders | None:
    """Returns who has the newest whole snapshot of an island; None: there is none.

    Args:
        island: The island's name.
        world: Its world.
        answers: What its agents have said, by node.
        key: What is looked at of that: `held` or `lent`.
    """
    reports = {
        member.node: Report(
            incarnation=member.incarnation, phase="stopped", holdings=_holdings(answer, key)
        )
        for member in world.members
        if (answer := answers[member.node]) is not None
    }
    snapshot = choose_resume(world, reports, None)
    if snapshot.tier != "ram" or not snapshot.step:
        return None
    node_of = {source.rank: source.node for source in reversed(snapshot.sources)}
    ranks: dict[str, tuple[int, ...]] = {}
    for rank in sorted(node_of):
        ranks[node_of[rank]] = (*ranks.get(node_of[rank], ()), rank)
    members = {member.node: member for member in world.members}
    return Lenders(island=island, snapshot=snapshot, ranks=ranks, members=members)


def _holdings(answer: Mapping[str, Any], key: str) -> tuple[Holding, ...]:
    """Returns what an agent has said that it holds, or lends; raises `RecordError`."""
    holdings = decode(tuple[Holding, ...], answer.get(key, []), key)
    return tuple(holding for holding in holdings if is_snapshot(holding))


def _lends(answer: Mapping[str, Any], part: Holding) -> bool:
    """Returns whether an agent lends a part of a snapshot, by what it has answered."""
    return any(
        {*part.ranks} <= {*lent.ranks} and replace(lent, ranks=part.ranks) == part
        for lent in _holdings(answer, "lent")
    )
