"""Which ranks differ, by a majority and by those that have trained; and the words for it."""

from __future__ import annotations

import pytest

from elasticzero.consistency.differences import by_majority, by_trained, difference, split

A, B, C = {"x": 1, "y": 5}, {"x": 2, "y": 5}, {"x": 3, "y": 6}


@pytest.mark.parametrize(
    ("tables", "odd", "accepted", "names"),
    [
        pytest.param([A, B], (), None, ("x",), id="two: none is right"),
        pytest.param([A, B, A], (1,), 0, ("x",), id="one of three"),
        pytest.param([B, A, A], (0,), 1, ("x",), id="rank 0 is odd"),
        pytest.param([A, A, B, B], (), None, ("x",), id="half and half"),
        pytest.param([A, A, B, C], (), None, ("x", "y"), id="half is no majority"),
        pytest.param([A, A, A, B, C], (3, 4), 0, ("x", "y"), id="two odd ones of five"),
        pytest.param([A, A, {"x": 1}], (2,), 0, ("y",), id="a name is missing"),
    ],
)
def test_more_than_half_of_the_ranks_are_right(
    tables: list[dict[str, int]], odd: tuple[int, ...], accepted: int | None, names: tuple[str, ...]
) -> None:
    verdict = by_majority(tables)
    assert (verdict.odd, verdict.accepted, verdict.names) == (odd, accepted, names)


@pytest.mark.parametrize(
    ("tables", "trained", "odd"),
    [
        pytest.param([A, B, B], [], (1, 2), id="nobody has trained: rank 0 is right"),
        pytest.param([A, B, B], [0], (1, 2), id="newcomers are judged by members"),
        pytest.param([A, B, B], [1], (0,), id="the member is not rank 0"),
        pytest.param([A, B, B], [0, 1, 2], (0,), id="most of those that trained"),
        pytest.param([A, B, C], [1, 2], (0, 2), id="of equally many that of the lowest rank"),
    ],
)
def test_those_that_have_trained_are_right(
    tables: list[dict[str, int]], trained: list[int], odd: tuple[int, ...]
) -> None:
    assert by_trained(tables, trained).odd == odd


def test_a_difference_is_told_with_both_values() -> None:
    nodes = ["a", "b", "c"]
    assert difference(2, [A, A, B], nodes, 0) == "rank 2 on c has x 2, the other ranks have 1"
    assert difference(1, [A, B, C], nodes, 0) == "rank 1 on b has x 2, rank 0 on a has 1"
    text = difference(2, [A, A, C], nodes, 0)
    assert text == "rank 2 on c has x 3 and y 6, the other ranks have 1 and 5"
    many = [{str(i): value for i in range(9)} for value in (0, 1)]
    assert "(and 6 more differ)" in difference(1, many, nodes, 0)
    missing = difference(1, [A, {"x": 1}], nodes, 0)
    assert missing == "rank 1 on b has y nothing, rank 0 on a has 5"


def test_ranks_are_listed_by_what_they_have() -> None:
    nodes = ["a", "a", "b", "b"]
    text = split([A, B, A, B], nodes, "x")
    assert text == "rank 0 on a and rank 2 on b have 1; rank 1 on a and rank 3 on b have 2"
    crowd = split([A] * 20 + [B], ["n"] * 21, "x")
    assert "and 12 more ranks have 1; rank 20 on n has 2" in crowd
