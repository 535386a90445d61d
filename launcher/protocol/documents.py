"""Defines every document that is stored in etcd, and how it is written there.

Pure. The rules over them stand in `resume` (which state a generation starts from), `placement`
(the order of members), `failure_policy` and `invariants`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from elasticzero.ipc.assignment import KnownError, LeftOutBatch, Resume, Source
from elasticzero.ipc.failure import Failed
from elasticzero.launcher.addresses import host_and_port
from elasticzero.launcher.goodput import TimeSpent
from elasticzero.serialization import (
    OMIT_DEFAULT,
    RecordError,
    column,
    decode,
    decode_rows,
    encode,
    encode_rows,
    parse_json,
)
from elasticzero.spans import ShardOver

UNSTATED = 0
"""Run of a document that states none, for a release without runs wrote it. It counts for the
present run."""
FIRST_RUN = 1
"""Run of a job that was never begun again: the store has no key `run` then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Numbers the present run of the job, which `--restart` begins."""

    number: int


@dataclass(frozen=True, slots=True)
class Member:
    """Registers a node in the store, under a lease."""

    node: str
    incarnation: str
    """Drawn anew at every registration, except where the node reclaims a place that `world` still
    names."""
    host: str
    """Address at which the other nodes reach this one."""
    http_port: int
    store_port: int
    """Port that the agent has bound for rank 0's store, for the case that this member comes
    first."""
    nproc: int
    zone: str = field(default="", metadata=OMIT_DEFAULT)
    """Part of the cluster that may fail as a whole, such as a zone of a cloud or a rack; empty: not
    known."""
    run: int = field(default=UNSTATED, compare=False, metadata=OMIT_DEFAULT)
    """Number of the job's run; UNSTATED: the node is of the release before, which takes the token
    in place of proofs. A world states it once, for all of its members."""
    release: str = field(default="", compare=False, metadata=OMIT_DEFAULT)
    """Version of ElasticZero; empty: not stated, as by the releases before 0.2. A world states it,
    and that of torch, once."""
    torch: str = field(default="", compare=False, metadata=OMIT_DEFAULT)
    """Version of torch with its build, such as 2.13.0+cpu; empty: not stated."""
    brought_step: int = field(default=0, compare=False, metadata=OMIT_DEFAULT)
    """Step of the state that the node has brought along in its memory, where it is of generation 0;
    0: it has brought none. It is another island's."""
    brought_shards: int = field(default=0, compare=False, metadata=OMIT_DEFAULT)
    """Number of the shards of that, all of which it has."""

    @property
    def address(self) -> str:
        return host_and_port(self.host, self.http_port)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord(KnownError):
    """Records the first error of a generation that ended by one."""

    FIELDS_FIRST = ("generation", "node", "rank", "blame", "step")
    rank: int
    blame: str
    step: int
    """Last step that was finished before the error."""
    others: tuple[str, ...] = ()
    """Other nodes whose workers failed by the same error at the same step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStrikes:
    """Counts how often in a row a node's workers have failed where no other node's did."""

    node: str
    count: int
    why: str = field(default="", compare=False)
    """Reason for which the node is set aside; empty if it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCheckpoint:
    """Names a damaged checkpoint; the generation begins from an earlier one, or from the start."""

    step: int
    message: str
    """Names the damaged file and the damage."""
    cause: str
    """The rest of the world's reason: what led to the generation besides the damage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestor:
    """Names the states of an earlier generation that are on the lineage of a world whose workers
    came from it inside their loops."""

    generation: int
    first: int
    """First step of these states."""
    last: int
    """Last step of these states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Describes one generation: an ordered list of members, and the state that they start from."""

    generation: int
    token: str
    members: Sequence[Member]
    """Members in the order of their ranks. A world that was read makes each when it is asked for:
    of a thousand members most agents look at themselves and the first."""
    strategy: str
    resume: Resume
    reason: str
    """One sentence that says why this world was made."""
    fruitless: int = 0
    """Number of failures in a row that did not get past the step they started from."""
    furthest: int = 0
    """Step that a generation must also get past to make progress: see B1 in `failure_policy`."""
    bad_steps: tuple[int, ...] = ()
    """Steps whose checkpoints were found damaged; a save of such a step replaces the damaged
    one."""
    setbacks: tuple[FailureRecord, ...] = ()
    """The last failures in a row at one place, oldest first."""
    strikes: tuple[NodeStrikes, ...] = ()
    """Nodes whose workers failed in a row, where others' did not."""
    token_digest: str = ""
    """Shortened digest of the job's token that its members use; empty: not stated."""
    trained: int = 0
    """Number of the first members that have made steps with this job; new members come last."""
    skipped: SkippedCheckpoint | None = field(default=None, metadata=OMIT_DEFAULT)
    """Damaged checkpoint that `reason` mentions; None: it mentions none, or a version without this
    field wrote this document."""
    shard: ShardOver | Literal["other"] = field(default="world", metadata=OMIT_DEFAULT)
    """Ranks among which the strategy divides state. `other`: a word of a later release."""
    redundancy: str = field(default="snapshot", metadata=OMIT_DEFAULT)
    """Source of a lost node's part of the state: a name of `REDUNDANCIES`."""
    micro_batch: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """Most samples of a micro-batch of automatic size; None: memory has sufficed so far."""
    left_out: tuple[LeftOutBatch, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """Global batches after `resume` that are left out because training was rolled back."""
    time_spent: TimeSpent | None = field(default=None, metadata=OMIT_DEFAULT)
    """Time of the job by class until this world was written; None: not stated."""
    run: int = field(default=UNSTATED, compare=False, metadata=OMIT_DEFAULT)
    """Number of the job's run: see `compare_runs`."""
    proofs: bool = field(default=False, metadata=OMIT_DEFAULT)
    """True if its members, and the nodes that hold the state that it starts from, prove the secret
    to each other and do not show it. False: one of them may be of the release before."""
    ancestors: tuple[Ancestor, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """Earlier generations, oldest first, whose snapshots count too, because training went on from
    them without a stop; none where the generation began with a start of workers."""
    entered: int = field(default=0, metadata=OMIT_DEFAULT)
    """Number of a generation that workers had entered inside their loops before this one, and for
    which no world was written; 0: there is none."""
    release: str = field(default="", metadata=OMIT_DEFAULT)
    """Version of ElasticZero of its first member that states one; others may differ in the last
    number. Empty: no member states one, or a release before 0.2 wrote this document."""
    torch: str = field(default="", metadata=OMIT_DEFAULT)
    """Version of torch of the same member."""
    _places: Mapping[str, int] = field(init=False, repr=False, compare=False)
    """Index of each node; an agent looks its own up several times in a round of its loop."""
    _incarnations: Sequence[str] = field(init=False, repr=False, compare=False)
    """Incarnations of the members, in order."""

    def __post_init__(self) -> None:
        places = dict(zip(self.nodes, range(len(self.members)), strict=True))
        object.__setattr__(self, "_places", places)
        object.__setattr__(self, "_incarnations", column(self.members, "incarnation"))

    def names(self, member: Member) -> bool:
        """Returns whether this very registration has a place here."""
        return self.find(member.node, member.incarnation) is not None

    def find(self, node: str, incarnation: str) -> int | None:
        """Returns the index of a registration in the order of members."""
        index = self._places.get(node)
        if index is None or self._incarnations[index] != incarnation:
            return None
        return index

    def names_each_once(self) -> bool:
        """Returns whether no two members have the same name."""
        return len(self._places) == len(self.members)

    def registrations(self) -> Iterator[tuple[str, str]]:
        """Returns the name and the incarnation of each member, in order."""
        return zip(self.nodes, self._incarnations, strict=True)

    @property
    def nodes(self) -> Sequence[str]:
        """Returns the names of the members, in order."""
        names: Sequence[str] = column(self.members, "node")
        return names

    @property
    def zones(self) -> Sequence[str]:
        """Returns the zones of the members, in order; empty where not known."""
        zones: Sequence[str] = column(self.members, "zone")
        return zones

    @property
    def world_size(self) -> int:
        return sum(column(self.members, "nproc"))

    def first_rank(self, index: int) -> int:
        """Returns the rank of the first worker of the member at `index`."""
        return sum(column(self.members, "nproc")[:index])

    def ranks(self, index: int) -> tuple[int, ...]:
        """Returns the ranks of the workers of the member at `index`."""
        first = self.first_rank(index)
        return tuple(range(first, first + self.members[index].nproc))


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Says that this generation ends, and why."""

    node: str
    kind: Literal["other", "failure", "hang", "lapse", "leave", "grow", "stop", "silence"]
    reason: str
    left: int | None = None
    """Rank that left its loop alone, and for which the others wait; None: this is no such hang."""
    final: bool = False
    """True if the same input would bring the failure about again."""
    run: int = field(default=UNSTATED, compare=False, metadata=OMIT_DEFAULT)
    """Number of the job's run: see `compare_runs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Names a snapshot in a node's shared memory, or some ranks' shards of one."""

    generation: int
    step: int
    world_size: int
    """World size of the snapshot; 1 for a complete one."""
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Failed):
    """Describes the first error of a node's workers: what the worker sent, and its rank.

    A document holds the end of the traceback only.
    """

    FIELDS_FIRST = ("rank", "blame", "message", "step", "final", "bad_step", "traceback")
    rank: int
    step: int = 0
    traceback: str = ""


Phase = Literal["other", "ready", "restored", "stalled", "alive", "stopped", "finished"]
"""`ready`: the workers of a node that is to come into the proposed generation wait for the others.
`stalled`: the workers make no step, and wait for others as far as their agent can see.
`other`: a word of a later release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Says what a node does in one generation; a later report replaces an earlier one."""

    incarnation: str
    phase: Phase
    store_port: int = 0
    """Fresh port for rank 0's store in the next world."""
    leaving: bool = False
    leave_reason: str = ""
    """Reason for which the node leaves, where it is known."""
    holdings: tuple[Holding, ...] = ()
    failure: Failure | None = None
    final_step: int | None = None
    world: str = ""
    """Token of the generation that the report is about; empty: not stated. There may be two
    generations of one number where the store has lost its data."""
    end_reason: str = ""
    """Phase `finished`: reason for which the script ended training early, by `session.stop`."""
    ran: bool = False
    """True if the workers have run for a while and never called `elasticzero.run`; the steps of a
    plain script are not counted."""
    run: int = field(default=UNSTATED, compare=False, metadata=OMIT_DEFAULT)
    """Number of the job's run: see `compare_runs`."""
    switched: str = field(default="", metadata=OMIT_DEFAULT)
    """Token of the proposal that this node's workers have followed inside their loops, though
    `world` does not name it yet; empty: they have followed none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Proposes the generation that the running one becomes inside of its loops: without some of
    its members, those that leave and those that are too many; or with others.

    There is one for each world at most. It is never taken back: `withdrawn` ends it.
    """

    generation: int
    """Number of the proposed generation."""
    token: str
    """Token of that generation."""
    of: str
    """Token of the world that it changes."""
    members: tuple[Member, ...]
    """Members that stay, in their order, and those that come in. The first one has a fresh port for
    rank 0's store."""
    leavers: tuple[str, ...]
    """Nodes that leave. A member that is in neither list gives up its place, and waits for
    another."""
    reason: str
    """Becomes the reason of the world."""
    withdrawn: str = ""
    """Reason for which it is dead; empty: it is not."""
    ready: bool = field(default=False, metadata=OMIT_DEFAULT)
    """True once the workers of all members that come in wait for those that train."""
    run: int = field(default=UNSTATED, compare=False, metadata=OMIT_DEFAULT)
    """Number of the job's run: see `compare_runs`."""

    def find(self, node: str, incarnation: str) -> int | None:
        """Returns the index of a registration among the members."""
        for index, member in enumerate(self.members):
            if (member.node, member.incarnation) == (node, incarnation):
                return index
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Names a registration that shall leave; the same node, registered anew, is another."""

    node: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Holds what operators ask of the job."""

    drain: tuple[Drain, ...] = ()
    """Registrations that shall leave at the next boundary."""
    nnodes: tuple[int, int] | None = None
    """Fewest and most nodes; None: the numbers that the agents were given."""
    stop: bool = False
    """True if the job shall end at the next boundary."""
    scaled: int = field(default=0, compare=False, metadata=OMIT_DEFAULT)
    """Number of times that operators have set `nnodes`; of two numbers the later request counts."""
    run: int = field(default=UNSTATED, compare=False, metadata=OMIT_DEFAULT)
    """Number of the job's run: see `compare_runs`."""

    def drains(self, member: Member) -> bool:
        """Returns whether this very registration shall leave."""
        return any((d.node, d.incarnation) == (member.node, member.incarnation) for d in self.drain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Says that the job is over, and how it ended."""

    outcome: Literal["finished", "failed", "other", "stopped"]
    """`stopped`: an operator stopped it, and it can go on later. `other`: a word of a later
    release."""
    step: int
    reason: str
    failure: Failure | None = None
    setbacks: tuple[FailureRecord, ...] = ()
    """First error of each generation, where the job has failed several times."""
    end_reason: str = field(default="", metadata=OMIT_DEFAULT)
    """Reason for which the script ended training early, by `session.stop`; empty: it did not, or a
    version without this field wrote this document."""
    launch_id: str = field(default="", metadata=OMIT_DEFAULT)
    """--launch-id of the node that wrote it; empty: it had none."""
    run: int = field(default=UNSTATED, compare=False, metadata=OMIT_DEFAULT)
    """Number of the job's run: see `compare_runs`."""


def to_bytes(document: Any) -> bytes:
    """Returns the stored form of a document; a world's members and sources are rows, not objects.

    The zones of a world are stored if all members have one. So each of its agents places replicas
    as the others do, though one may be of a release that knows no zones. A world that workers have
    entered inside their loops says so beside a tier that the release before can read: a node of it
    that comes waits for a place, and would leave otherwise.
    """
    if not isinstance(document, World):
        return _json(encode(document))
    resume = document.resume
    value = encode(replace(document, members=(), resume=replace(resume, sources=())))
    once, before_it = ("zone", "run", "release", "torch"), ("brought_step", "brought_shards")
    value["members"] = encode_rows(Member, document.members, without=(*once, *before_it))
    if resume.tier == "live":
        value["resume"]["tier"], value["inside"] = "ram", True
    if all(document.zones):
        value["zones"] = list(document.zones)
    value["resume"]["sources"] = encode_rows(Source, resume.sources)
    return _json(value)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def world_from_bytes(data: bytes) -> World:
    """Returns the world that the store holds as `data`; raises `RecordError` if it is none.

    Its members and sources are checked now, and made when they are asked for.
    """
    value = parse_json(data, "world")
    if not isinstance(value, dict) or not isinstance(value.get("resume"), dict):
        raise RecordError("world: an object with an object `resume` was expected")
    if value.pop("inside", None) is True:
        value["resume"] = {**value["resume"], "tier": "live"}
    rows = value.pop("members", None)
    zones = decode(tuple[str, ...], value.pop("zones", []), "world.zones")
    sources = decode_rows(Source, value["resume"].pop("sources", None), "world.resume.sources")
    world = decode(World, {**value, "members": []}, "world")
    run = world.run if world.proofs else UNSTATED
    count = len(rows) if isinstance(rows, list) else 0
    zones = (*zones[:count], *("",) * (count - len(zones)))
    rest = (zones, *((value,) * count for value in (run, world.release, world.torch, 0, 0)))
    members = decode_rows(Member, rows, "world.members", rest)
    return replace(world, members=members, resume=replace(world.resume, sources=sources))


def compare_runs(run: int, other: int) -> int:
    """Returns 1 where a run is later than the other, -1 where it is earlier, and 0 where they are
    the same or one of them is not stated.

    Whoever reads a document compares its run before anything else in it. A document of an earlier
    run counts as absent. A document of a later run ends the process that reads it.
    """
    if UNSTATED in (run, other):
        return 0
    return (run > other) - (run < other)


def outranks(world: World, other: World | None) -> bool:
    """Returns whether the one of two worlds counts that were both written because the store lost
    its data in between.

    The later run counts, then the higher generation, then the higher resume step, then the smaller
    token.
    """
    if other is None or world.token == other.token:
        return other is None
    runs = compare_runs(world.run, other.run)
    if runs:
        return runs > 0
    order, other_order = ((w.generation, w.resume.step) for w in (world, other))
    return order > other_order if order != other_order else world.token < other.token


def merged(before: Control, stored: Control) -> Control:
    """Returns what operators ask where the store has lost its data: what was known, and what the
    store has now.

    No request is ever withdrawn. Of two sizes the later one counts, for agents may know different
    ones; if it cannot be told, the one that was known.
    """
    last = stored if stored.scaled > before.scaled or before.nnodes is None else before
    drains = tuple(drain for drain in stored.drain if drain not in before.drain)
    return Control(
        drain=(*before.drain, *drains),
        nnodes=last.nnodes,
        stop=before.stop or stored.stop,
        scaled=last.scaled,
        run=max(before.run, stored.run),
    )
