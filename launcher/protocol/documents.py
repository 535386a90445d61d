"""Defines every document that is stored in etcd, and how it is written there.

Pure. The rules over them stand in `resume` (which state a generation starts from), `placement`
(the order of members), `failure_policy` and `invariants`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from elasticzero.ipc.assignment import Resume, Source
from elasticzero.serialization import decode, decode_rows, encode


@dataclass(frozen=True, slots=True)
class Member:
    """A node registered in the store under a lease."""

    node: str
    incarnation: str
    """New at every registration, except when the node reclaims a place that `world` still names."""
    host: str
    """Where the other nodes reach it."""
    http_port: int
    store_port: int
    """Bound by the agent, free for rank 0's store, should this member come first."""
    nproc: int

    @property
    def address(self) -> str:
        return f"{self.host}:{self.http_port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """The first error of a generation that ended by one."""

    generation: int
    node: str
    rank: int
    blame: str
    step: int
    """The last step that was finished before."""
    message: str
    others: tuple[str, ...] = ()
    """Other nodes whose workers failed by the same error at the same step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStrikes:
    """How often in a row a node's workers have failed, where others' did not."""

    node: str
    count: int
    why: str = field(default="", compare=False)
    """Why the node is set aside, if it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCheckpoint:
    """A damaged checkpoint: a generation begins from an earlier one, or from the start."""

    step: int
    message: str
    """Which file is damaged, and how."""
    cause: str
    """The reason of the world without the damage: what else led to the generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One generation: an ordered list of members, and the state they start from."""

    generation: int
    token: str
    members: tuple[Member, ...]
    strategy: str
    resume: Resume
    reason: str
    """One sentence: why this world was made."""
    fruitless: int = 0
    """Failures in a row that did not get past the step they started from."""
    furthest: int = 0
    """A generation comes on only if it gets past this step, too: see B1 in `failure_policy`."""
    bad_steps: tuple[int, ...] = ()
    """Checkpoints found damaged: a save of such a step replaces what stands there."""
    setbacks: tuple[FailureRecord, ...] = ()
    """The last failures in a row at one place, oldest first."""
    strikes: tuple[NodeStrikes, ...] = ()
    """Nodes whose workers failed in a row, where others' did not."""
    token_digest: str = ""
    """Of the job's token that its members use, shortened; empty: not told."""
    trained: int = 0
    """So many of the first members have made steps with this job: new ones come last."""
    skipped: SkippedCheckpoint | None = None
    """The damaged checkpoint that `reason` tells of; None: it tells of none, or this document was
    written by a version without this field."""
    _places: Mapping[str, int] = field(init=False, repr=False, compare=False)
    """Each node's index; an agent looks for its own several times a round of its loop."""

    def __post_init__(self) -> None:
        places = {member.node: index for index, member in enumerate(self.members)}
        object.__setattr__(self, "_places", places)

    def names(self, member: Member) -> bool:
        """Whether this very registration has a place here."""
        return self.find(member.node, member.incarnation) is not None

    def find(self, node: str, incarnation: str) -> int | None:
        """Index of a registration in the order of members."""
        index = self._places.get(node)
        if index is None or self.members[index].incarnation != incarnation:
            return None
        return index

    @property
    def world_size(self) -> int:
        return sum(member.nproc for member in self.members)

    def first_rank(self, index: int) -> int:
        """Rank of the first worker of the member at `index`."""
        return sum(member.nproc for member in self.members[:index])

    def ranks(self, index: int) -> tuple[int, ...]:
        """Ranks of the workers of the member at `index`."""
        first = self.first_rank(index)
        return tuple(range(first, first + self.members[index].nproc))


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Somebody saw this generation end."""

    node: str
    kind: Literal["failure", "hang", "lapse", "leave", "grow", "stop", "silence"]
    reason: str
    left: int | None = None
    """Of a hang: the rank that left its loop alone, for which the others wait."""
    final: bool = False
    """A failure that the same input would bring about again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A snapshot, or some ranks' shards of one, in a node's shared memory."""

    generation: int
    step: int
    world_size: int
    """Of the snapshot; 1 for a complete one."""
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first error of a node's workers."""

    rank: int
    blame: Literal["user", "checkpoint", "storage", "environment", "hung", "killed", "peer"]
    message: str
    step: int = 0
    final: bool = False
    """The same input would fail in the same way: do not try again."""
    bad_step: int | None = None
    """The checkpoint that was found damaged."""
    traceback: str = ""
    """Its end, as far as a document in the store may hold it."""
    odd: bool = False
    """The rank has another state than a majority: its node is set aside at once."""
    verified: int | None = None
    """State of later steps may differ between ranks; None: nothing was found to differ."""


