"""The loop of an agent, around a store in memory and a node without processes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from elasticzero.errors import (
    CheckpointDamaged,
    ElasticZeroError,
    ExitCode,
    StorageError,
    StoreUnavailable,
    UserError,
)
from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.agent.core import (
    BACKOFF_S,
    MACHINE_TROUBLE_S,
    MAX_ERRORS,
    TURN_REST_S,
    AgentCore,
    StoreSide,
)
from elasticzero.launcher.agent.observer import ClusterObserver
from elasticzero.launcher.agent.store_writer import VERIFY_AGAIN_S, StoreWriter
from elasticzero.launcher.agent.subscriptions import Subscriptions
from elasticzero.launcher.http.host_probe import HostProbe
from elasticzero.launcher.protocol.actions import (
    Decision,
    PutReport,
    RaiseAlarm,
    SaveHeldSnapshot,
    Start,
)
from elasticzero.launcher.protocol.documents import (
    Alarm,
    Member,
    Proposal,
    Report,
    Run,
    World,
    to_bytes,
)
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import View, WorkerGroupState
from elasticzero.launcher.snapshots.checkpoint_probe import CheckpointProbe
from elasticzero.launcher.store.api import Condition, Lease
from elasticzero.launcher.store.decoding import document
from elasticzero.launcher.store.job_run import RUN, RunStore, stored_run
from elasticzero.launcher.store.membership import Membership, bound_socket
from elasticzero.launcher.store.watch_cache import ALARM, MEMBERS, WORLD, WatchCache, reports_of
from tests.support.memory_store import MemoryServer, MemoryStore
from tests.watching import DEADLINE_S


class FailingStore(MemoryStore):
    """Refuses the writes of worlds as long as it is told to."""

    refuses = False

    def write(
        self,
        puts: Mapping[str, bytes],
        *,
        deletes: Sequence[str] = (),
        conditions: Sequence[Condition] = (),
        lease: Lease | None = None,
    ) -> int | None:
        if self.refuses and WORLD in puts:
            raise StoreUnavailable("the write was refused")
        return super().write(puts, deletes=deletes, conditions=conditions, lease=lease)


class NodeWithoutProcesses:
    """Records what the loop asks of a node, in order."""

    worker_group = None

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.reason = ""
        """Why the agent ends."""
        self.fails_at: dict[str, Exception] = {}
        """Errors that the node's methods raise, by their names."""
        self.changed = threading.Event()
        self.now_s = time.monotonic()
        self.server = MemoryServer(time.monotonic)
        self.store = FailingStore(self.server)
        store = RunStore(self.store, stored_run(self.store))
        cache = WatchCache(store, self.changed.set, run=store.number)
        me = Member("a", "a-1", "127.0.0.1", 1, 2, 1, run=store.number)
        self.membership = Membership(store, me, 60, bound_socket())
        subscriptions = Subscriptions(store, cache, self.membership)
        look = CheckpointProbe(None, self.changed.set)
        cluster = ClusterObserver(
            store,
            cache,
            self.membership,
            subscriptions,
            self,
            look,
            HostProbe(print, lambda member: True),
        )
        self.side = StoreSide(
            cache=cache,
            membership=self.membership,
            subscriptions=subscriptions,
            observer=cluster,
            writer=StoreWriter(store, cache, self.membership, cluster),
            run=store,
        )
        policy = JobPolicy(min_nodes=1, max_nodes=1)
        self.core = AgentCore(policy, self, self, self.side, self, lambda: self.now_s)
        assert self.membership.register()
        self.core.begin()

    def cycles_until(self, asked: str) -> None:
        """Runs the loop, 10 ms of its clock a cycle, until the node is asked for this."""
        deadline_s = time.monotonic() + DEADLINE_S
        while asked not in self.asked:
            assert time.monotonic() < deadline_s, self.asked
            self.core.turn()
            self.now_s += 0.01
            self.changed.wait(0.01)
            self.changed.clear()

    def _fail(self, name: str) -> None:
        if name in self.fails_at:
            raise self.fails_at[name]

    def held(self) -> tuple[Any, ...]:
        self._fail("held")
        return ()

    def keep_only(self, keep: object) -> None:
        self.asked.append("keep")
        self._fail("keep_only")

    def poll(self, now_s: float) -> None:
        self._fail("poll")

    def wake(self) -> None:
        self.changed.set()

    def saving(self) -> bool:
        return False

    def unsealed(self) -> bool:
        return False

    def prepare_workers(self, world: World, proposal: Proposal) -> None:
        self.asked.append("prepare")

    def enter(self, world: World, now_s: float) -> None:
        self.asked.append("enter")

    def retire(self, world: World) -> None:
        self.asked.append("retire")
        self._fail("retire")

    def start(self, world: World, index: int, now_s: float) -> None:
        self.asked.append("start")
        self._fail("start")

    def save_held(self, held: SaveHeldSnapshot) -> None:
        self.asked.append("save")

    def time_spent(self, view: View, following: World) -> None:
        return

    def decided(self, view: View, decision: Decision) -> None:
        self._fail("decided")
        assert view.workers == WorkerGroupState()

    def store_failed(self, error: ElasticZeroError) -> None:
        self.asked.append("trouble")

    def turn_failed(self, error: Exception, failures: int) -> None:
        self.asked.append(f"failed {failures}: {error}")

    def stop_workers(self, reason: str) -> None:
        self.asked.append("stop workers")

    def exits(self, reason: str, *, failed: bool = False) -> None:
        self.asked.append("leave")
        self.reason = f"{'error: ' * failed}{reason}"


