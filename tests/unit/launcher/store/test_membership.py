"""A node's registration, against the store in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from elasticzero.errors import StoreUnavailable, UserError
from elasticzero.launcher.protocol.documents import Member, to_bytes
from elasticzero.launcher.store.api import LeaseLost, PrefixState
from elasticzero.launcher.store.decoding import document
from elasticzero.launcher.store.membership import Membership, bound_socket
from tests.support.memory_store import MemoryServer, MemoryStore

NOW_S = 10.0


class LossyStore(MemoryStore):
    """Loses as many writes, and lets as many leases lapse too soon, as it is told to."""

    to_lose = to_lapse = reads = 0

    def read(self, prefix: str, *, limit: int = 0) -> PrefixState:
        self.reads += 1
        return super().read(prefix, limit=limit)

    def write(self, *puts: Any, **options: Any) -> int | None:
        if self.to_lapse:
            self.to_lapse -= 1
            options["lease"].close(revoke=True)
            options["lease"].lose()
            raise LeaseLost("the lease is gone")
        if self.to_lose:
            self.to_lose -= 1
            raise StoreUnavailable("no answer; it is not known whether it was written")
        return super().write(*puts, **options)


@pytest.fixture
def store() -> Iterator[LossyStore]:
    store = LossyStore(MemoryServer(lambda: 0.0))
    yield store
    store.close()


@pytest.fixture
def node_1(store: LossyStore) -> Iterator[Membership]:
    me = Member("node-1", "first", "localhost", 9400, 29500, 1)
    membership = Membership(store, me, 5, bound_socket(), draw_incarnation=lambda: "second")
    yield membership
    membership.close()


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("127.0.0.1", {"127.0.0.1"}),
        ("192.0.2.77", {"::", "0.0.0.0"}),
        ("no.such.host.invalid", {"::", "0.0.0.0"}),
    ],
)
def test_rank_0s_store_is_reached_where_other_nodes_reach_the_node(
    host: str, bound: set[str]
) -> None:
    """It listened at every address. Only what a router translates, or a name, may mean any."""
    with bound_socket(host) as reserved:
        assert reserved.getsockname()[0] in bound


def is_registered(store: LossyStore) -> bool:
    return "members/node-1" in store.read("members/node-1").entries


def test_the_port_of_rank_0_is_open_at_the_node_s_address_alone() -> None:
    """An address that is none of this machine's may be one that a router translates."""
    with bound_socket("127.0.0.1") as bound:
        assert bound.getsockname()[0] == "127.0.0.1"
    for elsewhere in ("192.0.2.77", "no.such.host.invalid"):
        with bound_socket(elsewhere) as bound:
            assert bound.getsockname()[0] in ("::", "0.0.0.0")


def test_a_dropped_node_registers_beside_one_of_a_longer_name(
    store: LossyStore, node_1: Membership
) -> None:
    node_1.join(lambda text: None)
    other = Member("node-10", "other", "localhost", 9400, 29500, 1)
    store.write({"members/node-10": to_bytes(other)}, deletes=["members/node-1"])
    node_1.check(NOW_S, named=False, world_revision=7)
    assert is_registered(store)
    assert node_1.me.incarnation == "second"


def test_a_dropped_node_that_is_registered_stays_as_it_is(
    store: LossyStore, node_1: Membership
) -> None:
    node_1.join(lambda text: None)
    node_1.check(NOW_S, named=False, world_revision=7)
    assert node_1.me.incarnation == "first"


def test_a_registration_whose_write_was_lost_is_tried_again(
    store: LossyStore, node_1: Membership
) -> None:
    store.to_lose = 1
    with suppress(StoreUnavailable):
        node_1.register()
    assert not is_registered(store)
    node_1.check(NOW_S, named=True, world_revision=7)
    assert is_registered(store)
    assert node_1.me.incarnation == "first"


