"""Who looks for the oldest registration, and who sees it go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.agent.observer import Answers, ClusterObserver, Outages, StorageProbe
from elasticzero.launcher.agent.subscriptions import Subscriptions
from elasticzero.launcher.http.host_probe import HostProbe
from elasticzero.launcher.protocol.documents import (
    Member,
    NodeStrikes,
    Phase,
    Report,
    World,
    to_bytes,
)
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import View, WorkerGroupState
from elasticzero.launcher.snapshots.checkpoint_probe import CheckpointProbe, CheckpointState
from elasticzero.launcher.store.api import PrefixState
from elasticzero.launcher.store.membership import Membership, bound_socket
from elasticzero.launcher.store.watch_cache import MEMBERS, WORLD, WatchCache, reports_of
from tests.support.memory_store import MemoryServer, MemoryStore
from tests.watching import DEADLINE_S

POLICY = JobPolicy(min_nodes=9, max_nodes=9)


class CountingStore(MemoryStore):
    """Counts the looks at all registrations."""

    looks = 0

    def read(self, prefix: str, *, limit: int = 0) -> PrefixState:
        self.looks += prefix == MEMBERS
        return super().read(prefix, limit=limit)


class Node:
    """What an agent sees with; each look takes place seconds after the one before."""

    def __init__(
        self, name: str, server: MemoryServer, storage: StorageProbe | None = None
    ) -> None:
        self.store = CountingStore(server)
        self._changed = threading.Event()
        self._now_s = time.monotonic()
        observer = WatchCache(self.store, self._changed.set)
        me = Member(name, f"{name}-1", "127.0.0.1", 1, 2, 1)
        self.membership = Membership(self.store, me, 60, bound_socket())
        look = storage or CheckpointProbe(None, self._changed.set)
        self.subscriptions = Subscriptions(self.store, observer, self.membership)
        self.cluster_observer = ClusterObserver(
            *(self.store, observer, self.membership, self.subscriptions),
            *(Nothing(), look, HostProbe(self._changed.set, self._answers)),
        )
        self.asked: list[str] = []
        """Nodes whose agents were asked whether they run; none answers."""
        assert self.membership.register()

    def _answers(self, member: Member) -> bool:
        self.asked.append(member.node)
        return False

    def note_outage(self) -> None:
        """The store comes back just now."""
        self.membership.note_outage(self._now_s)

    def look(
        self, after_s: float = 2.0, policy: JobPolicy = POLICY, *, confirms: bool = False
    ) -> View:
        self._now_s += after_s
        for _ in range(1 if confirms else 2):  # what a look makes it read is seen by the next one
            view = self.cluster_observer.view(
                WorkerGroupState(), False, self._now_s, policy, confirms=confirms
            )
            self.subscriptions.update(view, self._now_s, policy)
        return view

    def look_until(
        self, so: Callable[[View], bool], after_s: float = 2.0, policy: JobPolicy = POLICY
    ) -> View:
        deadline_s = time.monotonic() + DEADLINE_S
        while not so(view := self.look(after_s, policy)):
            assert time.monotonic() < deadline_s, "never came to be"
            self._changed.wait(0.01)
            self._changed.clear()
        return view

    def close(self) -> None:
        self.membership.close()
        self.store.close()


def world_of(nodes: Sequence[Node], strikes: tuple[NodeStrikes, ...] = ()) -> None:
    """These nodes write themselves a world."""
    document = World(
        generation=1,
        token="t",
        members=tuple(node.membership.me for node in nodes),
        strategy="ddp",
        resume=Resume(tier="fresh"),
        reason="test",
        strikes=strikes,
    )
    nodes[0].store.write({WORLD: to_bytes(document)})


class SlowStorage:
    """A checkpoint directory; the time for which an answer of it counts is over soon."""

    possible = True
    state = CheckpointState(pending="looking")

    def invalidate(self) -> None:
        return

    def poll(self, bad: Mapping[int, str]) -> CheckpointState:
        return self.state


class Nothing:
    """A memory without snapshots."""

    def held(self) -> tuple[()]:
        return ()


def test_the_oldest_looks_at_all_and_the_others_look_once() -> None:
    server = MemoryServer(time.monotonic)
    first, second, third = nodes = [Node(name, server) for name in ("c", "b", "a")]
    view = first.look_until(lambda v: v.oldest and v.members is not None)
    assert list(view.members or ()) == ["c", "b", "a"]
    for _ in range(50):
        for node in (second, third):
            view = node.look()
            assert not view.oldest
            assert view.members is None
    assert [node.store.looks for node in nodes] == [1, 1, 1]

    first.close()
    second.look_until(lambda v: v.oldest and list(v.members or ()) == ["b", "a"])
    assert not third.look().oldest
    second.close()
    third.look_until(lambda v: v.oldest)
    third.close()


def test_storage_has_time_for_each_of_its_answers() -> None:
    """In a round that had lasted for ten seconds the leader did without storage as soon as an
    answer of it was old, and began from an older state in memory."""
    storage = SlowStorage()
    node = Node("a", MemoryServer(time.monotonic), storage)
    view = node.look_until(lambda v: v.oldest)
    asked_s = view.storage_asked_s
    assert asked_s is not None
    assert node.look().storage_asked_s == asked_s
    storage.state = CheckpointState(step=28)
    view = node.look()
    assert (view.storage_step, view.storage_asked_s) == (28, None)
    storage.state = CheckpointState(pending="looking")
    later_s = node.look().storage_asked_s
    assert later_s is not None
    assert later_s > asked_s
    node.close()


def test_what_storage_held_counts_while_a_decision_is_confirmed() -> None:
    """A slow store was read for longer than the answer counted, and no world was ever written."""
    storage = SlowStorage()
    node = Node("a", MemoryServer(time.monotonic), storage)
    node.look_until(lambda v: v.oldest)
    assert node.look(confirms=True).storage_pending == "looking"
    storage.state = CheckpointState(step=28)
    node.look()
    storage.state = CheckpointState(pending="looking")
    view = node.look(confirms=True)
    assert (view.storage_step, view.storage_pending) == (28, None)
    assert node.look(confirms=True).storage_pending == "looking", "it counts once"
    node.close()


def test_a_step_that_was_found_damaged_counts_in_no_confirmation() -> None:
    storage = SlowStorage()
    node = Node("a", MemoryServer(time.monotonic), storage)
    storage.state = CheckpointState(step=28)
    node.look_until(lambda v: v.storage_step == 28)
    node.cluster_observer.bad_steps.add(28)
    node.cluster_observer._damage[28] = "block 3 is not what was written"
    storage.state = CheckpointState(pending="looking")
    assert node.look(confirms=True).storage_pending == "looking"
    node.close()


def test_later_nodes_search_later_or_not_at_all() -> None:
    """A node searches for the oldest later the later it came, and not if a world comes before."""
    server = MemoryServer(time.monotonic)
    nodes = [Node(name, server) for name in "abc"]
    for node in nodes:
        for _ in range(10):
            node.look(0.1)
    assert [node.store.looks for node in nodes] == [1, 0, 0]
    for node in nodes:
        node.look(0.16)
    assert [node.store.looks for node in nodes] == [1, 1, 0]
    nodes[2].look(0.05)
    assert [node.store.looks for node in nodes] == [1, 1, 1]
    for node in nodes:
        node.close()


def test_a_node_that_is_registered_anew_is_the_oldest_no_more() -> None:
    server = MemoryServer(time.monotonic)
    first, second = Node("a", server), Node("b", server)
    first.look_until(lambda v: v.oldest and v.members is not None)
    assert not second.look().oldest
    first.store.write({}, deletes=["members/a"])
    second.look_until(lambda v: v.oldest)
    assert first.membership.register()
    first.look_until(lambda v: not v.oldest)
    assert second.look().oldest
    first.close()
    second.close()


def test_the_last_node_is_surplus_once_a_loss_would_show() -> None:
    """A node counts as one too many only after the time in which a lost node would be noticed."""
    server = MemoryServer(time.monotonic)
    nodes = [Node(name, server) for name in "dcba"]
    policy = JobPolicy(min_nodes=1, max_nodes=2, spares=1, lease_ttl_s=5.0)
    world_of(nodes[:2])
    for node in nodes:
        node.look_until(lambda v: v.world is not None, 0.0, policy)
    seen = [node.look(9.0, policy).surplus for node in nodes]
    assert seen == [False] * 4
    seen = [node.look(2.0, policy).surplus for node in nodes]
    assert seen == [False, False, False, True]
    asked = nodes[2].store.looks
    larger_policy = replace(policy, max_nodes=3)
    assert [node.look(2.0, policy).surplus for node in nodes] == seen
    assert nodes[2].store.looks == asked
    assert not any(node.look(2.0, larger_policy).surplus for node in nodes)
    for node in nodes:
        node.close()


def test_who_is_set_aside_takes_nobodys_place() -> None:
    server = MemoryServer(time.monotonic)
    nodes = [Node(name, server) for name in "cba"]
    policy = JobPolicy(min_nodes=1, max_nodes=2, spares=0, lease_ttl_s=5.0)
    world_of(nodes[:1], strikes=(NodeStrikes(node="b", count=4),))
    for node in nodes:
        node.look_until(lambda v: v.world is not None, 0.0, policy)
        node.look(9.0, policy)
    assert not any(node.look(2.0, policy).surplus for node in nodes)
    for node in nodes:
        node.close()


def test_a_store_that_is_away_is_asked_again() -> None:
    server = MemoryServer(time.monotonic)
    node = Node("a", server)
    node.store.cut()
    assert not node.look().oldest
    node.store.mend()
    node.look_until(lambda v: v.oldest)
    node.close()


def test_no_node_waits_for_an_odd_registration() -> None:
    """It is older than all, has no lease, and no agent: no first world was ever written."""
    server = MemoryServer(time.monotonic)
    odd = {f"{MEMBERS}{name}": b"not json" for name in ("zz", "yy", "xx")}
    other = MemoryStore(server)
    for key, value in odd.items():
        other.write({key: value})
    first, second = Node("b", server), Node("a", server)
    view = first.look_until(lambda v: v.oldest and v.members is not None)
    assert list(view.members or ()) == ["b", "a"]
    assert not second.look().oldest
    other.write({f"{MEMBERS}b": b"not json"})
    assert second.look_until(lambda v: v.oldest).oldest
    for node in (first, second):
        node.close()
    other.close()


def test_odd_registrations_take_no_place_of_a_spare() -> None:
    server = MemoryServer(time.monotonic)
    other = MemoryStore(server)
    other.write({f"{MEMBERS}zz": b"not json"})
    member, spare = Node("a", server), Node("b", server)
    world_of([member])
    policy = JobPolicy(min_nodes=1, max_nodes=1, spares=1)
    for _ in range(20):
        assert not spare.look(policy=policy).surplus
    for node in (member, spare):
        node.close()
    other.close()


OUTAGES = {
    "none": [(0.0, None, True, 0.0)],
    "before the round": [(3.0, None, True, 3.0), (3.0, 4.0, True, 3.0)],
    "a slow answer in the round": [(0.0, 4.0, True, 0.0), (5.0, 4.0, True, 5.0)],
    "slow answers, again and again": [
        (5.0, 4.0, True, 5.0),
        (6.0, 4.0, True, 5.0),
        (7.0, 4.0, True, 5.0),
    ],
    "slow answers while no round is open": [(5.0, None, True, 5.0), (6.0, None, True, 6.0)],
    "slow answers in the next round": [(5.0, 4.0, True, 5.0), (9.0, 8.0, True, 9.0)],
    "failed requests": [(5.0, 4.0, False, 5.0), (6.0, 4.0, False, 6.0), (7.0, 4.0, True, 7.0)],
    "failed requests after a slow answer": [
        (5.0, 4.0, True, 5.0),
        (6.0, 4.0, False, 6.0),
        (7.0, 4.0, True, 7.0),
        (8.0, 4.0, True, 7.0),
    ],
    "failed requests, twice": [
        (5.0, 4.0, False, 5.0),
        (6.0, 4.0, True, 6.0),
        (6.0, 4.0, False, 6.0),
        (8.0, 4.0, True, 8.0),
    ],
    "a slow answer after failed requests": [
        (5.0, 4.0, False, 5.0),
        (6.0, 4.0, True, 6.0),
        (7.0, 4.0, True, 7.0),
        (8.0, 4.0, True, 7.0),
    ],
}
"""Looks, one after another: the end of the last outage, the beginning of the round, whether the
store answers, and the end of the outage that counts."""


@pytest.mark.parametrize("looks", OUTAGES.values(), ids=OUTAGES.keys())
def test_a_slow_store_gives_time_to_answer_once_a_round(
    looks: list[tuple[float, float | None, bool, float]],
) -> None:
    outages = Outages()
    for end_s, round_s, reachable, counts_s in looks:
        assert outages.update(end_s, round_s, reachable=reachable) == counts_s


def test_the_last_answer_is_the_last_that_was_seen_to_come() -> None:
    """An agent that begins to look late has seen none come."""
    answers = Answers()
    looks = [(1, 400, 10.0), (1, 400, 10.1), (1, 500, 10.2), (1, 500, 10.3), (1, 499, 10.4)]
    seen = [answers.update(*look) for look in looks]
    assert seen == [None, None, 10.2, 10.2, 10.2]
    assert [answers.update(2, 3, 11.0), answers.update(2, 4, 11.1)] == [None, 11.1]


PHASES: tuple[Phase, Phase] = ("restored", "stopped")


@pytest.mark.parametrize("loss", ["deleted", "replaced"])
def test_a_report_that_the_store_does_not_hold_is_not_taken_for_put(loss: str) -> None:
    """A restored backup may hold less, or an earlier report of this node, and no error shows it."""
    server = MemoryServer(time.monotonic)
    node = Node("a", server)
    world_of([node])
    node.look_until(lambda v: v.reports is not None)
    key = f"{reports_of(1)}a"
    earlier, report = (Report(incarnation="a-1", phase=phase, store_port=2) for phase in PHASES)
    revision = node.store.write({key: to_bytes(report)})
    assert revision is not None
    node.cluster_observer.reported(1, report, revision)
    view = node.look_until(lambda v: "a" in (v.reports or {}))
    assert view.my_report == report
    other = MemoryStore(server)
    if loss == "deleted":
        other.write({}, deletes=[key])
    else:
        other.write({key: to_bytes(earlier)})
    node.look_until(lambda v: v.my_report is None)
    node.close()


def test_a_member_without_a_registration_is_asked_whether_it_runs() -> None:
    """Not where the store was away until a moment ago: all members are without one then."""
    server = MemoryServer(time.monotonic)
    first, second = Node("a", server), Node("b", server)
    world_of([first, second])
    first.look_until(lambda v: v.world is not None and v.members is not None)
    first.note_outage()
    MemoryStore(server).write({}, deletes=[second.membership.key])
    first.look_until(lambda v: "b" in v.missing_since_s, 0.0)
    for _ in range(10):
        assert not first.look(0.4).unanswered_since_s
    assert not first.asked
    view = first.look_until(lambda v: bool(v.unanswered_since_s))
    assert view.unanswered_since_s.keys() == {"b"} == set(first.asked)
    assert view.unanswered_since_s["b"] >= view.missing_since_s["b"] + POLICY.lease_ttl_s / 2
    assert second.membership.register()
    first.look_until(lambda v: not v.missing_since_s)
    assert not first.look(0.0).unanswered_since_s
    first.close()
    second.close()
