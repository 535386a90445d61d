"""What an island fetches and computes next."""

from __future__ import annotations

from typing import Any

import pytest

from elasticzero.launcher.protocol.rounds.documents import IslandReport, Outer, Rounds
from elasticzero.launcher.protocol.rounds.island import (
    Advance,
    SumUp,
    TakeOuter,
    TakeSum,
    Task,
    tasks,
)
from tests.unit.launcher.protocol.rounds.views import (
    START,
    begun,
    contribution,
    following,
    report,
    result,
)

ONE = Outer(round=1, digest="one")


def ready(island: str, seat: int, **part: Any) -> IslandReport:
    values = {"contribution": contribution(upto=10 * seat), **part}
    return report(island, seat, **values)


CLOSED = following(begun("a", "b", "c"), *(ready(n, s) for s, n in enumerate("abc", 1)))
"""Rounds with a first attempt, which is island a's."""
COMMITTED = following(
    CLOSED, ready("a", 1, sum=result()), ready("b", 2, sum=result()), ready("c", 3)
)


def task_of(rounds: Rounds, island: str, *reports: IslandReport) -> Task | None:
    by_island = {report.address.removesuffix(":1"): report for report in reports}
    parts = dict(enumerate(by_island[island].fragments))
    return next(tasks(rounds, by_island, island, parts), None)


def test_the_owner_sums_up() -> None:
    closing = CLOSED.fragments[0].closing
    assert closing is not None
    assert task_of(CLOSED, "a", ready("a", 1)) == SumUp(
        fragment=0, attempt=1, base=START, contributors=closing.contributors
    )


def test_others_wait_for_the_owner_and_take_its_sum() -> None:
    assert task_of(CLOSED, "b", ready("a", 1), ready("b", 2)) is None
    first, second = ready("a", 1, sum=result()), ready("c", 3, sum=result())
    assert task_of(CLOSED, "b", second, first, ready("b", 2)) == TakeSum(
        fragment=0, base=START, sum=result(), contributions=3, sources=("a", "c")
    )


def test_an_owner_that_begins_anew_takes_the_sum_that_others_have() -> None:
    other = ready("b", 2, sum=result())
    assert isinstance(task_of(CLOSED, "a", ready("a", 1), other), TakeSum)


@pytest.mark.parametrize("attempt", [0, 2])
def test_a_sum_of_another_attempt_is_none(attempt: int) -> None:
    other = ready("b", 2, sum=result(attempt))
    assert isinstance(task_of(CLOSED, "a", ready("a", 1, sum=result(attempt)), other), SumUp)


def test_who_has_the_sum_has_nothing_to_do_until_it_is_committed() -> None:
    having = ready("a", 1, sum=result())
    assert task_of(CLOSED, "a", having) is None
    assert task_of(COMMITTED, "a", having) == Advance(fragment=0, outer=ONE)


def test_who_has_it_not_fetches_the_state() -> None:
    late = ready("c", 3, sum=result(outer="odd"))
    there = ready("a", 1, outer=ONE)
    assert task_of(COMMITTED, "c", there, late) == TakeOuter(fragment=0, outer=ONE, sources=("a",))
    assert task_of(COMMITTED, "c", ready("a", 1), late) is None
