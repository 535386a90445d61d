"""All orders of two agents' events that leave the default order in a few places."""

from __future__ import annotations

import pytest

from tests.simulation.orders.__main__ import summary
from tests.simulation.orders.pair import Pair
from tests.simulation.orders.search import PLACES, Seen, explore, play
from tests.simulation.orders.stories import STORIES

QUICK = ((1, 40), (2, 12))
"""How many delays, before so many of the first events."""
DELAYS = 3
each_story = pytest.mark.parametrize("name", STORIES)


@pytest.mark.parametrize(("delays", "places"), QUICK)
@each_story
def test_orders_with_few_delays_keep_every_rule(name: str, delays: int, places: int) -> None:
    check(name, delays, places)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@each_story
def test_all_orders_keep_every_rule(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = check(name, DELAYS, PLACES)
    with capsys.disabled():
        print(f"\n{told}")


def check(name: str, delays: int, places: int) -> str:
    """Plays the orders of a story, none of which may break a rule; returns how many there were."""
    result = explore(STORIES[name], delays=delays, places=places)
    assert result.failure is None, result.failure
    assert result.states > result.orders > 1
    return summary(name, result)


@each_story
def test_an_order_is_played_alike_each_time(name: str) -> None:
    def digests(order: tuple[int, ...]) -> list[int]:
        states: list[int] = []

        def note(pair: Pair, event: int, task: str) -> bool:
            states.append(pair.digest())
            return True

        pair = Pair(STORIES[name])
        play(pair, order, note)
        pair.close()
        return states

    assert digests((9,)) == digests((9,))
    assert digests((9,)) != digests(())[9:]


def test_a_state_counts_as_played_where_as_much_was_left() -> None:
    seen = Seen()
    assert not seen.covers(1, delays=2, places=10)
    assert seen.covers(1, delays=2, places=9)
    assert seen.covers(1, delays=0, places=40)
    assert not seen.covers(1, delays=1, places=11)
    assert not seen.covers(1, delays=3, places=5)
    assert len(seen) == 1
