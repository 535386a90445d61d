"""A run's number: who raises it, what it binds, and what an earlier run can still do."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from elasticzero.errors import RunEnded, StoreUnavailable
from elasticzero.launcher.protocol.documents import Alarm, Done, Member, Report, Run, to_bytes
from elasticzero.launcher.store.api import Condition, PrefixState
from elasticzero.launcher.store.job_run import (
    RUN,
    RunStore,
    begin_next_run,
    number_in,
    stored_run,
)
from elasticzero.launcher.store.watch_cache import ALARM, CONTROL, DONE, MEMBERS, REPORTS, WORLD
from tests.support.memory_store import MemoryServer, MemoryStore
from tests.unit.launcher.store.nodes import FOLLOWED, Node, stands, world

FINISHED = Done(outcome="finished", step=160, reason="finished after step 160", run=1)


def end(server: MemoryServer) -> Condition:
    """The job is done; returns the condition that this end is the one that was read."""
    store = MemoryStore(server)
    store.write({DONE: to_bytes(FINISHED)})
    return Condition(key=DONE, mod_revision=store.read(DONE).entries[DONE].mod_revision)


def test_a_job_without_the_key_is_in_its_first_run(server: MemoryServer) -> None:
    store = MemoryStore(server)
    assert stored_run(store).number == 1
    store.write({RUN: to_bytes(Run(number=7))})
    assert stored_run(store).number == 7


def test_a_restart_raises_the_run_and_deletes_the_one_before(server: MemoryServer) -> None:
    store, over = MemoryStore(server), end(server)
    store.write({WORLD: b"1", CONTROL: b"2", f"{ALARM}3": b"3", f"{REPORTS}3/a": b"4"})
    store.write({"token": b"5"})
    assert begin_next_run(store, over)
    assert stands(server) == {RUN: {"number": 2}, "token": 5}


def test_two_restarts_at_once_agree_on_one_run(server: MemoryServer) -> None:
    """Also where one of them is a write that was sent long ago, and is done now."""
    over = end(server)
    first, second = MemoryStore(server), MemoryStore(server)
    assert begin_next_run(first, over)
    assert not begin_next_run(second, over)
    assert not begin_next_run(first, over), "the answer was lost, and it is tried again"
    assert stored_run(second).number == 2
    assert begin_next_run(first, end(server))
    assert not begin_next_run(second, over)
    assert stored_run(second).number == 3


def test_a_key_that_cannot_be_read_lets_nothing_be_written(server: MemoryServer) -> None:
    lines: list[str] = []
    store = RunStore(MemoryStore(server), stored_run(MemoryStore(server)), lines.append)
    server.write({RUN: b"not json"}, (), (), 0)
    for key in (WORLD, DONE):
        assert store.write({key: b"1"}) is None
        assert key not in store.read("").entries
    assert store.unreadable
    (line,) = lines
    assert line.startswith("run cannot be read (run: no JSON")
    assert line.endswith("no world and no end is written, and this node leaves with its state")
    with pytest.raises(StoreUnavailable, match="the key `run` of the job in etcd is not readable"):
        stored_run(store)


def test_a_node_hands_over_its_state_while_the_key_cannot_be_read(server: MemoryServer) -> None:
    """By reports and alarms, which no agent of a later run takes for its own; none of these could
    be written, and no node left."""
    store = RunStore(MemoryStore(server), stored_run(MemoryStore(server)))
    server.write({RUN: b"not json"}, (), (), 0)
    for key in (f"{ALARM}1", f"{REPORTS}1/a", f"{MEMBERS}a"):
        assert store.write({key: b"1"}), key
    assert store.unreadable
    server.write({RUN: b"still not json"}, (), (), 0)
    assert store.write({f"{REPORTS}1/a": b"2"})
    server.write({RUN: to_bytes(Run(number=1))}, (), (), 0)
    assert store.write({WORLD: b"1"}), "the key holds a number again"
    assert not store.unreadable
    server.write({RUN: to_bytes(Run(number=2))}, (), (), 0)
    with pytest.raises(RunEnded):
        store.write({f"{REPORTS}1/a": b"3"})


def test_no_world_is_written_while_the_key_changes_from_one_odd_value_to_another(
    server: MemoryServer,
) -> None:
    class Changing(MemoryStore):
        def read(self, prefix: str, *, limit: int = 0) -> PrefixState:
            state = super().read(prefix, limit=limit)
            if prefix == RUN:
                server.write({RUN: b"odd %d" % state.revision}, (), (), 0)
            return state

    server.write({RUN: to_bytes(Run(number=1))}, (), (), 0)
    store = RunStore(Changing(server), stored_run(MemoryStore(server)))
    server.write({RUN: b"odd"}, (), (), 0)
    assert store.write({WORLD: b"1"}) is None
    assert WORLD not in MemoryStore(server).read("").entries


def test_a_refused_write_of_the_present_run_is_no_end(server: MemoryServer) -> None:
    """Another condition does not hold."""
    store = RunStore(MemoryStore(server), stored_run(MemoryStore(server)))
    assert store.write({WORLD: b"1"}, conditions=[Condition(key=WORLD, mod_revision=0)])
    assert store.write({WORLD: b"2"}, conditions=[Condition(key=WORLD, mod_revision=0)]) is None
    server.write({RUN: to_bytes(Run(number=1))}, (), (), 0)
    assert store.write({WORLD: b"3"}), "the key was written, and says the same"


def test_the_highest_run_is_written_anew_after_a_loss(
    server: MemoryServer, node: Callable[..., Node]
) -> None:
    """The backup is of the run before: it has that run's end, and an alarm of the same number."""
    over = end(server)
    server.write(
        {f"{ALARM}4": to_bytes(Alarm(node="z", kind="leave", reason="z", run=1))}, (), (), 0
    )
    backup = server.backup()
    begin_next_run(MemoryStore(server), over)
    a, b = node("a"), node("b")
    assert a.membership.me.run == 2
    a.store.write({WORLD: to_bytes(world(4, "a", "b", run=2))})
    for one in (a, b):
        one.look()
    server.restore(backup, cluster=2)
    newcomer = node("c")
    assert newcomer.membership.me.run == 1
    for one in (a, b):
        one.turns()
    documents = stands(server)
    assert documents[RUN] == {"number": 2}
    assert documents[WORLD]["run"] == 2 and documents[WORLD]["generation"] == 4
    assert DONE not in documents and f"{ALARM}4" not in documents
    assert any("the number of the job's run" in text for text in a.messages)
    with pytest.raises(RunEnded):
        newcomer.turns()


