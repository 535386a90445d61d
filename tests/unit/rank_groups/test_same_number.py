"""One sum over the ranks tells whether all of them have the same number."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

from elasticzero.rank_groups.same_number import MODULUS, is_same, with_square


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_exactly_equal_numbers_are_the_same(ranks: int) -> None:
    values = (0, 1, 2, 3, MODULUS - 2, MODULUS - 1)
    for numbers in combinations_with_replacement(values, ranks):
        pairs = [with_square(number) for number in numbers]
        sums = (sum(first for first, _ in pairs), sum(second for _, second in pairs))
        for number in numbers:
            assert is_same(number, ranks, sums) == (len(set(numbers)) == 1), numbers


def test_sums_of_the_largest_numbers_are_exact_for_thousands_of_ranks() -> None:
    largest, square = with_square(MODULUS - 1)
    ranks = 8192
    assert ranks * square < 2**53
    assert is_same(MODULUS - 1, ranks, (ranks * largest, ranks * square))
    assert not is_same(MODULUS - 1, ranks, (ranks * largest - 1, ranks * square - 1))
