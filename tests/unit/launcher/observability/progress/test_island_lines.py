"""What `elasticzero local` says of islands."""

from __future__ import annotations

from typing import Any

from elasticzero.launcher.observability.progress.island_lines import EVERY_S, IslandLines


def averaged(at_s: float, number: int, *samples: int, fragment: int = 0) -> dict[str, Any]:
    parts = [
        {"island": f"node-{i}", "samples": count, "staleness": i} for i, count in enumerate(samples)
    ]
    return {
        "event": "averaged",
        "time": at_s,
        "history": 1,
        "fragment": fragment,
        "round": number,
        "contributors": parts,
    }


def world(generation: int, *members: str, reason: str = "a worker died") -> dict[str, Any]:
    return {
        "event": "world",
        "time": 0.0,
        "generation": generation,
        "members": list(members),
        "reason": reason,
    }


def test_a_round_is_said_once_whichever_islands_write_it() -> None:
    lines = IslandLines()
    told = [*lines.lines("node-0", averaged(10.0, 1, 160, 80))]
    told += lines.lines("node-1", averaged(10.1, 1, 160, 80))
    assert told == ["  round 1: node-0 160, node-1 80 (1 round late) samples"]


def test_rounds_that_follow_quickly_are_counted_and_not_said() -> None:
    lines = IslandLines()
    shown = [
        line
        for number in range(1, 21)
        for line in lines.lines("node-0", averaged(100 + number * EVERY_S / 4, number, 10))
    ]
    assert len(shown) == 5
    assert [*lines.lines("node-0", averaged(0.0, 1, 30))] == [], "it is known already"
    again = {**averaged(400.0, 1, 30), "history": 2}
    assert [*lines.lines("node-0", again)] == ["  round 1: node-0 30 samples"]
    assert lines.end() == "21 rounds of 0 islands, which have 230 samples"


def test_an_island_whose_workers_start_anew_is_named() -> None:
    lines = IslandLines()
    assert [*lines.lines("node-0", world(1, "node-0"))] == []
    assert [*lines.lines("node-1", world(1, "node-1"))] == []
    assert [*lines.lines("node-1", world(2, "node-1"))] == [
        "the island of node-1: its workers start anew (a worker died)"
    ]
    assert lines.end() == "0 rounds of 2 islands, which have 0 samples"


def test_the_nodes_of_an_island_say_the_same_once() -> None:
    lines = IslandLines()
    for node in ("a", "b"):
        assert [*lines.lines(node, world(1, "a", "b"))] == []
    assert [*lines.lines("c", world(1, "c"))] == []
    told = [line for n in ("b", "d") for line in lines.lines(n, world(2, "b", "d"))]
    assert told == ["the island of b and d: its workers start anew (a worker died)"]
    assert [*lines.lines("a", world(2, "b", "d"))] == [], "it is set aside"
    assert lines.end() == "0 rounds of 2 islands, which have 0 samples"
