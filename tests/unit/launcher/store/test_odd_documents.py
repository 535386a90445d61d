"""Documents in etcd that nobody of this release wrote: each is read, or refused by its key, and
ends nothing.

Each example is one agent's view of a job, one command's, and a decision from it.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from elasticzero.errors import OperatorError, StoreUnavailable, UserError
from elasticzero.launcher.agent.observer import ClusterObserver
from elasticzero.launcher.agent.store_writer import StoreWriter
from elasticzero.launcher.agent.subscriptions import Subscriptions
from elasticzero.launcher.cli.job_access import OperatorCredentials
from elasticzero.launcher.cli.status import read_stored_job, status_text
from elasticzero.launcher.observability.job_status import collect_status, pending_drains
from elasticzero.launcher.protocol.actions import WriteDone, WriteWorld
from elasticzero.launcher.protocol.decide import decide
from elasticzero.launcher.protocol.documents import (
    Alarm,
    Control,
    Done,
    Member,
    Proposal,
    Report,
    Run,
    World,
    to_bytes,
)
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import GroupStage, WorkerGroupState
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.snapshots.checkpoint_probe import CheckpointState
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.decoding import document
from elasticzero.launcher.store.job_run import RUN, stored_run
from elasticzero.launcher.store.job_token import KEY as TOKEN
from elasticzero.launcher.store.job_token import agree_on_token
from elasticzero.launcher.store.membership import Membership
from elasticzero.launcher.store.watch_cache import (
    ALARM,
    CONTROL,
    DONE,
    MEMBERS,
    NEXT,
    REPORTS,
    WORLD,
    WatchCache,
    reports_of,
)
from elasticzero.serialization import RecordError
from tests.fixtures import FOLDER
from tests.support.memory_store import MemoryServer, MemoryStore
from tests.support.mutations import mutated, with_odd_values

JOBS: dict[str, Any] = json.loads((FOLDER / "etcd.json").read_text())
POLICY = JobPolicy(min_nodes=1, max_nodes=4)
NOW_S = 1000.0
GENERATION = 1
KINDS: Mapping[str, type[Any]] = {
    f"{MEMBERS}node-0": Member,
    WORLD: World,
    f"{ALARM}{GENERATION}": Alarm,
    f"{reports_of(GENERATION)}node-0": Report,
    CONTROL: Control,
    DONE: Done,
    NEXT: Proposal,
}


def _job() -> dict[str, bytes]:
    """Returns the documents of a job as a release before wrote them, by key: one that trains, was
    asked to leave, has an alarm and an end."""
    job = JOBS["stopped"]
    start = len(job_prefix("stopped"))
    first: dict[str, bytes] = {}
    for key, value in job["written"]:
        first.setdefault(key[start:], value.encode())
    present = {key[start:]: value.encode() for key, value in job["present"].items()}
    world = document(World, first[WORLD])
    proposal = Proposal(
        generation=GENERATION + 1,
        token="next",
        of=world.token,
        members=tuple(world.members[1:]),
        leavers=(world.nodes[0],),
        reason=f"{world.nodes[0]} leaves",
    )
    return first | present | {NEXT: to_bytes(proposal)}


JOB = _job()
TEXTS = tuple(JOB.values())
ROUND = {key: value for key, value in JOB.items() if key != DONE}
LIVE = {key: value for key, value in JOB.items() if key not in (DONE, f"{ALARM}{GENERATION}")}


class Probe:
    """A checkpoint directory that holds nothing."""

    possible = True

    def invalidate(self) -> None:
        return

    def poll(self, bad: Mapping[int, str]) -> CheckpointState:
        return CheckpointState()


class Nothing:
    """A node without snapshots, a port, and a network in which each agent answers."""

    def held(self) -> Sequence[Any]:
        return ()

    def refusing(self, addresses: Mapping[str, str]) -> Sequence[str]:
        return ()

    def unanswered_since(self, members: Mapping[str, Member], now_s: float) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        return


class Node:
    """The agent of node-0, which sees what a store holds and writes what it decides."""

    def __init__(self, documents: Mapping[str, bytes]) -> None:
        self.lines: list[str] = []
        self.store = MemoryStore(MemoryServer(lambda: 0.0))
        for key, value in documents.items():
            self.store.write({key: value})
        me = document(Member, JOB[f"{MEMBERS}node-0"])
        port: Any = Nothing()
        self.membership = Membership(self.store, me, 5, port)
        self.cache = WatchCache(self.store, lambda: None, log_line=self.lines.append)
        self.cluster = ClusterObserver(
            self.store,
            self.cache,
            self.membership,
            Subscriptions(self.store, self.cache, self.membership),
            Nothing(),
            Probe(),
            Nothing(),
        )
        self.writer = StoreWriter(self.store, self.cache, self.membership, self.cluster)

    def look(self) -> None:
        """Takes in what the store holds now."""
        for prefix in (WORLD, CONTROL, DONE, ALARM, MEMBERS, NEXT, reports_of(GENERATION)):
            self.cache.put(prefix, self.store.read(prefix))

    def turn(self, *, leaving: bool = False, training: bool = True) -> None:
        """Observes, decides, and writes a world or an end that is decided."""
        self.look()
        workers = WorkerGroupState()
        if training:
            world, _ = self.cache.world()
            token = world.token if world is not None else ""
            stage = GroupStage.RESTORED
            workers = WorkerGroupState(generation=1, token=token, running=1, stage=stage)
        view = self.cluster.view(workers, leaving, NOW_S, POLICY)
        decision = decide(view, NOW_S, POLICY)
        for action in decision.actions:
            if isinstance(action, (WriteWorld, WriteDone)):
                with suppress(StoreUnavailable):  # its registration is read first
                    self.writer.end_generation(action, view, self.cache.get(WORLD))

    def close(self) -> None:
        self.store.close()


def read_by_a_command(store: MemoryStore) -> None:
    """Reads the job as `elasticzero status` does; it may refuse in one sentence."""
    try:
        job, phases, _ = read_stored_job(store, "stopped", OperatorCredentials())
    except (UserError, OperatorError) as error:
        assert str(error).isprintable() or "\n" not in str(error)
        return
    status_text(collect_status(job, phases, {}))
    pending_drains(job)


def examine(key: str, data: bytes) -> None:
    """Has agents and a command meet a document at a key of a job."""
    for documents in (LIVE | {key: data}, ROUND | {key: data}, JOB | {key: data}):
        node = Node(documents)
        try:
            for leaving in (False, True):
                node.turn(leaving=leaving)
                node.turn(leaving=leaving, training=False)
            read_by_a_command(node.store)
            assert len(node.lines) <= 1, node.lines
            assert all(line.startswith(key) and "\n" not in line for line in node.lines)
        finally:
            node.close()
    kind = KINDS[key]
    try:
        read: Any = document(kind, data)
    except RecordError:
        return
    assert document(kind, to_bytes(read)) == read or kind is World  # some have a zone
    use(read)


def use(read: Any) -> None:
    """Does with a document what agents and workers do only later."""
    match read:
        case Proposal():
            for member in read.members:
                use(member)
                assert read.find(member.node, member.incarnation) is not None
        case Member():
            read.host.encode("idna")
            struct.pack("!HH", read.http_port, read.store_port)
            assert len(range(read.nproc)) > 0
        case World():
            assert sum(len(read.ranks(index)) for index in range(len(read.members))) > 0
            for member in read.members:
                use(member)
                assert read.names(member)
        case Control(nnodes=(least, most)):
            assert 0 < least <= most
        case Report():
            assert all(len(range(holding.world_size)) > 0 for holding in read.holdings)
        case _:
            pass


def fuzzed(examples: int) -> settings:
    silent = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, deadline=None, suppress_health_check=silent)


def mutations(key: str) -> st.SearchStrategy[bytes]:
    return mutated(JOB[key], TEXTS) | with_odd_values(JOB[key])


def test_every_kind_of_document_is_fuzzed() -> None:
    assert {re.split(r"/", key)[0] for key in JOB} == {
        re.split(r"/", key)[0] for key in (*KINDS, TOKEN)
    }
    for key, kind in KINDS.items():
        assert document(kind, JOB[key])


@pytest.mark.parametrize("key", KINDS)
@fuzzed(150)
@given(st.data())
def test_a_changed_document_ends_nothing(key: str, data: st.DataObject) -> None:
    examine(key, data.draw(mutations(key)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("key", KINDS)
@fuzzed(2000)
@given(st.data())
def test_2000_changed_documents_end_nothing(key: str, data: st.DataObject) -> None:
    examine(key, data.draw(mutations(key)))


@pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_changed_record_of_the_token_is_refused_by_name(examples: int) -> None:
    """It is the password of what agents serve: no node starts with one that it cannot read."""

    @fuzzed(examples)
    @given(mutated(JOB[TOKEN], TEXTS) | with_odd_values(JOB[TOKEN]))
    @example(b"not json")
    def check(data: bytes) -> None:
        store = MemoryStore(MemoryServer(lambda: 0.0))
        store.write({TOKEN: data})
        for node_token in (None, Secret("given-by-the-operator")):
            try:
                agree_on_token(store, node_token)
            except UserError as error:
                assert "`token`" in str(error) or "token" in str(error)
        store.close()

    check()


@pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_changed_number_of_the_run_is_refused_by_name(examples: int) -> None:
    """Nothing is written before the store holds a number again."""
    run = to_bytes(Run(number=3))

    @fuzzed(examples)
    @given(mutated(run, TEXTS) | with_odd_values(run))
    @example(b"not json")
    @example(b"[" * 100_000)
    def check(data: bytes) -> None:
        store = MemoryStore(MemoryServer(lambda: 0.0))
        store.write({RUN: data})
        try:
            assert isinstance(stored_run(store).number, int)
        except StoreUnavailable as error:
            assert "the key `run` of the job in etcd is not readable" in str(error)
        store.close()

    check()


NOISE = (b"", b"not json", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'"' + b"a" * 99999)


@pytest.mark.parametrize("data", NOISE, ids=range(len(NOISE)))
@pytest.mark.parametrize("key", KINDS)
def test_noise_at_every_key(key: str, data: bytes) -> None:
    examine(key, data)


@pytest.mark.parametrize("kind", [Member, Alarm, Report, Control, Done, World, Proposal])
def test_a_field_of_a_later_release_is_ignored(kind: type[Any]) -> None:
    """So a rolling upgrade ends nothing."""
    key = next(key for key in KINDS if KINDS[key] is kind)
    value = json.loads(JOB[key]) | {"run": 2, "later": {"x": [1]}}
    assert document(kind, json.dumps(value).encode()) == document(kind, JOB[key])


@pytest.mark.parametrize(("kind", "field"), [(Alarm, "kind"), (Report, "phase"), (Done, "outcome")])
def test_a_word_of_a_later_release_is_other(kind: type[Any], field: str) -> None:
    key = next(key for key in KINDS if KINDS[key] is kind)
    data = json.dumps(json.loads(JOB[key]) | {field: "suspended"}).encode()
    assert getattr(document(kind, data), field) == "other"
    examine(key, data)


WORDS = ("resume.tier", "shard", "strategy", "redundancy")


def with_word(place: str) -> bytes:
    """A world with a word of a later release."""
    value = json.loads(JOB[WORLD])
    (value["resume"] if place == "resume.tier" else value)[place.rpartition(".")[2]] = "orbital"
    return json.dumps(value).encode()


@pytest.mark.parametrize("place", WORDS)
def test_a_world_with_a_word_of_a_later_release(place: str, node: Node) -> None:
    """Agents leave with the state of the world before; commands show it as it is."""
    node.turn()
    before, _ = node.cache.world()
    data = with_word(place)
    node.store.write({WORLD: data})
    node.turn()
    assert node.cache.world()[0] == before and node.cache.unreadable(World) is not None
    (line,) = node.lines
    assert line.startswith(f"world cannot be read (world.{place}: a word of this release")
    assert node.store.read(WORLD).entries[WORLD].value == data
    read_by_a_command(node.store)
    job, _, _ = read_stored_job(node.store, "stopped", OperatorCredentials())
    assert job.world is not None and job.world.generation == GENERATION
    examine(WORLD, data)


@pytest.mark.parametrize("place", WORDS[:2])
def test_a_word_of_a_later_release_in_a_world_is_other(place: str) -> None:
    world = document(World, with_word(place))
    assert (world.resume.tier if place == "resume.tier" else world.shard) == "other"


@pytest.mark.parametrize("number", [0, -1])
def test_the_number_of_a_run_is_one_or_more(number: int) -> None:
    """0 is what a document has that states none."""
    with pytest.raises(RecordError, match=f"run.number: 1 or more was expected, not {number}"):
        document(Run, to_bytes(Run(number=number)))


def test_a_blame_of_a_later_release_explains_little() -> None:
    key = f"{reports_of(GENERATION)}node-0"
    failure = {"rank": 0, "blame": "cosmic rays", "message": "m"}
    data = json.dumps(json.loads(JOB[key]) | {"failure": failure}).encode()
    read = document(Report, data)
    assert read.failure is not None and read.failure.blame == "other"
    examine(key, data)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node(LIVE)
    yield made
    made.close()


def test_an_odd_member_is_absent_and_named_once(node: Node) -> None:
    node.store.write({f"{MEMBERS}zz": b"not json"})
    for _ in range(3):
        node.turn()
        node.store.write({f"{MEMBERS}zz": b"still not json"})
    members = node.cache.members()
    assert members is not None and set(members) == {"node-0", "node-1"}
    (line,) = node.lines
    assert line.startswith("members/zz cannot be read (member: no JSON:")
    assert "it counts as absent" in line


def test_a_member_at_the_key_of_another_is_absent(node: Node) -> None:
    node.store.write({f"{MEMBERS}zz": JOB[f"{MEMBERS}node-1"]})
    node.look()
    members = node.cache.members()
    assert members is not None and set(members) == {"node-0", "node-1"}
    assert node.lines and node.lines[0].startswith("members/zz cannot be read (member.node:")


def test_a_member_in_a_folder_of_its_own_is_absent(node: Node) -> None:
    """It counted as a second registration of the node: each leader failed that made a world."""
    forged = json.loads(JOB[f"{MEMBERS}node-1"]) | {"incarnation": "another"}
    node.store.write({f"{MEMBERS}x/node-1": json.dumps(forged).encode()})
    node.look()
    members = node.cache.members()
    assert members is not None and set(members) == {"node-0", "node-1"}
    assert node.lines and node.lines[0].startswith("members/x/node-1 cannot be read (member.node:")


@pytest.mark.parametrize(
    ("key", "field"),
    [
        (f"{MEMBERS}node-0", "zone"),
        (f"{reports_of(GENERATION)}node-0", "leave_reason"),
        (f"{ALARM}{GENERATION}", "reason"),
    ],
)
def test_a_document_too_large_for_a_world_is_none(key: str, field: str, node: Node) -> None:
    """A world repeats these texts, and etcd takes no larger one: none was ever written."""
    data = json.dumps(json.loads(JOB[key]) | {field: "x" * 1_400_000}).encode()
    with pytest.raises(RecordError, match="bytes were expected, not 14"):
        document(KINDS[key], data)
    node.store.write({key: data})
    node.turn()
    world, _ = node.cache.world()
    assert world is not None and len(to_bytes(world)) < 10_000
    examine(key, data)


def test_an_odd_alarm_is_an_alarm(node: Node) -> None:
    node.store.write({f"{ALARM}{GENERATION}": b"not json"})
    node.look()
    alarm = node.cache.alarm(GENERATION)
    assert alarm is not None and alarm.kind == "other"
    assert node.cache.alarm(GENERATION + 1) is None


def test_an_odd_world_leaves_the_last_one_and_is_said(node: Node) -> None:
    node.turn()
    before, _ = node.cache.world()
    assert before is not None and node.cache.unreadable(World) is None
    revision = node.store.write({WORLD: b"not json"})
    node.look()
    assert node.cache.world() == (before, revision)
    assert node.cache.unreadable(World) is not None
    assert not node.cache.retained, "it is no loss of data"
    node.store.write({}, deletes=[WORLD])
    node.look()
    assert node.cache.world() == (before, 0), "the node still hands over that world's state"
    following = replace(before, generation=before.generation + 1, token="next")
    node.store.write({WORLD: to_bytes(following)})
    node.look()
    assert node.cache.world()[0] == following


def test_no_world_is_written_over_an_odd_one(node: Node) -> None:
    node.store.write({WORLD: b"not json"})
    node.look()
    action = WriteWorld(document(World, JOB[WORLD]))
    view = node.cluster.view(WorkerGroupState(), False, NOW_S, POLICY)
    node.writer.end_generation(action, view, node.cache.get(WORLD))
    assert node.store.read(WORLD).entries[WORLD].value == b"not json"


def test_an_odd_world_in_a_restored_store_is_no_world(node: Node) -> None:
    """The watch's thread compares worlds where the data may have shrunk; it went deaf."""
    node.look()
    first = node.store.read(WORLD)
    odd = replace(first.entries[WORLD], value=b"not json", mod_revision=first.revision + 1)
    state = replace(first, revision=first.revision + 1, entries={WORLD: odd})
    node.cache.put(WORLD, state)
    again = replace(first.entries[WORLD], mod_revision=first.revision + 2)
    node.cache.put(WORLD, replace(state, revision=first.revision + 2, entries={WORLD: again}))
    node.cache.put(WORLD, replace(state, revision=1, history=1))
    retained = node.cache.retained[WORLD]
    assert document(World, retained.value) == document(World, JOB[WORLD])


def test_an_odd_end_ends_nothing_and_is_written_over(node: Node) -> None:
    node.store.write({DONE: b"not json"})
    node.turn()
    assert node.cache.done() is None
    entry = node.cache.unreadable(Done)
    assert entry is not None and entry.value == b"not json"
    (line,) = node.lines
    assert "no new agent of it starts" in line
    assert node.membership.register()
    view = node.cluster.view(WorkerGroupState(), False, NOW_S, POLICY)
    done = Done(outcome="finished", step=9, reason="all steps")
    node.writer.end_generation(WriteDone(done), view, node.cache.get(WORLD))
    assert node.cache.done() == done


def test_so_many_odd_documents_are_named_and_no_more(node: Node) -> None:
    node.store.write({f"{MEMBERS}odd-{i}": b"" for i in range(100)})
    node.turn()
    assert len(node.lines) == 32
    assert REPORTS not in "".join(node.lines)
