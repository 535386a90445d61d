"""Adds up what the islands of a job have averaged, from their agents' lives. Pure.

Each island is a job in itself, with generations and steps of its own, so that a report is about one
of them; rounds are what they have in common. Each island notes the rounds of all.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean

from elasticzero.ops.report.life import AgentLife, SeenContribution
from elasticzero.ops.report.model import IslandSummary, RoundsSummary


def rounds_summary(lives: Iterable[AgentLife], shown: str) -> RoundsSummary | None:
    """Returns what the islands have averaged; None: there are none, or no round.

    Args:
        lives: The lives of their agents.
        shown: The island that the rest of the report is about.
    """
    seen: dict[tuple[int, int, int], tuple[SeenContribution, ...]] = {}
    for life in lives:
        seen |= life.averaged
    if not seen:
        return None
    last = max(fragment for _, fragment, _ in seen)
    of_last = [parts for (_, fragment, _), parts in seen.items() if fragment == last]
    by_island: dict[str, list[SeenContribution]] = {}
    for part in (part for parts in of_last for part in parts):
        by_island.setdefault(part.island, []).append(part)
    return RoundsSummary(
        rounds=len(of_last),
        samples=sum(part.samples for parts in of_last for part in parts),
        islands=tuple(
            IslandSummary(
                island=island,
                rounds=len(parts),
                samples=sum(part.samples for part in parts),
                late=mean(part.late for part in parts),
            )
            for island, parts in sorted(by_island.items())
        ),
        shown=shown,
    )
