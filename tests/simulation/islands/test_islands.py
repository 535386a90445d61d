"""Seeded schedules of islands and their faults on virtual time, each judged by every promise."""

from __future__ import annotations

import pytest

from tests.simulation.islands.drawing import KINDS, draw
from tests.simulation.islands.play import Play
from tests.support.cases import slow

PART = 50
"""Schedules that one test runs."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "first", [0, PART, *map(slow, range(2 * PART, 1_000, PART))], ids=lambda first: f"from-{first}"
)
def test_islands_keep_every_promise(first: int) -> None:
    for seed in range(first, first + PART):
        try:
            Play(seed).run()
        except Exception as error:
            error.add_note(f"seed {seed}: python -m tests.simulation.islands {seed}")
            raise


def test_the_quick_schedules_have_what_is_rare() -> None:
    """Faults of each kind, rounds that become void, contributions that are dropped."""
    told: list[str] = []
    plays = [Play(seed, told.append) for seed in range(2 * PART)]
    for play in plays:
        play.run()
    assert all(any(f": {kind}: " in line for line in told) for kind in KINDS)
    assert any(play.promises.voided for play in plays)
    assert any("begins anew" in line for line in told)
    drawn = [draw(seed) for seed in range(2 * PART)]
    assert {plan.diloco.fragments for plan in drawn} == {1, 2, 3}


def test_a_seed_plays_the_same_way_each_time() -> None:
    def told(seed: int) -> list[str]:
        lines: list[str] = []
        Play(seed, lines.append).run()
        return lines

    assert told(1) == told(1)
