"""Which rank is told that it is astray."""

from __future__ import annotations

import pytest

from elasticzero.comm.barriers import Call, check, marks
from elasticzero.errors import RetryError, UserError


def agreed(calls: list[Call]) -> tuple[int, int]:
    """The greatest of what the ranks give."""
    rank_marks = [marks(call, rank) for rank, call in enumerate(calls)]
    return max(a for a, _ in rank_marks), max(b for _, b in rank_marks)


@pytest.mark.parametrize("call", list(Call))
def test_ranks_at_one_call_go_on(call: Call) -> None:
    greatest = agreed([call] * 5)
    for rank in range(5):
        check(greatest, call, rank, "")


@pytest.mark.parametrize("astray", range(4))
@pytest.mark.parametrize("call", [call for call in Call if call is not Call.STEP])
def test_the_rank_that_is_elsewhere_is_named(call: Call, astray: int) -> None:
    calls = [Call.STEP] * 4
    calls[astray] = call
    greatest = agreed(calls)
    with pytest.raises(UserError, match=f"rank {astray} .* at train.py:7, while rank [0-3] is at "):
        check(greatest, call, astray, " at train.py:7")
    for rank in set(range(4)) - {astray}:
        with pytest.raises(RetryError, match=f"rank {astray} .*, while rank {rank} is at"):
            check(greatest, Call.STEP, rank, "")


def test_numbers_without_marks_say_nothing() -> None:
    check((-(1 << 63), -(1 << 63)), Call.STEP, 0, "")
