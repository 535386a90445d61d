"""A node's registration, against the store in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from elasticzero.errors import StoreUnavailable, UserError
from elasticzero.launcher.protocol.documents import Member, to_bytes
from elasticzero.launcher.store.api import LeaseLost, PrefixState
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


def is_registered(store: LossyStore) -> bool:
    return "members/node-1" in store.read("members/node-1").entries


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