Phase = Literal["restored", "stalled", "alive", "stopped", "finished"]
"""stalled: the workers make no step, and wait for others as far as their agent can see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a node says in one generation; a later report replaces an earlier one."""

    incarnation: str
    phase: Phase
    store_port: int = 0
    """A fresh one for the next world."""
    leaving: bool = False
    leave_reason: str = ""
    """Why it leaves, where that is known."""
    holdings: tuple[Holding, ...] = ()
    failure: Failure | None = None
    final_step: int | None = None
    world: str = ""
    """Token of the generation that it is about: there may be two of one number where the store has
    lost its data. Empty: not told."""
    end_reason: str = ""
    """Phase finished: why the script ended training early, by `session.stop`."""
    ran: bool = False
    """Its workers have run for a while and never called `elasticzero.run`: the steps of a plain
    script are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A registration that shall leave; the same node, registered anew, is another."""

    node: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """What operators ask of the job."""

    drain: tuple[Drain, ...] = ()
    """Who shall leave at the next boundary."""
    nnodes: tuple[int, int] | None = None
    """Fewest and most nodes; None: as the agents were told."""
    stop: bool = False
    """The job shall end at the next boundary."""

    def drains(self, member: Member) -> bool:
        """Whether this very registration shall leave."""
        return any((d.node, d.incarnation) == (member.node, member.incarnation) for d in self.drain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The job is over."""

    outcome: Literal["finished", "failed", "stopped"]
    """stopped: by an operator, to be gone on with."""
    step: int
    reason: str
    failure: Failure | None = None
    setbacks: tuple[FailureRecord, ...] = ()
    """Where it failed time and again: the first error of each generation."""
    end_reason: str = ""
    """Why the script ended training early, by `session.stop`; empty: it did not, or this document
    was written by a version without this field."""


NOT_WRITTEN_EMPTY: tuple[tuple[type, str], ...] = ((World, "skipped"), (Done, "end_reason"))
"""Fields that are not written where they are empty: the bytes are then those of versions without
them."""


def to_bytes(document: Any) -> bytes:
    """The stored form of a document; a world's members and sources are rows, not objects."""
    value = encode(document)
    for kind, name in NOT_WRITTEN_EMPTY:
        if isinstance(document, kind) and not getattr(document, name):
            del value[name]
    if isinstance(document, World):
        value["members"] = [list(encode(member).values()) for member in document.members]
        value["resume"]["sources"] = [[s.rank, s.node, s.address] for s in document.resume.sources]
    return json.dumps(value, separators=(",", ":")).encode()


def world_from_bytes(data: bytes) -> World:
    value = json.loads(data)
    members = decode_rows(Member, value.pop("members", None), "world.members")
    sources = decode_rows(Source, value["resume"].pop("sources", None), "world.resume.sources")
    world = decode(World, {**value, "members": []}, "world")
    return replace(world, members=members, resume=replace(world.resume, sources=sources))


def outranks(world: World, other: World | None) -> bool:
    """Whether of two worlds that were both written, for the store has lost its data in between,
    this one counts: the higher generation, then the higher resume step, then the smaller token."""
    if other is None or world.token == other.token:
        return other is None
    mine, its = ((w.generation, w.resume.step) for w in (world, other))
    return mine > its if mine != its else world.token < other.token


def merged(known: Control, found: Control) -> Control:
    """What operators ask where the store has lost its data: what was known, and what stands there
    now. No wish is ever withdrawn; of two sizes the one that was known counts."""
    more = tuple(drain for drain in found.drain if drain not in known.drain)
    return Control(
        drain=(*known.drain, *more),
        nnodes=known.nnodes if known.nnodes is not None else found.nnodes,
        stop=known.stop or found.stop,
    )
