"""A node's registration, against the store in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from elasticzero.errors import StoreUnavailable
from elasticzero.launcher.membership import Membership, bound_socket
from elasticzero.launcher.memory import MemoryServer, MemoryStore
from elasticzero.launcher.world import Member, to_bytes

NOW_S = 10.0


class LossyStore(MemoryStore):
    """Loses as many writes as it is told to."""

    to_lose = 0

    def write(self, *puts: Any, **more: Any) -> int | None:
        if self.to_lose:
            self.to_lose -= 1
            raise StoreUnavailable("no answer; it is not known whether it was written")
        return super().write(*puts, **more)


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


def test_a_dropped_node_registers_anew_beside_one_whose_name_begins_with_its_own(
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


def test_a_registration_whose_write_was_lost_is_tried_again_though_its_lease_lives(
    store: LossyStore, node_1: Membership
) -> None:
    store.to_lose = 1
    with suppress(StoreUnavailable):
        node_1.register()
    assert not is_registered(store)
    node_1.check(NOW_S, named=True, world_revision=7)
    assert is_registered(store)
    assert node_1.me.incarnation == "first"
