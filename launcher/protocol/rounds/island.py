"""Decides what an island fetches and computes, from the rounds and what it holds.

Pure: `tasks` maps documents and what the island has to what is to be done next for each fragment,
which is one thing at most. Each task can be given up, or done twice, without harm: its result has a
digest that was agreed on, and what it makes begins to count only by a later report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from elasticzero.launcher.protocol.rounds.documents import (
    Contributor,
    Fragment,
    FragmentReport,
    IslandReport,
    Outer,
    Rounds,
    Sum,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SumUp:
    """Fetches the contributions to a round, and computes their mean and the next outer state."""

    fragment: int
    attempt: int
    base: Outer
    contributors: tuple[Contributor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSum:
    """Fetches the mean that another island has, and computes the next outer state."""

    fragment: int
    base: Outer
    sum: Sum
    contributions: int
    """Number of contributions that it is of."""
    sources: tuple[str, ...]
    """Islands that have it, the owner first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """Takes the outer state that was computed as the newest: its round is committed."""

    fragment: int
    outer: Outer


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOuter:
    """Fetches the newest outer state from another island."""

    fragment: int
    outer: Outer
    sources: tuple[str, ...]
    """Islands that hold it."""


Task = SumUp | TakeSum | Advance | TakeOuter


def tasks(
    rounds: Rounds,
    reports: Mapping[str, IslandReport],
    island: str,
    parts: Mapping[int, FragmentReport],
) -> Iterator[Task]:
    """Yields what the island is to do next, one task for each fragment at most.

    Args:
        rounds: The document of the rounds.
        reports: Reports of the islands that live.
        island: This island.
        parts: What it has of each fragment, by number.
    """
    for number, fragment in enumerate(rounds.fragments):
        task = _task(fragment, number, reports, island, parts[number])
        if task is not None:
            yield task


def _task(
    fragment: Fragment,
    number: int,
    reports: Mapping[str, IslandReport],
    island: str,
    part: FragmentReport,
) -> Task | None:
    """Returns the task for one fragment; None: there is nothing to do.

    Args:
        fragment: Its rounds.
        number: Its number.
        reports: Reports of the islands that live.
        island: This island.
        part: What this island has of it.
    """
    newest, closing = fragment.outer, fragment.closing
    if part.outer != newest:
        return _way_to(fragment, number, reports, island, part)
    if closing is None or (part.sum is not None and part.sum.attempt == closing.attempt):
        return None
    results = {
        name: report.fragments[number].sum for name, report in reports.items() if name != island
    }
    ready = {name: s for name, s in results.items() if s and s.attempt == closing.attempt}
    agreed = ready.get(closing.owner) or next(iter(ready.values()), None)
    if closing.owner == island and agreed is None:
        return SumUp(
            fragment=number,
            attempt=closing.attempt,
            base=newest,
            contributors=closing.contributors,
        )
    if agreed is None:
        return None
    sources = tuple(name for name, result in ready.items() if result == agreed)
    first = tuple(name for name in sources if name == closing.owner)
    sources = (*first, *(name for name in sources if name not in first))
    return TakeSum(
        fragment=number,
        base=newest,
        sum=agreed,
        contributions=len(closing.contributors),
        sources=sources,
    )


def _way_to(
    fragment: Fragment,
    number: int,
    reports: Mapping[str, IslandReport],
    island: str,
    part: FragmentReport,
) -> Task | None:
    """Returns what brings the island to the newest state; None: nobody has it who could be asked.

    Args:
        fragment: The rounds of the fragment.
        number: Its number.
        reports: Reports of the islands that live.
        island: This island.
        part: What this island has of it.
    """
    newest = fragment.recent[-1]
    result = part.sum
    if result is not None and (result.attempt, result.outer) == (
        newest.attempt,
        newest.outer.digest,
    ):
        return Advance(fragment=number, outer=newest.outer)
    sources = tuple(
        name
        for name, report in reports.items()
        if name != island and report.fragments[number].outer == newest.outer
    )
    if not sources:
        return None
    return TakeOuter(fragment=number, outer=newest.outer, sources=sources)
