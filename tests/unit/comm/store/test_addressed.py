"""At which addresses the ranks of a group listen, of what gloo publishes at the store."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from elasticzero.comm.gloo import published_address
from elasticzero.comm.store.addressed import AddressedStore
from elasticzero.rank_groups.connections import Address
from elasticzero.torch_internals.groups import PrefixStore, TorchStore
from tests.support.rank_stores import Served, served

HOST = b"node-17.example"
PAIRS = struct.pack("=3q", 0, 1, 2)


def published(address: Address) -> bytes:
    """What a rank of gloo publishes (`Rank::bytes` in gloo/transport/tcp/context.cc)."""
    ip, port = address
    if ":" in ip:
        name = struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, 7)
        name += socket.inet_pton(socket.AF_INET6, ip) + struct.pack("=I", 3)
    else:
        name = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port)
        name += socket.inet_pton(socket.AF_INET, ip)
    sockaddr = name.ljust(128, b"\xa5")  # the rest is whatever was there
    head = struct.pack("=Q", len(HOST)) + HOST
    return head + struct.pack("=Q", 136) + sockaddr + struct.pack("=q", -1) + PAIRS


@pytest.mark.parametrize("address", [("10.0.0.7", 40001), ("fd00::17", 65535), ("127.0.1.1", 2)])
def test_an_address_is_read_of_what_gloo_publishes(address: Address) -> None:
    value = published(address)
    assert published_address(value) == address
    assert published_address(value[: -len(PAIRS)]) == address  # of a device that connects late
    for size in range(len(value) - len(PAIRS)):
        assert published_address(value[:size]) is None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"1",
        bytes(200),
        b"\xff" * 200,
        struct.pack("=Q", 1 << 63) + bytes(200),
        published(("10.0.0.7", 1)).replace(struct.pack("=Q", 136), struct.pack("=Q", 128)),
    ],
)
def test_other_values_are_no_addresses(value: bytes) -> None:
    assert published_address(value) is None


@pytest.fixture
def ranks() -> Iterator[Served]:
    with served(2) as store:
        yield store


def test_a_group_has_the_addresses_that_its_ranks_publish(ranks: Served) -> None:
    store, peer = AddressedStore(ranks.first), ranks.rank(1)
    ours, theirs = ("10.0.0.1", 1001), ("10.0.0.2", 1002)
    with store.recording() as connections:
        store.set("token/0//cpu//0/0", published(ours))
        store.set("token/0//cpu//0/name", b"not an address")
    assert connections.addresses == {ours}
    peer.set("token/0//cpu//0/1", published(theirs))
    peer.set("token/1//cpu//0/1", published(("10.0.0.2", 1003)))
    assert store.get("token/1//cpu//0/1")
    assert connections.addresses == {ours}, "another group's"
    values = store.multi_get(["token/0//cpu//0/0", "token/0//cpu//0/1"])
    assert values == [published(ours), published(theirs)]
    assert connections.addresses == {ours, theirs}, "read later, as by a device that connects late"


def test_groups_that_two_threads_make_at_once_are_told_apart(ranks: Served) -> None:
    store = AddressedStore(ranks.first)
    with store.recording() as first, ThreadPoolExecutor(1) as other:

        def make() -> set[Address]:
            with store.recording() as second:
                store.set("b/0", published(("10.0.0.1", 2)))
            return second.addresses

        assert other.submit(make).result() == {("10.0.0.1", 2)}
        other.submit(store.set, "c/0", published(("10.0.0.1", 3))).result()
        store.set("a/0", published(("10.0.0.1", 1)))
    assert first.addresses == {("10.0.0.1", 1)}
    store.set("d/0", published(("10.0.0.1", 4)))
    assert first.addresses == {("10.0.0.1", 1)}


def ours(ranks: Served) -> Any:
    return ranks.rank(1)


def of_torch(ranks: Served) -> Any:
    return TorchStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("make", [ours, of_torch])
def test_torch_finds_all_of_a_store(ranks: Served, make: Callable[[Served], Any]) -> None:
    """Called as torch's groups do it, from C++; with the ranks' own store and with torch's."""
    addressed = AddressedStore(make(ranks))
    store: Any = PrefixStore("p", addressed)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.add("count", 2) == 2
    assert store.add("count", 3) == 5
    assert store.check(["key", "count"]) and not store.check(["nothing"])
    assert store.compare_set("key", "value", "newer") == b"newer"
    store.append("key", " still")
    assert store.multi_get(["key", "count"]) == [b"newer still", b"5"]
    store.multi_set(["a", "b"], ["1", "2"])
    store.wait(["a", "b"], timedelta(seconds=5))
    assert store.has_extended_api()
    assert store.delete_key("a") and not store.check(["a"])
    assert addressed.num_keys() >= 3
    with pytest.raises(RuntimeError):
        store.wait(["never"], timedelta(milliseconds=20))
    addressed.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(RuntimeError):
        addressed.get("never")
    addressed.close()
