"""Nodes take places on islands: the first that is free, and their own again."""

from __future__ import annotations

import threading
from collections import Counter

from elasticzero.launcher.islands.places import PREFIX, take_place
from tests.support.memory_store import MemoryServer, MemoryStore

TTL_S = 2


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_islands_fill_one_after_the_other() -> None:
    store = MemoryStore(MemoryServer(Clock()))
    islands = [take_place(store, f"node-{n}", 2, TTL_S)[0] for n in range(5)]
    assert islands == ["island-0", "island-0", "island-1", "island-1", "island-2"]


def test_a_node_finds_its_place_again_and_gives_it_back() -> None:
    server = MemoryServer(Clock())
    store = MemoryStore(server)
    leases = [take_place(store, f"node-{n}", 2, TTL_S)[1] for n in range(4)]
    again, lease = take_place(MemoryStore(server), "node-1", 2, TTL_S)
    assert again == "island-0"
    leases[1].close(revoke=True)  # that of its process of before
    assert [entry.value for entry in store.read(PREFIX).entries.values()].count(b"node-1") == 1
    lease.close(revoke=True)
    assert take_place(store, "node-9", 2, TTL_S)[0] == "island-0"


def test_the_place_of_a_dead_node_is_free_after_its_lease() -> None:
    clock = Clock()
    server = MemoryServer(clock)
    dead, alive = MemoryStore(server), MemoryStore(server)
    take_place(dead, "node-0", 1, TTL_S)
    take_place(alive, "node-1", 1, TTL_S)
    dead.cut()
    assert take_place(alive, "node-2", 1, TTL_S)[0] == "island-2"
    clock.now_s += 2 * TTL_S
    assert take_place(alive, "node-3", 1, TTL_S)[0] == "island-0"


def test_nodes_that_come_together_have_places_of_their_own() -> None:
    server = MemoryServer(Clock())
    islands: list[str] = []

    def come(node: str) -> None:
        islands.append(take_place(MemoryStore(server), node, 3, TTL_S)[0])

    threads = [threading.Thread(target=come, args=(f"node-{n}",)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(islands) == {f"island-{n}": 3 for n in range(4)}
