"""Nodes take places on islands: the first that is free, and their own again."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from elasticzero.launcher.islands.places import PREFIX, Reservation
from tests.support.memory_store import MemoryServer, MemoryStore

TTL_S = 2


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_islands_fill_one_after_the_other() -> None:
    store = MemoryStore(MemoryServer(Clock()))
    islands = [Reservation(store, f"node-{n}", 2, TTL_S).island for n in range(5)]
    assert islands == ["island-0", "island-0", "island-1", "island-1", "island-2"]


def test_a_node_finds_its_place_again_and_gives_it_back() -> None:
    server = MemoryServer(Clock())
    store = MemoryStore(server)
    places = [Reservation(store, f"node-{n}", 2, TTL_S) for n in range(4)]
    again = Reservation(MemoryStore(server), "node-1", 2, TTL_S)
    assert again.island == "island-0"
    places[1].close()  # that of its process of before
    assert [entry.value for entry in store.read(PREFIX).entries.values()].count(b"node-1") == 1
    again.close()
    assert Reservation(store, "node-9", 2, TTL_S).island == "island-0"


def test_the_place_of_a_dead_node_is_free_after_its_lease() -> None:
    clock = Clock()
    server = MemoryServer(clock)
    dead, alive = MemoryStore(server), MemoryStore(server)
    Reservation(dead, "node-0", 1, TTL_S)
    Reservation(alive, "node-1", 1, TTL_S)
    dead.cut()
    assert Reservation(alive, "node-2", 1, TTL_S).island == "island-2"
    clock.now_s += 2 * TTL_S
    assert Reservation(alive, "node-3", 1, TTL_S).island == "island-0"


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_node_takes_its_place_again_unless_another_one_has(is_taken: bool) -> None:
    clock = Clock()
    server = MemoryServer(clock)
    store, other = MemoryStore(server), MemoryStore(server)
    place = Reservation(store, "node-0", 1, TTL_S)
    place.keep()
    store.cut()
    clock.now_s += 2 * TTL_S
    if is_taken:
        Reservation(other, "node-1", 1, TTL_S)
    store.mend()
    place.keep()
    (entry,) = store.read(PREFIX).entries.values()
    assert (entry.value, entry.leased) == (b"node-1" if is_taken else b"node-0", True)


def test_nodes_that_come_together_have_places_of_their_own() -> None:
    server = MemoryServer(Clock())
    islands: list[str] = []

    def come(node: str) -> None:
        islands.append(Reservation(MemoryStore(server), node, 3, TTL_S).island)

    threads = [threading.Thread(target=come, args=(f"node-{n}",)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(islands) == {f"island-{n}": 3 for n in range(4)}