@pytest.fixture
def node() -> Iterator[NodeWithoutProcesses]:
    node = NodeWithoutProcesses()
    yield node
    node.membership.close()
    node.store.close()


def test_a_start_retires_workers_then_snapshots(node: NodeWithoutProcesses) -> None:
    """The workers of the older generation go before the memory that they may be writing to."""
    node.cycles_until("start")
    assert node.asked[:3] == ["retire", "keep", "start"]


def test_a_snapshot_is_saved_again_in_a_later_round(node: NodeWithoutProcesses) -> None:
    """A generation began from a snapshot while that was being saved, which ended the save. In the
    next round the node took it for told to save the snapshot, so that none did."""
    world = World(
        generation=2,
        token="t",
        members=(node.membership.me,),
        strategy="ddp",
        resume=Resume(tier="ram", step=57, generation=1),
        reason="",
    )
    view, _ = node.core.cycle()
    held = SaveHeldSnapshot(1, 57, 1, (0,))
    node.core._act(view, Decision((held,), "nobody can go on"), node.now_s)
    seen, _ = node.core.cycle()
    assert (node.core.saved_held, seen.saved_held, seen.saved_ranks) == (held, (1, 57), (0,))
    node.core._act(view, Decision((Start(world, 0),), "generation 2"), node.now_s)
    seen, _ = node.core.cycle()
    assert (node.core.saved_held, seen.saved_held, seen.saved_ranks) == (None, None, ())


