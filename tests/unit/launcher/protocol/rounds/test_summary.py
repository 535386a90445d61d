"""What people are shown of the rounds."""

from __future__ import annotations

from dataclasses import replace

from elasticzero.launcher.cli.rounds_status import rounds_text
from elasticzero.launcher.protocol.rounds.documents import Committed, Contributor, Outer, Samples
from elasticzero.launcher.protocol.rounds.summary import summary_of
from tests.unit.launcher.protocol.rounds.views import begun, contribution, report

BEGUN = begun("a", "b", "c")
AVERAGED = (
    Contributor(
        island="a", incarnation="a.1", number=4, samples=1600, staleness=0, claim=4, upto=10
    ),
    Contributor(
        island="b", incarnation="b.1", number=2, samples=800, staleness=2, claim=2, upto=10
    ),
)
NEWEST = Outer(round=7, digest="seven")
(FRAGMENT,) = BEGUN.fragments
ROUNDS = replace(
    BEGUN,
    fragments=(
        replace(FRAGMENT, recent=(Committed(outer=NEWEST, attempt=7, contributors=AVERAGED),)),
    ),
    samples=120,
    free=(Samples(start=3, stop=8),),
)
REPORTS = {
    "a": report("a", 1, outer=NEWEST, contribution=contribution(samples=400)),
    "b": report("b", 2, outer=replace(NEWEST, round=6)),
    "c": report("c", 3, outer=None),
}


def test_it_says_what_each_island_has() -> None:
    summary = summary_of(ROUNDS, REPORTS)
    assert (summary.round, summary.samples, summary.total, summary.given_back) == (7, 120, 250, 5)
    assert not summary.is_over
    on_hand = sum(len(claim.samples) for claim in BEGUN.seats[0].claims)
    rows = [(i.island, i.round, i.samples, i.staleness, i.waiting) for i in summary.islands]
    assert rows == [
        ("a", 7, 1600, 0, 400),
        ("b", 6, 800, 2, None),
        ("c", None, None, None, None),
    ]
    assert summary.islands[0].on_hand == on_hand > 0


def test_the_command_shows_it() -> None:
    lines = rounds_text("run", ROUNDS, REPORTS).splitlines()
    assert (
        lines[0]
        == "job run: 3 islands, round 7, 120 of 250 samples are in committed rounds (48.0%)"
    )
    cells = [line.split() for line in lines[1:5]]
    on_hand = str(summary_of(ROUNDS, REPORTS).islands[0].on_hand)
    assert cells[1] == ["a", "7", "1,600", "400", on_hand, "a:1"]
    assert cells[2][:5] == ["b", "6", "800,", "2", "late"]
    assert cells[3][:4] == ["c", "-", "-", "-"]
    assert lines[5:] == [
        "given back by islands: 5 samples",
        "of one island: elasticzero status --job run/islands/a",
    ]
