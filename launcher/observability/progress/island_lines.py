"""Says in lines what a job's islands do, from their agents' events. Pure but for what it remembers.

Each island is a job in itself, with generations and steps of its own: those of several do not make
one story. What they have in common are the rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elasticzero.text import count_text

EVERY_S = 2.0
"""Seconds between two lines about rounds."""


class IslandLines:
    """Follows the islands of one job."""

    def __init__(self) -> None:
        self._worlds: dict[frozenset[str], int] = {}
        """The nodes of each island, with its newest generation."""
        self._rounds: dict[tuple[int, int], int] = {}
        """Newest round of each history and fragment."""
        self._samples: dict[tuple[int, int], int] = {}
        """Samples of their rounds."""
        self._shown_s = 0.0

    def lines(self, node: str, event: Mapping[str, Any]) -> Iterator[str]:
        """Yields what there is to say of an event.

        Args:
            node: The island that has written it.
            event: The event.
        """
        match event["event"]:
            case "world" if node in event["members"]:
                yield from self._world(frozenset(event["members"]), event)
            case "averaged" if event["round"] > self._rounds.get(_place(event), 0):
                place = _place(event)
                self._rounds[place] = event["round"]
                counts = [part["samples"] for part in event["contributors"]]
                self._samples[place] = self._samples.get(place, 0) + sum(counts)
                if event["time"] - self._shown_s >= EVERY_S:
                    self._shown_s = event["time"]
                    yield f"  round {event['round']}: {contributors_text(event['contributors'])}"

    def _world(self, nodes: frozenset[str], event: Mapping[str, Any]) -> Iterator[str]:
        """Yields a line where workers of an island start anew, which each of its nodes says.

        Args:
            nodes: The nodes of its world.
            event: The event.
        """
        of_before = [of_island for of_island in self._worlds if of_island & nodes]
        newest = max((self._worlds[of_island] for of_island in of_before), default=0)
        if event["generation"] <= newest:
            return
        for of_island in of_before:
            del self._worlds[of_island]
        self._worlds[nodes] = event["generation"]
        if of_before:
            names = " and ".join(sorted(nodes))
            yield f"the island of {names}: its workers start anew ({event['reason']})"

    def end(self) -> str:
        """Returns what the islands have done, as a part of a sentence."""
        last = max((fragment for _, fragment in self._rounds), default=0)
        samples = sum(count for (_, f), count in self._samples.items() if f == last)
        rounds = count_text(sum(n for (_, f), n in self._rounds.items() if f == last), "round")
        islands = count_text(len(self._worlds), "island")
        return f"{rounds} of {islands}, which have {samples:,} samples"


def _place(event: Mapping[str, Any]) -> tuple[int, int]:
    return event["history"], event["fragment"]


def contributors_text(contributors: list[Mapping[str, Any]]) -> str:
    """Returns who has contributed to a round: `node-0 160, node-1 80 samples (1 round late)`.

    Args:
        contributors: As in the event of a round.
    """
    parts = []
    for part in contributors:
        late = part["staleness"]
        note = f" ({count_text(late, 'round')} late)" if late else ""
        parts.append(f"{part['island']} {part['samples']}{note}")
    return f"{', '.join(parts)} samples"