def test_the_end_of_an_earlier_run_is_not_written_anew(
    server: MemoryServer, node: Callable[..., Node]
) -> None:
    """The store loses its data twice: the backup that it holds in between is of the run before."""
    over, backup = end(server), server.backup()
    begin_next_run(MemoryStore(server), over)
    a = node("a")
    a.store.write({WORLD: to_bytes(world(4, "a", run=2))})
    a.look()
    server.restore(backup, cluster=2)
    a.look()
    server.restore(None, cluster=3)
    a.turns()
    documents = stands(server)
    assert documents[RUN] == {"number": 2} and documents[WORLD]["generation"] == 4
    assert DONE not in documents


def test_an_emptied_store_takes_the_run_anew(
    server: MemoryServer, node: Callable[..., Node]
) -> None:
    begin_next_run(MemoryStore(server), end(server))
    a = node("a")
    server.restore(None, cluster=3)
    a.turns()
    assert stands(server)[RUN] == {"number": 2}
    assert stands(server)["members/a"]["run"] == 2


def test_documents_of_an_earlier_run_count_as_absent(
    server: MemoryServer, node: Callable[..., Node]
) -> None:
    begin_next_run(MemoryStore(server), end(server))
    a = node("a")
    old = Member("old", "old", "localhost", 1, 2, 1, run=1)
    unstated = Member("before", "before", "localhost", 1, 2, 1)
    report = Report(incarnation="old", phase="alive", run=1)
    for key, document in {
        f"{MEMBERS}old": old,
        f"{MEMBERS}before": unstated,
        f"{REPORTS}1/old": report,
        WORLD: world(9, "old", run=1),
        DONE: FINISHED,
        f"{ALARM}1": Alarm(node="old", kind="leave", reason="", run=1),
    }.items():
        server.write({key: to_bytes(document)}, (), (), 0)
    a.look(*FOLLOWED, MEMBERS, f"{REPORTS}1/")
    assert set(a.observer.members() or {}) == {"a", "before"}, "a release without runs is present"
    assert not a.observer.reports(1)
    assert a.observer.world()[0] is None
    assert a.observer.done() is None and a.observer.alarm(1) is None
    assert a.observer.later_run == 0


# A generator of orders: what becomes of the job, and what the node that was away does, in any
# order that can be.


