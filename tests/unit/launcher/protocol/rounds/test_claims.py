"""The division of samples among islands."""

from __future__ import annotations

import pytest

from elasticzero.launcher.protocol.rounds.claims import share_of, split, united
from elasticzero.launcher.protocol.rounds.documents import Claim, Samples

CLAIMS = (
    Claim(number=3, samples=Samples(start=0, stop=10), batch=5),
    Claim(number=4, samples=Samples(start=30, stop=40), batch=5),
    Claim(number=5, samples=Samples(start=10, stop=20), batch=5),
)


@pytest.mark.parametrize("islands", [1, 2, 3, 7, 10])
def test_shares_make_up_the_global_batch(islands: int) -> None:
    shares = [share_of(10, place, islands) for place in range(islands)]
    assert sum(shares) == 10
    assert max(shares) - min(shares) <= 1


def test_each_island_has_a_sample_of_a_step() -> None:
    assert [share_of(2, place, 3) for place in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("number", "upto", "taken", "left"),
    [
        (3, 0, [], [(0, 10), (30, 40), (10, 20)]),
        (3, 4, [(0, 4)], [(4, 10), (30, 40), (10, 20)]),
        (3, 10, [(0, 10)], [(30, 40), (10, 20)]),
        (4, 33, [(0, 10), (30, 33)], [(33, 40), (10, 20)]),
        (5, 20, [(0, 10), (30, 40), (10, 20)], []),
        (5, 99, [(0, 10), (30, 40), (10, 20)], []),
    ],
)
def test_a_contribution_takes_earlier_claims_and_a_part_of_its_last(
    number: int, upto: int, taken: list[tuple[int, int]], left: list[tuple[int, int]]
) -> None:
    pieces, claims = split(CLAIMS, number, upto)
    assert [(piece.start, piece.stop) for piece in pieces] == taken
    assert [(claim.samples.start, claim.samples.stop) for claim in claims] == left


def test_pieces_that_touch_become_one() -> None:
    pieces = [Samples(start=a, stop=b) for a, b in [(7, 9), (0, 3), (3, 5), (12, 12), (20, 21)]]
    assert [(p.start, p.stop) for p in united(pieces, 100)] == [(0, 5), (7, 9), (20, 21)]
    assert [(p.start, p.stop) for p in united(pieces, 3)][:2] == [(0, 3), (3, 5)]
