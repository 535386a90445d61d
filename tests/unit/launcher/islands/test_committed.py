"""Which rounds are new to a node that looks at the document again."""

from __future__ import annotations

from dataclasses import replace

from elasticzero.launcher.islands.committed import CommittedRounds
from elasticzero.launcher.protocol.rounds.documents import (
    Committed,
    Contributor,
    Fragment,
    Outer,
    Rounds,
    SampleOrder,
)

ORDER = SampleOrder(section=100, total=100, global_batch=4, digest="d")
PART = Contributor(island="a", incarnation="i", number=1, samples=8, staleness=0, claim=1, upto=8)


def rounds(*newest: int) -> Rounds:
    """Rounds whose fragments have committed so many."""
    fragments = [
        Fragment(
            recent=tuple(
                Committed(outer=Outer(round=n, digest=str(n)), contributors=(PART,) if n else ())
                for n in range(count + 1)
            )
        )
        for count in newest
    ]
    return Rounds(order=ORDER, fragments=tuple(fragments), seats=(), next=0)


def test_each_round_is_new_once_and_those_of_before_the_first_look_never() -> None:
    seen = CommittedRounds()
    assert seen.new_in(rounds(2, 1)) == []
    assert [(n, past.outer.round) for n, past in seen.new_in(rounds(4, 2))] == [
        (0, 3),
        (0, 4),
        (1, 2),
    ]
    assert seen.new_in(rounds(4, 2)) == []


def test_rounds_that_begin_anew_are_counted_anew() -> None:
    seen = CommittedRounds()
    seen.new_in(rounds(4))
    again = replace(rounds(1), history=2)
    assert seen.new_in(again) == []
    assert [past.outer.round for _, past in seen.new_in(replace(rounds(2), history=2))] == [2]


def test_rounds_that_are_void_are_new_when_they_are_made_again() -> None:
    seen = CommittedRounds()
    seen.new_in(rounds(4))
    assert seen.new_in(rounds(3)) == []
    assert [past.outer.round for _, past in seen.new_in(rounds(4))] == [4]