@dataclass
class Story:
    """A job of node b, which is away at some time, while the job ends and is begun again."""

    server: MemoryServer
    b: Node
    ended: bool = False
    """True once b was told that its run is over."""
    began_at: int | None = None
    """Revision at which the second run began."""
    history: list[str] = field(default_factory=list)

    def lapse(self) -> None:
        """The leases of all nodes run out."""
        for lease in range(1, 20):
            self.server.revoke(lease)

    def finish(self) -> None:
        """Node a ends the job of the first run."""
        MemoryStore(self.server).write({DONE: to_bytes(FINISHED)})

    def begin_again(self) -> None:
        store = MemoryStore(self.server)
        done = store.read(DONE).entries[DONE]
        begin_next_run(store, Condition(key=DONE, mod_revision=done.mod_revision))
        self.began_at = store.read(RUN).revision

    def write_world(self) -> None:
        """The new run begins its first generation."""
        following = to_bytes(world(1, "a", token="second", run=2))
        MemoryStore(self.server).write({WORLD: following})

    def raise_alarm(self) -> None:
        alarm = Alarm(node="a", kind="failure", reason="", run=2)
        MemoryStore(self.server).write({f"{ALARM}1": to_bytes(alarm)})

    def finish_again(self) -> None:
        done = Done(outcome="finished", step=600, reason="finished after step 600", run=2)
        MemoryStore(self.server).write({DONE: to_bytes(done)})

    # What b does.

    def notice_lease(self) -> None:
        self.b.lose_lease()

    def take_turn(self) -> None:
        self.b.turn()

    def report(self) -> None:
        report = Report(incarnation="b", phase="alive", run=1)
        self.b.store.write({f"{REPORTS}8/b": to_bytes(report)})

    def alarm(self) -> None:
        alarm = Alarm(node="b", kind="failure", reason="lost a peer", run=1)
        key = f"{ALARM}8"
        self.b.store.write({key: to_bytes(alarm)}, conditions=[Condition(key=key, mod_revision=0)])

    def end_generation(self) -> None:
        """It writes the next world over what it has read, or the end."""
        entry = self.b.store.read(WORLD).entries.get(WORLD)
        basis = Condition(key=WORLD, mod_revision=entry.mod_revision if entry is not None else 0)
        put = {WORLD: to_bytes(world(9, "b", run=1)), DONE: to_bytes(FINISHED)}
        conditions = [basis, Condition(key=DONE, mod_revision=0)]
        self.b.store.write(put, conditions=conditions)

    def check(self) -> None:
        """Nothing of the first run was written since the second began."""
        if self.began_at is None:
            return
        for entry in MemoryStore(self.server).read("").entries.values():
            young = entry.mod_revision > self.began_at
            assert not (young and b'"run":1' in entry.value), (self.history, entry)
        assert stored_run(MemoryStore(self.server)).number == 2, self.history

    def play(self, name: str) -> None:
        self.history.append(name)
        getattr(self, name)()
        self.check()


JOB = ("lapse", "finish", "begin_again", "write_world", "raise_alarm", "finish_again")
"""What becomes of the job, in this order."""
AWAY = ("notice_lease", "take_turn", "take_turn", "report", "alarm", "end_generation")
"""What b does, in any order, besides what its watches tell."""
LOOKS = tuple(f"look {prefix}" for prefix in (*FOLLOWED, WORLD, DONE))


def play_order(seed: int, *, fenced: bool = True) -> Story:
    """Plays one order of events, and checks after each of them."""
    draw = random.Random(seed)
    server = MemoryServer(lambda: 0.0)
    b = Node(server, "b", fenced=fenced)
    b.store.write({WORLD: to_bytes(world(8, "a", "b", run=1))})
    b.look()
    story = Story(server, b)
    steps = draw.sample([*AWAY, *LOOKS], k=len(AWAY) + len(LOOKS))
    for _ in JOB:
        steps.insert(draw.randint(0, len(steps)), "job")
    job = iter(JOB)
    for step in steps:
        try:
            if step == "job":
                story.play(next(job))
            elif step.startswith("look "):
                story.history.append(step)
                b.look(step.removeprefix("look "))
            elif not story.ended:
                story.play(step)
        except RunEnded:
            assert story.began_at is not None, story.history
            story.ended = True
            story.check()
    for _ in range(4):
        if not story.ended and not b.observer.later_run:
            try:
                b.lose_lease()
                story.play("take_turn")
            except RunEnded:
                story.ended = True
    assert story.ended or b.observer.later_run == 2, story.history
    assert not b.messages, (story.history, b.messages)
    b.store.close()
    return story


def test_in_no_order_does_an_earlier_run_write() -> None:
    """Of what becomes of the job, and what a node of its first run does and is told."""
    ended = sum(play_order(seed).ended for seed in range(600))
    assert ended > 300, "most orders let the node write after the second run has begun"


def test_orders_without_the_condition_on_the_run_are_caught() -> None:
    """The generator shows what the condition is for."""
    caught = 0
    for seed in range(60):
        try:
            play_order(seed, fenced=False)
        except AssertionError:
            caught += 1
    assert caught > 10


def test_an_entry_holds_a_number(server: MemoryServer) -> None:
    store = MemoryStore(server)
    assert number_in(None) == 1
    store.write({RUN: b'{"number":"2"}'})
    with pytest.raises(StoreUnavailable):
        number_in(store.read(RUN).entries[RUN])
