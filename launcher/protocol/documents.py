"""Members, reports and inventories to the next world: who, with which ranks, from which state, and
why.

Pure. Every document that stands in etcd is defined here: `Member`, `World`, `Alarm`, `Report`,
`Control`, `Done`.

Rules of the state a generation starts from (`choose_resume`):
1. A snapshot counts only if this generation wrote it, or if it is the very state this generation
   itself started from; any other may lie off the lineage.
2. A snapshot is whole when every rank of its world has a holder among the reports; shards of two
   generations or two steps are never mixed.
3. The highest step wins, in memory or on storage; at equal steps memory, being nearer.
4. With nothing held anywhere the job starts fresh.
5. Where ranks were found to differ, no state of a later step counts than the newest at which they
   were equal: a snapshot of this generation, or a checkpoint. Where there is none the whole state
   counts that a rank of a majority has handed over, then the state that this generation itself
   started from. A checkpoint is always of a step at which they were equal.

Invariants of a job's whole life, whatever happens to its nodes and to etcd. `check_invariants` sees
to what two worlds can tell; `tests/simulation/rules.py` checks all of them against the truth:
 R1  One world a generation: no agent ever starts another document of the same number. Where etcd
     loses its data there may be two histories, and two worlds of one number; a world is only ever
     written over one that it outranks (`outranks`), and no node trains on in the other.
 R2  Generations grow by one, also from a world that etcd has lost and an agent knows. Who stays
     keeps their order; new members come last.
 R3  A world has MIN to MAX members. Each was registered, as this incarnation, when it was written,
     or had been, or had reported, little more than a TTL before; outages of etcd do not count.
 R4  The state a generation starts from is whole: each source holds the shard that it is named for,
     or has died since it said so; a checkpoint stands.
 R5  That state is the job's own: the generation before reached it, or itself started from it, or it
     is a checkpoint's. Members that stay, and storage, hold no newer one.
 R6  A node's workers train only in its newest generation, each rank once.
 R7  When faults stop and MIN nodes are there, the job comes on, and ends.
 R8  `done` is the last document of its history; no agent exits with 0 before it. It stays while an
     agent lives that knows it.
 R9  When it says `finished`, the state's lineage holds each step once, in order of generations.
 R10 Trouble with etcd alone, as long as it may be, and the loss of data that an agent knows, ends
     no generation that trains; nor does a section in which no step is due, nor a lapsed lease while
     steps go on. Who knows that etcd is away has no workers stop at a boundary.
 R11 A member that has stopped, and said so, has a place in the next world; a node that waits has
     one as soon as there is room, and no backup of etcd was restored a moment ago. Unless it
     leaves, is set aside, or is one too many for MAX.
 R12 What operators ask is so soon after: no later world names a drained registration; after a stop
     no step is made, and what memory held is saved. Where nodes only come, leave and are scaled as
     asked, no step is made twice.
 R13 A node is set aside from the very world that its last failure brought about, as long as that
     has MIN nodes without it; if it has not, it has no more than MIN with those that are needed.
 R14 A spare takes over no job of which somebody was registered less than a TTL ago.
 R15 Where nodes only come, leave and are lost, and etcd is well, no failure counts.
 R16 A generation that stands still for a lapsed lease ends soon: about a TTL after its last step,
     or after etcd is back.
 R17 Nodes that fail by bad input, or before they have made a step where others have, end no job
     that has MIN nodes without them, take no step from it, and count as no failure.
 R18 Where a worker has died of itself, its node reports that death, whoever learnt of it first.
 R19 A job that ends as failed has saved what memory held, unless its end says that it could not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

from elasticzero.ipc.assignment import Resume, Source
from elasticzero.serialization import decode, decode_rows, encode
from elasticzero.text import list_text


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
class Setback:
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
class Strikes:
    """How often in a row a node's workers have failed, where others' did not."""

    node: str
    count: int
    why: str = field(default="", compare=False)
    """Why the node is set aside, if it is."""


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
    """A generation comes on only if it gets past this step, too: see B1 in `blame`."""
    bad_steps: tuple[int, ...] = ()
    """Checkpoints found damaged: a save of such a step replaces what stands there."""
    setbacks: tuple[Setback, ...] = ()
    """The last failures in a row at one place, oldest first."""
    strikes: tuple[Strikes, ...] = ()
    """Nodes whose workers failed in a row, where others' did not."""
    token_digest: str = ""
    """Of the job's token that its members use, shortened; empty: not told."""
    trained: int = 0
    """So many of the first members have made steps with this job: new ones come last."""
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


BLAME_ORDER = ("user", "checkpoint", "storage", "environment", "hung", "killed", "peer")
"""Of several failures the one that explains the others comes first: a lost peer explains
nothing."""

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
    setbacks: tuple[Setback, ...] = ()
    """Where it failed time and again: the first error of each generation."""


def to_bytes(document: Any) -> bytes:
    """The stored form of a document; a world's members and sources are rows, not objects."""
    value = encode(document)
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


def buddy(index: int, count: int) -> int | None:
    """Index of the member that keeps replicas of what the member at `index` holds, of `count`.

    Members keep each other's in pairs; of an odd number the last three do so in a ring, and one
    alone has nobody. So two lost nodes lose a shard only if they are a pair, or in the ring.
    """
    if count < 2:
        return None
    ring = count - 3 if count % 2 else count
    return index ^ 1 if index < ring else ring + (index - ring + 1) % 3


def charge(index: int, count: int) -> int | None:
    """Index of the member whose replicas the member at `index` keeps: whose `buddy` it is."""
    if count < 2:
        return None
    ring = count - 3 if count % 2 else count
    return index ^ 1 if index < ring else ring + (index - ring + 2) % 3