def test_an_agent_of_a_thousand_makes_few_members(
    node: NodeWithoutProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a thousand agents did work for each of the others at every world."""
    others = [Member(f"n{i}", f"{i:08x}", "127.0.0.1", 1, 2, 1) for i in range(999)]
    world = World(
        generation=1,
        token="t",
        members=(*others[:500], node.membership.me, *others[500:]),
        strategy="ddp",
        resume=Resume(tier="fresh"),
        reason="",
    )
    node.server.write({WORLD: to_bytes(world)}, (), (), 0)
    node.cycles_until("start")
    node.core.turn()
    node.asked.clear()
    made: list[Member] = []
    create = Member.__init__

    def note(self: Member, *values: Any, **named: Any) -> None:
        made.append(self)
        create(self, *values, **named)

    monkeypatch.setattr(Member, "__init__", note)
    following = replace(world, generation=2, token="u")
    node.server.write({WORLD: to_bytes(following)}, (), (), 0)
    node.cycles_until("start")
    for _ in range(10):
        node.core.turn()
    assert len(made) < 50


def test_the_loop_rests_where_it_follows_many_nodes(node: NodeWithoutProcesses) -> None:
    """What comes meanwhile is taken in together; a turn does work for each of the nodes."""
    me = node.membership.me
    report = Report(incarnation="i", phase="alive")
    for count, rest_s in ((3, 0.0), (100, 0.0), (1000, 0.02), (100_000, TURN_REST_S)):
        names = [f"n{i}" for i in range(count)]
        for view in (
            View(me=me, members=dict.fromkeys(names, me)),
            View(me=me, reports=dict.fromkeys(names, report)),
        ):
            assert node.core.rest_s(view) == pytest.approx(rest_s)
    assert node.core.rest_s(View(me=me)) == 0.0, "another one turns at once"


def test_a_report_is_about_the_world_it_was_decided_from(node: NodeWithoutProcesses) -> None:
    """The store may lose its data, and tell of another world of the same number, meanwhile."""
    node.cycles_until("start")
    policy = JobPolicy(min_nodes=1, max_nodes=1)
    view = node.side.observer.view(WorkerGroupState(), False, node.now_s, policy)
    assert view.world is not None
    another = replace(view.world, token="another")
    assert node.store.write({WORLD: to_bytes(another)}) is not None
    node.side.cache.put(WORLD, node.store.read(WORLD))
    node.side.writer.write(PutReport(Report(incarnation="a-1", phase="alive")), view)
    key = f"{reports_of(1)}a"
    report = document(Report, node.store.read(key).entries[key].value)
    assert report.world == view.world.token


def test_a_failed_write_is_backed_off_from(node: NodeWithoutProcesses) -> None:
    """No action is done for BACKOFF_S, and the time of others to answer begins anew."""
    node.store.refuses = True
    node.cycles_until("trouble")
    failed_s = node.membership.outage_end_s
    assert node.now_s - failed_s == pytest.approx(0.01)
    while node.now_s < failed_s + BACKOFF_S - 0.02:
        node.core.cycle()
        node.now_s += 0.01
    assert node.asked == ["trouble"]
    node.store.refuses = False
    node.cycles_until("start")
    assert node.asked.count("trouble") == 1


def test_a_node_of_an_earlier_run_gives_way(node: NodeWithoutProcesses) -> None:
    """Its next write is refused: it starts nothing, and exits with a code of its own."""
    node.server.write({RUN: to_bytes(Run(number=2))}, (), (), 0)
    node.cycles_until("leave")
    assert node.core.exit_code is ExitCode.SUPERSEDED
    assert node.asked == ["leave"]
    assert WORLD not in node.store.read(WORLD).entries


def test_a_world_of_a_later_run_ends_a_node(node: NodeWithoutProcesses) -> None:
    """It reads that world before it writes anything."""
    following = World(
        generation=1,
        token="t",
        members=(Member("a", "a-1", "127.0.0.1", 1, 2, 1),),
        strategy="ddp",
        resume=Resume(tier="fresh"),
        reason="",
        run=2,
    )
    put = {WORLD: to_bytes(following), RUN: to_bytes(Run(number=2))}
    node.server.write(put, (), (), 0)
    node.cycles_until("leave")
    assert node.core.exit_code is ExitCode.SUPERSEDED
    assert node.asked == ["leave"], "it starts no workers, though the world names it"


def test_a_waiting_node_finds_that_its_registration_is_gone(node: NodeWithoutProcesses) -> None:
    """A backup of before it came was restored; its lease is older, and is still renewed. A job that
    needed the node waited for ever."""
    members = (Member("b", "b-1", "127.0.0.1", 1, 2, 1),)
    other = World(
        generation=1,
        token="t",
        members=members,
        strategy="ddp",
        resume=Resume(tier="fresh"),
        reason="",
    )
    node.store.write({WORLD: to_bytes(other), f"{MEMBERS}b": to_bytes(members[0])})
    while node.core.turn() is None or node.core._store.cache.world()[0] is None:
        assert node.changed.wait(DEADLINE_S)
    node.core.turn()
    node.server.write({}, [f"{MEMBERS}a"], (), 0)
    began_s = node.now_s
    while not node.store.read(f"{MEMBERS}a").entries:
        node.core.turn()
        node.now_s += 0.1
        assert node.now_s - began_s < 2 * VERIFY_AGAIN_S
    assert node.membership.lapses == 0


def test_no_alarm_is_raised_of_a_node_that_is_back(node: NodeWithoutProcesses) -> None:
    """The agent was suspended between its look at the registrations and the write."""
    node.cycles_until("start")
    seen, writer = node.core.turn(), node.side.writer
    assert seen is not None
    view, _ = seen
    lapse = RaiseAlarm(Alarm(node="a", kind="lapse", reason="the lease of b lapsed"), lost="b")
    alarm = f"{ALARM}1"
    node.store.write({f"{MEMBERS}b": to_bytes(view.me)})
    writer.write(lapse, view)
    assert alarm not in node.store.read(alarm).entries
    writer.reread(view, ends=False)
    writer.write(lapse, view)
    assert alarm in node.store.read(alarm).entries, "another agent of that name lost nothing"


def test_a_member_finds_that_its_registration_is_gone(node: NodeWithoutProcesses) -> None:
    """As above, and another agent wrote the same world anew at the same revision: the member did
    not see that etcd had lost its data. As long as it was missing no node could come."""
    node.cycles_until("start")
    node.server.write({}, [f"{MEMBERS}a"], (), 0)
    while node.core._store.cache.members():
        assert node.changed.wait(DEADLINE_S)
        node.changed.clear()
    began_s = node.now_s
    while not node.store.read(f"{MEMBERS}a").entries:
        node.core.turn()
        node.now_s += 0.1
        assert node.now_s - began_s < 2 * VERIFY_AGAIN_S
    assert node.membership.lapses == 0


def test_a_node_told_to_leave_exits_and_says_why(node: NodeWithoutProcesses) -> None:
    """It leaves before there is a world."""
    node.core.leave("SIGTERM")
    node.cycles_until("leave")
    assert node.core.exit_code is not None
    assert node.asked.count("leave") == 1


def test_a_node_leaves_where_the_world_is_odd(node: NodeWithoutProcesses) -> None:
    """It wrote the first world over what a later release had written there."""
    node.store.write({WORLD: b"not json"})
    node.cycles_until("leave")
    assert node.core.exit_code is ExitCode.LEFT
    assert node.core.notice is not None
    assert node.core.notice.reason == "the world in etcd cannot be read"
    assert node.store.read(WORLD).entries[WORLD].value == b"not json"


def test_a_node_leaves_where_the_run_is_odd(node: NodeWithoutProcesses) -> None:
    """It waited for ever to write what it had decided."""
    node.server.write({RUN: b"not json"}, (), (), 0)
    node.cycles_until("leave")
    assert node.core.exit_code is ExitCode.LEFT
    assert node.asked == ["leave"]
    assert node.core.notice is not None
    assert node.core.notice.reason == "the number of the job's run in etcd cannot be read"
    stored = node.store.read("").entries
    assert WORLD not in stored and stored[RUN].value == b"not json"


WORDS = ("resume.tier", "shard", "strategy", "redundancy")


@pytest.mark.parametrize("place", WORDS)
def test_a_node_leaves_where_the_world_has_a_later_word(
    place: str, node: NodeWithoutProcesses
) -> None:
    """The world names it, and its workers would fail by what they do not know."""
    following = World(
        generation=1,
        token="t",
        members=(node.membership.me,),
        strategy="ddp",
        resume=Resume(tier="fresh"),
        reason="",
    )
    value = json.loads(to_bytes(following))
    (value["resume"] if place == "resume.tier" else value)[place.rpartition(".")[2]] = "orbital"
    written = json.dumps(value).encode()
    node.server.write({WORLD: written}, (), (), 0)
    node.cycles_until("leave")
    assert node.core.exit_code is ExitCode.LEFT
    assert "start" not in node.asked
    assert node.store.read(WORLD).entries[WORLD].value == written


@pytest.mark.parametrize("key", ["done", "control", "alarm/0", "members/zz", "reports/0/zz"])
def test_an_odd_document_keeps_no_job_from_its_world(key: str, node: NodeWithoutProcesses) -> None:
    node.store.write({key: b"not json"})
    node.cycles_until("start")
    assert node.core.exit_code is None


RAISING = ("poll", "decided", "retire", "keep_only", "start")
"""Methods of the node that the loop calls before there are workers."""


@pytest.mark.parametrize("name", RAISING)
def test_an_unexpected_error_is_a_leave(node: NodeWithoutProcesses, name: str) -> None:
    """It killed the node at once, whatever raised it."""
    node.fails_at[name] = KeyError("generation")
    node.cycles_until("failed 1: 'generation'")
    assert node.core.exit_code is None
    assert node.core.notice is not None and "KeyError" in node.core.notice.reason
    assert "stop workers" not in node.asked
    node.fails_at.clear()
    asked = len(node.asked)
    while node.core.exit_code is None and len(node.asked) == asked:
        node.core.turn()  # it goes on: to leave, or to start what it had begun to start
        node.now_s += 0.01
    assert node.core.exit_code in (None, ExitCode.LEFT)


@pytest.mark.parametrize("name", ["poll", "decided"])
def test_a_loop_that_fails_again_stops_its_workers(node: NodeWithoutProcesses, name: str) -> None:
    node.fails_at[name] = RuntimeError("odd")
    node.cycles_until("leave")
    failed = [f"failed {count}: odd" for count in range(1, MAX_ERRORS + 1)]
    assert node.asked == [*failed, "stop workers", "leave"]
    assert node.core.exit_code == ExitCode.DEFECT


def test_too_many_open_files_may_pass(node: NodeWithoutProcesses) -> None:
    """EMFILE in the loop, as with many idle connections, killed the node."""
    node.fails_at["poll"] = OSError(24, "Too many open files")
    until_s = node.now_s + MACHINE_TROUBLE_S / 2
    while node.now_s < until_s:
        assert node.core.turn() is None
        node.now_s += 0.1
    assert set(node.asked) == {"failed 0: [Errno 24] Too many open files"}
    assert node.core.whole_s < until_s - MACHINE_TROUBLE_S / 3
    node.fails_at.clear()
    node.cycles_until("start")
    assert node.core.exit_code is None and node.core.notice is None


def test_trouble_of_the_machine_that_stays_ends_the_agent(node: NodeWithoutProcesses) -> None:
    node.fails_at["poll"] = OSError(24, "Too many open files")
    while node.core.exit_code is None:
        node.core.turn()
        node.now_s += 0.5
    assert node.asked[-2:] == ["stop workers", "leave"]


@pytest.mark.parametrize("name", RAISING)
def test_a_mistake_of_this_node_ends_it_and_not_the_job(
    node: NodeWithoutProcesses, name: str
) -> None:
    """It exited with 64, on which Kubernetes ends the whole Job."""
    node.fails_at[name] = UserError("another token is given here")
    node.cycles_until("leave")
    assert node.asked[-2:] == ["stop workers", "leave"]
    assert node.core.exit_code == ExitCode.DEFECT
    text = "this agent ends, and not the job: another token is given here"
    assert node.reason == f"error: {text}", "any --log-level shows it"


def test_an_operators_error_by_the_machine_may_pass(node: NodeWithoutProcesses) -> None:
    """What cannot be read in shared memory, for want of open files, ended the job with 64."""
    error = StorageError("cannot look at the snapshots in /dev/shm: Too many open files")
    error.__cause__ = OSError(24, "Too many open files")
    node.fails_at["poll"] = error
    assert node.core.turn() is None
    assert node.asked == [f"failed 0: {error}"]
    node.fails_at.clear()
    node.cycles_until("start")
    assert node.core.exit_code is None and node.core.notice is None


def test_an_operators_error_is_a_leave(node: NodeWithoutProcesses) -> None:
    """The job ended as failed, with 70."""
    node.fails_at["poll"] = CheckpointDamaged("a snapshot is cut off")
    node.cycles_until("failed 1: a snapshot is cut off")
    assert node.core.exit_code is None
    assert node.core.notice is not None and "CheckpointDamaged" in node.core.notice.reason