class Clock:
    """Time that passes in sleep alone."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_new_name_is_registered_unlooked(store: LossyStore, node_1: Membership) -> None:
    node_1.join(lambda text: None)
    assert store.reads == 0
    assert is_registered(store)


def test_a_name_that_stays_taken_is_the_users_mistake(
    store: LossyStore, node_1: Membership
) -> None:
    other = Member("node-1", "other", "localhost", 9400, 29500, 1)
    store.write({"members/node-1": to_bytes(other)})
    clock, messages = Clock(), list[str]()
    with pytest.raises(UserError, match="another agent is registered as node 'node-1'"):
        node_1.join(messages.append, clock=clock, sleep=clock.sleep)
    assert messages == ["a former registration of node-1 has not lapsed yet; waiting for it"]


def test_leases_that_lapse_before_their_first_use_are_taken_anew(
    store: LossyStore, node_1: Membership
) -> None:
    """As when a thousand agents join at once, and etcd is slow."""
    store.to_lapse = 5
    clock, messages = Clock(), list[str]()
    node_1.join(messages.append, clock=clock, sleep=clock.sleep)
    assert is_registered(store) and messages == []


def test_leases_that_always_lapse_are_no_user_error(store: LossyStore, node_1: Membership) -> None:
    """They are trouble of the store, so the agent tries again."""
    store.to_lapse = 1000
    clock = Clock()
    with pytest.raises(StoreUnavailable, match="each lease of 5 s had lapsed"):
        node_1.join(lambda text: None, clock=clock, sleep=clock.sleep)
    assert store.to_lapse > 900


@pytest.mark.parametrize("odd", [b"not json", b"[]", b'{"incarnation": 1}'])
def test_what_is_no_registration_is_written_over(
    odd: bytes, store: LossyStore, node_1: Membership
) -> None:
    """It has no lease, so it would stay for ever."""
    store.write({"members/node-1": odd})
    node_1.join(lambda text: None, sleep=lambda seconds: None)
    assert store.read("members/node-1").entries["members/node-1"].value == to_bytes(node_1.me)


def test_a_registration_of_another_release_has_the_name(
    store: LossyStore, node_1: Membership
) -> None:
    """What cannot be read under a lease is that of a living agent."""
    store.write({"members/node-1": b"{}"}, lease=store.lease(5))
    clock = iter(range(100))
    with pytest.raises(UserError, match="another agent is registered as node 'node-1'"):
        node_1.join(lambda text: None, clock=lambda: next(clock), sleep=lambda seconds: None)


def test_a_registration_that_was_overwritten_is_put_anew(
    store: LossyStore, node_1: Membership
) -> None:
    assert node_1.register()
    store.write({"members/node-1": b"not json"})
    with pytest.raises(StoreUnavailable, match="it is renewed first"):
        node_1.still_registered()
    node_1.check(NOW_S, named=True, world_revision=0)
    assert node_1.still_registered().value == to_bytes(node_1.me)
    store.write({"members/node-1": b"not json"})
    node_1.verify()
    node_1.check(2 * NOW_S, named=True, world_revision=0)
    assert node_1.still_registered().value == to_bytes(node_1.me)
    lapses, reads = node_1.lapses, store.reads
    node_1.verify()
    node_1.check(3 * NOW_S, named=True, world_revision=0)
    assert (node_1.lapses, store.reads) == (lapses, reads + 1)


def test_a_node_left_out_takes_its_odd_registration_back(
    store: LossyStore, node_1: Membership
) -> None:
    assert node_1.register()
    store.write({"members/node-1": b"not json"})
    node_1.check(NOW_S, named=False, world_revision=7)
    assert node_1.still_registered().value == to_bytes(node_1.me)
    assert node_1.me.incarnation == "second"


def test_an_earlier_registration_from_a_backup_is_replaced(
    store: LossyStore, node_1: Membership
) -> None:
    """The backup is of the time before the node was left out; its lease is still renewed.

    The store's revision does not tell of the loss: it is past the node's own ones. The next world
    took the earlier registration for a member, and waited for it in vain.
    """
    server = store._server
    assert node_1.register()
    backup = server.backup()
    store.write({}, deletes=[node_1.key])
    node_1.check(NOW_S, named=False, world_revision=7)
    assert node_1.me.incarnation == "second"
    server.restore(backup)
    for number in range(8):
        server.write({f"other/{number}": b"1"}, (), (), 0)
    node_1.check(2 * NOW_S, named=False, world_revision=8)
    assert store.history.number == 1, "the earlier registration tells of the loss"
    node_1.lost_data(2 * NOW_S)
    node_1.check(3 * NOW_S, named=False, world_revision=8)
    assert node_1.still_registered().value == to_bytes(node_1.me)
    server.restore(backup)
    for number in range(20):
        server.write({f"other/{number}": b"1"}, (), (), 0)
    with pytest.raises(StoreUnavailable, match="is of"):
        node_1.verify()
    assert store.history.number == 2
    node_1.lost_data(4 * NOW_S)
    node_1.check(5 * NOW_S, named=True, world_revision=9)
    assert node_1.still_registered().value == to_bytes(node_1.me)
    assert store.history.number == 2


def test_registrations_say_what_the_node_has_brought_until_its_workers_begin(
    store: LossyStore, node_1: Membership
) -> None:
    node_1.brings(45, 2)
    node_1.join(lambda line: None)

    def registered() -> tuple[int, int]:
        member: Member = document(Member, store.read(node_1.key).entries[node_1.key].value)
        return member.brought_step, member.brought_shards

    def register_again() -> tuple[int, int]:
        node_1.lost_data(NOW_S)
        node_1.check(NOW_S, named=True, world_revision=0)
        return registered()

    assert registered() == register_again() == (45, 2)
    node_1.brings(0, 0)
    assert register_again() == (0, 0)