def choose_resume(
    world: World | None, reports: Mapping[str, Report], storage_step: int | None
) -> Resume:
    """The state the next generation starts from, by the rules above.

    reports: by node, of the generation of `world`. storage_step: newest good checkpoint, if any.
    """
    candidates = [Resume(tier="fresh")]
    if storage_step is not None:
        candidates.append(Resume(tier="storage", step=storage_step))
    if world is not None:
        candidates += _whole_snapshots(world, reports)
    verified = verified_step(reports)
    if world is not None and verified is not None:
        candidates = _not_after(world, candidates, verified)
    nearness = {"fresh": 0, "storage": 1, "ram": 2}
    return max(candidates, key=lambda r: (r.step, nearness[r.tier], r.generation))


def verified_step(reports: Mapping[str, Report]) -> int | None:
    """The newest step at which ranks that were found to differ were equal; None: none were."""
    failures = [report.failure for report in reports.values() if report.failure is not None]
    return min((f.verified for f in failures if f.verified is not None), default=None)


def _not_after(world: World, candidates: Sequence[Resume], verified: int) -> list[Resume]:
    """What rule 5 leaves of the candidates."""
    fresh = [resume for resume in candidates if resume.tier == "fresh"]
    equal = [resume for resume in candidates if resume.tier != "fresh" and resume.step <= verified]
    newer = [resume for resume in equal if resume != _as_held(world.resume, resume)]
    whole = [
        resume
        for resume in candidates
        if resume.tier == "ram"
        and resume.step > verified
        and {source.rank for source in resume.sources} == {0}
    ]
    if verified == 0:
        return fresh
    return equal if newer else (whole or equal or fresh)


def _as_held(origin: Resume, found: Resume) -> Resume:
    """`origin`, in memory still, with the sources that were found of it."""
    return replace(origin, sources=found.sources) if origin.tier == "ram" else origin


def _whole_snapshots(world: World, reports: Mapping[str, Report]) -> list[Resume]:
    """The snapshots that rules 1 and 2 admit."""
    return [
        Resume(
            tier="ram",
            step=step,
            generation=generation,
            sources=tuple(source for rank in sorted(by_rank) for source in by_rank[rank]),
        )
        for (generation, step, world_size), by_rank in _held(world, reports).items()
        if len(by_rank) == world_size
    ]


def _held(
    world: World, reports: Mapping[str, Report]
) -> dict[tuple[int, int, int], dict[int, list[Source]]]:
    """Who holds which rank's shard of each (generation, step, world size) that rule 1 admits."""
    origin = (world.resume.generation, world.resume.step) if world.resume.tier == "ram" else None
    addresses = {member.node: member.address for member in world.members}
    held: dict[tuple[int, int, int], dict[int, list[Source]]] = {}
    for node, report in reports.items():
        for holding in report.holdings:
            state = (holding.generation, holding.step)
            if holding.generation != world.generation and state != origin:
                continue
            by_rank = held.setdefault((*state, holding.world_size), {})
            for rank in holding.ranks:
                source = Source(rank=rank, node=node, address=addresses[node])
                by_rank.setdefault(rank, []).append(source)
    return held


def lost_snapshot(world: World, reports: Mapping[str, Report], resume: Resume) -> str:
    """Why no snapshot is gone on from though nodes hold parts of some; empty where one is, or none
    was taken."""
    if resume.tier == "ram":
        return ""
    if (verified := verified_step(reports)) is not None:
        return f"; the ranks were last found to be equal at step {verified}"
    parts = {state: by_rank for state, by_rank in _held(world, reports).items() if by_rank}
    newer = [state for state in parts if state[1] > resume.step]
    if not newer:
        return ""
    _, step, size = most = max(newer, key=lambda state: (len(parts[state]), state[1]))
    missing = [rank for rank in range(size) if rank not in parts[most]]
    names = list_text(missing, 4)
    return (
        f"; no node is left that holds the part of rank{'s' * (len(missing) > 1)} {names} of the "
        f"snapshot of step {step}"
    )


def line_up(
    world: World | None, joiners: Sequence[Member], staying: Iterable[Member], most: int
) -> tuple[Member, ...]:
    """The members of the next world: those that stay keep their order, new ones come last."""
    kept = list(staying)
    if world is not None:
        position = {member.node: index for index, member in enumerate(world.members)}
        kept.sort(key=lambda member: position[member.node])
    return tuple([*kept, *joiners][:most])


def root_cause(reports: Mapping[str, Report]) -> tuple[str, Failure] | None:
    """The failure that brought the others about: whose own fault it is goes before a lost peer."""
    failures = [(node, r.failure) for node, r in reports.items() if r.failure is not None]
    return min(failures, key=lambda f: (BLAME_ORDER.index(f[1].blame), f[1].rank), default=None)


def check_invariants(before: World | None, after: World) -> None:
    """What must hold between a world and the next, whatever happened; raises AssertionError."""
    nodes = [member.node for member in after.members]
    assert len(set(nodes)) == len(nodes), "a node has one place"
    assert after.members and after.world_size > 0, "a world has ranks"
    assert list(accumulate(m.nproc for m in after.members))[-1] == after.world_size
    if before is not None:
        assert after.generation == before.generation + 1, "generations only grow, by one"
        stayed = [m.node for m in before.members if after.find(m.node, m.incarnation) is not None]
        assert nodes[: len(stayed)] == stayed, "those that stay keep their order, before new ones"
    if after.resume.tier == "ram":
        ranks = {source.rank for source in after.resume.sources}
        assert ranks == set(range(len(ranks))), "every rank of the snapshot has a source"
