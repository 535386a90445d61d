"""What the lead of the islands writes, rule by rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticzero.launcher.protocol.documents import to_bytes
from elasticzero.launcher.protocol.rounds.documents import (
    FragmentReport,
    IslandReport,
    Origin,
    Outer,
    Rounds,
    Samples,
    Settled,
    Unreachable,
)
from elasticzero.launcher.protocol.rounds.lead import LeadView, RoundSettings, lead
from elasticzero.serialization import decode, parse_json
from tests.unit.launcher.protocol.rounds.views import (
    SETTINGS,
    START,
    begun,
    contribution,
    following,
    report,
    result,
)

ONE = Outer(round=1, digest="one")


def closed(*islands: str) -> Rounds:
    """Rounds whose first one is closed with a contribution of each of these islands."""
    return following(begun(*islands), *contributed(*islands))


def contributed(*islands: str, **part: Any) -> list[IslandReport]:
    return [
        report(island, seat, contribution=contribution(upto=10 * seat), **part)
        for seat, island in enumerate(islands, 1)
    ]


def test_the_first_island_begins_the_rounds_once_all_are_there() -> None:
    reports = {"a": report("a"), "b": report("b")}
    assert lead(LeadView(rounds=None, reports={}), SETTINGS) is None
    assert lead(LeadView(rounds=None, reports=reports, complete=False), SETTINGS) is None
    rounds = following(None, *reports.values())
    assert [seat.place for seat in rounds.seats] == [("a", "a.1"), ("b", "b.1")]
    assert [seat.number for seat in rounds.seats] == [1, 2]
    assert rounds.fragments[0].outer == START


def test_no_rounds_begin_with_an_island_that_has_no_state() -> None:
    reports = {"a": report("a", outer=None), "b": report("b")}
    assert lead(LeadView(rounds=None, reports=reports), SETTINGS) is None


def test_an_island_that_goes_over_other_samples_has_no_seat() -> None:
    other = replace(report("b"), order=replace(report("b").order, total=7))
    assert [s.island for s in following(begun("a"), report("a", 1), other).seats] == ["a"]


def test_claims_share_a_step_of_all_islands() -> None:
    claims = [seat.claims for seat in begun("a", "b", "c").seats]
    assert [(c.samples.start, c.samples.stop, c.batch) for (c,) in claims] == [
        (0, 6, 3),
        (6, 12, 3),
        (12, 20, 4),
    ]


def test_an_island_is_given_claims_while_it_asks_and_there_are_samples() -> None:
    rounds = begun("a")
    for claim in range(1, 20):
        rounds = following(rounds, report("a", 1, claim=claim))
    spans = [claim.samples for claim in rounds.seats[0].claims]
    assert [(s.start, s.stop) for s in spans[4:6]] == [(80, 100), (100, 120)]
    assert spans[-1] == Samples(start=240, stop=250)
    assert rounds.next == 250
    assert rounds.seats[0].granted == len(spans) == 13


def test_an_island_that_asks_for_several_leaves_others_their_part() -> None:
    rounds = following(begun("a"), report("a", 1, ahead=50))
    ahead = sum(len(claim.samples) for claim in rounds.seats[0].claims)
    assert 250 // 3 <= ahead <= 250 // 2


def test_a_lost_islands_samples_are_given_first_to_others() -> None:
    rounds = following(begun("a", "b"), report("a", 1, claim=1))
    assert [seat.island for seat in rounds.seats] == ["a"]
    assert rounds.seats[0].claims[1].samples == Samples(start=10, stop=20)
    assert rounds.next == 20
    assert rounds.free == ()


def test_an_island_that_may_come_back_keeps_its_seat() -> None:
    before = begun("a", "b")
    assert following(before, report("a", 1), silent={"b"}) == before


def test_a_round_is_closed_when_all_have_contributed() -> None:
    waiting = following(begun("a", "b"), contributed("a")[0], report("b", 2))
    assert waiting.fragments[0].closing is None
    assert not waiting.fragments[0].called
    closing = closed("a", "b").fragments[0].closing
    assert closing is not None
    assert (closing.attempt, closing.owner) == (1, "a")
    assert [(c.island, c.number, c.samples, c.staleness) for c in closing.contributors] == [
        ("a", 1, 10, 0),
        ("b", 1, 10, 0),
    ]


@pytest.mark.parametrize("samples", [0, 30])
def test_all_that_the_rounds_begin_with_are_in_the_first_round(samples: int) -> None:
    """Also where one is faster than another has its first samples, and where rounds go on from a
    checkpoint."""
    origin = Origin(next=samples, samples=samples)

    def at(island: str, seat: int = 0, **part: Any) -> IslandReport:
        return replace(report(island, seat, **part), origin=origin)

    rounds = following(None, at("a"), at("b"))
    rounds = following(rounds, at("a", 1), at("b"))
    upto = samples + 10
    ready = at("a", 1, claim=1, contribution=contribution(upto=upto, waits=True))
    rounds = following(rounds, ready, at("b"))
    assert [seat.granted for seat in rounds.seats] == [1, 0]
    assert rounds.fragments[0].closing is None and not rounds.fragments[0].called
    leaving = replace(at("b"), ahead=0)
    assert following(rounds, ready, leaving).fragments[0].closing is not None
    rounds = following(rounds, ready, at("b", 2))
    assert [seat.granted for seat in rounds.seats] == [1, 1]
    other = at("b", 2, claim=1, contribution=contribution(upto=upto + 10))
    closing = following(rounds, ready, other).fragments[0].closing
    assert closing is not None and [c.island for c in closing.contributors] == ["a", "b"]


def test_a_quorum_calls_the_others_and_closes_after_the_grace() -> None:
    settings = RoundSettings(every=2, quorum=0.5)
    before = begun("a", "b", settings=settings)
    called = following(before, contributed("a")[0], report("b", 2), settings=settings)
    assert called.fragments[0].called
    assert called.fragments[0].closing is None
    past = report("a", 1, contribution=contribution(waits=True))
    closing = following(called, past, report("b", 2), settings=settings).fragments[0].closing
    assert closing is not None
    assert [c.island for c in closing.contributors] == ["a"]


def test_a_newcomer_is_not_waited_for_longer_than_the_grace() -> None:
    """An island that has been in no round yet does not count for the quorum."""
    rounds = begun("a", "b")
    settled = (Settled(number=1, round=1),)
    seats = (replace(rounds.seats[0], settled=settled), rounds.seats[1])
    rounds = replace(rounds, seats=seats)
    second = contribution(2, waits=True)
    after = following(rounds, report("a", 1, contribution=second), report("b", 2))
    assert after.fragments[0].called
    assert after.fragments[0].closing is not None


def test_an_island_that_leaves_is_not_waited_for() -> None:
    before = begun("a", "b")
    rounds = following(before, contributed("a")[0], report("b", 2, ahead=0))
    assert rounds.fragments[0].closing is not None


def test_an_owner_holds_the_newest_state() -> None:
    rounds = begun("a", "b")
    newest = (*rounds.fragments[0].recent, replace(rounds.fragments[0].recent[0], outer=ONE))
    rounds = replace(rounds, fragments=(replace(rounds.fragments[0], recent=newest),))
    late = report("a", 1, contribution=contribution(base=0))
    ready = report("b", 2, outer=ONE, contribution=contribution(base=1, upto=20))
    closing = following(rounds, late, ready).fragments[0].closing
    assert closing is not None
    assert closing.owner == "b"
    assert [c.staleness for c in closing.contributors] == [1, 0]


def test_a_round_is_committed_once_two_islands_have_it() -> None:
    rounds = closed("a", "b", "c")
    one = following(rounds, contributed("a", sum=result())[0], *contributed("a", "b", "c")[1:])
    assert one.fragments[0].outer == START
    two = [*contributed("a", "b", sum=result()), contributed("a", "b", "c")[2]]
    after = following(rounds, *two)
    assert after.fragments[0].outer == ONE
    assert after.fragments[0].closing is None
    assert {seat.settled for seat in after.seats} == {(Settled(number=1, round=1),)}
    assert after.samples == sum(len(c.taken[0]) for c in after.fragments[0].recent[-1].contributors)


def test_results_that_differ_are_not_two_of_one() -> None:
    rounds = closed("a", "b")
    first, second = contributed("a", "b")
    odd = replace(second, fragments=(replace(second.fragments[0], sum=result(outer="odd")),))
    having = replace(first, fragments=(replace(first.fragments[0], sum=result()),))
    assert following(rounds, having, odd).fragments[0].outer == START


def test_the_only_island_commits_alone() -> None:
    after = following(closed("a"), *contributed("a", sum=result()))
    assert after.fragments[0].outer == ONE


def test_a_part_of_a_claim_is_committed() -> None:
    part = report("a", 1, contribution=contribution(upto=7, samples=7))
    rounds = following(begun("a"), part)
    having = replace(part, fragments=(replace(part.fragments[0], sum=result()),))
    after = following(rounds, having)
    assert after.samples == 7
    assert after.seats[0].claims[0].samples == Samples(start=7, stop=20)


def test_an_attempt_is_given_up_when_a_contributor_is_lost() -> None:
    rounds = following(closed("a", "b"), *contributed("a"))
    closing = rounds.fragments[0].closing
    assert closing is not None
    assert closing.attempt == 2
    assert [c.island for c in closing.contributors] == ["a"]


def test_an_attempt_goes_on_without_a_contributor_whose_part_is_summed() -> None:
    rounds = following(closed("a", "b", "c"), *contributed("a", "b", sum=result()))
    assert rounds.fragments[0].outer == ONE
    assert [c.island for c in rounds.fragments[0].recent[-1].contributors] == ["a", "b", "c"]


def test_another_owner_takes_its_turn_when_the_first_takes_too_long() -> None:
    reports = contributed("a", "b")
    rounds = following(closed("a", "b"), *reports, overdue={(0, 1)})
    closing = rounds.fragments[0].closing
    assert closing is not None
    assert (closing.attempt, closing.owner) == (2, "b")


def test_what_cannot_be_fetched_is_left_out_of_the_round() -> None:
    cannot = Unreachable(attempt=1, islands=("b",))
    first = contributed("a", unreachable=cannot)[0]
    rounds = following(closed("a", "b"), first, contributed("a", "b")[1])
    assert rounds.fragments[0].left_out == ("b",)
    closing = rounds.fragments[0].closing
    assert closing is not None
    assert [c.island for c in closing.contributors] == ["a"]


def test_another_owner_tries_where_nobody_could_be_reached() -> None:
    rounds = closed("a", "b")
    fragment = replace(rounds.fragments[0], closing=None, left_out=("a", "b"))
    rounds = following(replace(rounds, fragments=(fragment,)), *contributed("a", "b"))
    closing = rounds.fragments[0].closing
    assert rounds.fragments[0].left_out == ()
    assert closing is not None
    assert closing.owner == "b"


def test_a_contribution_counts_once() -> None:
    after = following(closed("a"), *contributed("a", sum=result()))
    again = following(after, *contributed("a", outer=ONE))
    assert again.fragments[0].closing is None


def test_a_contribution_that_comes_too_late_is_dropped() -> None:
    settings = RoundSettings(every=2, max_staleness=0)
    rounds = begun("a", "b", settings=settings)
    newest = (*rounds.fragments[0].recent, replace(rounds.fragments[0].recent[0], outer=ONE))
    rounds = replace(rounds, fragments=(replace(rounds.fragments[0], recent=newest),))
    stale = report("a", 1, contribution=contribution(base=0), ahead=0)
    after = following(rounds, stale, report("b", 2, outer=ONE), settings=settings)
    assert after.seats[0].settled == (Settled(number=1, round=None),)
    assert after.seats[0].claims == ()
    assert after.free == (Samples(start=0, stop=10),)


def test_rounds_that_nobody_holds_are_void() -> None:
    """The islands that had the round are gone; one that contributed to it has not fetched it."""
    two = [*contributed("a", "b", sum=result()), contributed("a", "b", "c")[2]]
    rounds = following(closed("a", "b", "c"), *two)
    assert rounds.samples
    after = following(rounds, contributed("a", "b", "c")[2])
    assert after.fragments[0].outer == START
    assert after.samples == 0
    assert after.seats[0].settled == (Settled(number=1, round=None),)
    assert sum(map(len, after.uncommitted())) == after.next


def test_rounds_stay_while_islands_may_come_back() -> None:
    two = [*contributed("a", "b", sum=result()), contributed("a", "b", "c")[2]]
    rounds = following(closed("a", "b", "c"), *two)
    after = following(rounds, contributed("a", "b", "c")[2], silent={"a", "b"})
    assert after.fragments[0].outer == ONE


def test_of_rounds_that_all_islands_have_passed_the_states_are_kept() -> None:
    rounds = following(closed("a", "b"), *contributed("a", "b", sum=result()))
    recent = tuple(
        replace(rounds.fragments[0].recent[1], outer=Outer(round=number, digest=str(number)))
        for number in range(100)
    )
    fragment = replace(rounds.fragments[0], recent=recent)
    holder = report("a", 1, outer=recent[-1].outer)
    after = following(replace(rounds, fragments=(fragment,)), holder).fragments[0].recent
    assert [past.outer for past in after] == [past.outer for past in recent[-32:]]
    assert after[-1].contributors
    assert not any(earlier.contributors for earlier in after[:-1])


def test_where_all_islands_are_lost_the_first_one_begins_again() -> None:
    other = Outer(round=5, digest="of a checkpoint")
    origin = Origin(next=40, free=(Samples(start=3, stop=9),), samples=34)
    part = FragmentReport(outer=other)
    newcomer = replace(report("z"), fragments=(part,), origin=origin)
    after = following(begun("a", "b"), newcomer)
    assert after.history == 2
    assert after.fragments[0].outer == other
    assert (after.next, after.samples, after.free) == (40, 34, (Samples(start=3, stop=9),))
    assert [seat.number for seat in after.seats] == [3]


@pytest.mark.parametrize("pending", [False, True])
def test_the_rounds_are_done_when_nothing_is_left(pending: bool) -> None:
    rounds = begun("a")
    seats = (replace(rounds.seats[0], claims=()),)
    rounds = replace(rounds, seats=seats, next=250, samples=250)
    written = report("a", 1, is_over=not pending)
    after = following(rounds, written)
    assert after.done is not pending
    if after.done:
        assert following(after, report("z")) == after


def test_the_documents_are_read_as_they_were_written() -> None:
    for rounds in (closed("a", "b"), begun("a")):
        assert decode(Rounds, parse_json(to_bytes(rounds), "rounds"), "rounds") == rounds
    written = contributed("a", sum=result())[0]
    assert decode(type(written), parse_json(to_bytes(written), "report"), "report") == written
