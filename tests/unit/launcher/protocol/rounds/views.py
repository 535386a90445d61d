"""Builds reports and rounds for the tests of the rules."""

from __future__ import annotations

from typing import Any

from elasticzero.launcher.protocol.rounds.documents import (
    Contribution,
    FragmentReport,
    IslandReport,
    Origin,
    Outer,
    Rounds,
    SampleOrder,
    Sum,
)
from elasticzero.launcher.protocol.rounds.lead import LeadView, RoundSettings, lead

ORDER = SampleOrder(section=100, total=250, global_batch=10, digest="order")
START = Outer(round=0, digest="start")
SETTINGS = RoundSettings(every=2)


def report(
    island: str,
    seat: int = 0,
    claim: int = 0,
    ahead: int = 1,
    is_over: bool = False,
    **part: Any,
) -> IslandReport:
    """A report of an island with one fragment, whose part has these fields."""
    return IslandReport(
        incarnation=f"{island}.1",
        address=f"{island}:1",
        order=ORDER,
        origin=Origin(),
        fragments=(FragmentReport(**{"outer": START, **part}),),
        seat=seat,
        claim=claim,
        ahead=ahead,
        is_over=is_over,
    )


def contribution(number: int = 1, claim: int = 1, upto: int = 10, **fields: Any) -> Contribution:
    values = {"base": 0, "samples": 10, "steps": 2, "digest": f"sent {number}", **fields}
    return Contribution(number=number, claim=claim, upto=upto, **values)


def result(attempt: int = 1, outer: str = "one") -> Sum:
    return Sum(attempt=attempt, mean=f"mean of {outer}", outer=outer)


def begun(*islands: str, settings: RoundSettings = SETTINGS) -> Rounds:
    """Rounds in which these islands have a seat and a claim each."""
    rounds = following(None, *(report(island) for island in islands), settings=settings)
    seated = [report(island, seat) for seat, island in enumerate(islands, 1)]
    return following(rounds, *seated, settings=settings)


def following(
    rounds: Rounds | None, *reports: IslandReport, settings: RoundSettings = SETTINGS, **view: Any
) -> Rounds:
    """What the lead writes of these reports, whose islands are in the order of their seats."""
    by_island = {report.address.removesuffix(":1"): report for report in reports}
    written = lead(LeadView(rounds=rounds, reports=by_island, **view), settings)
    assert written is not None
    return written
