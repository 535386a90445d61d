"""Delay-bounded search (Emmi, Qadeer and Rakamaric, 2011): every order that leaves a story's
default order in a few places, without those that come to a state from which all was played.

An order is named by its delays: the numbers of the events before which the task that was to come
next was put behind all others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.orders.pair import Pair, Story
from tests.simulation.rules import Violation

PLACES = 40
"""Only before one of the first so many events is a task delayed."""
MOST_EVENTS = 400
"""An order of more events gets nowhere."""
Delays = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """An order that broke a rule."""

    delays: Delays
    reason: str


@dataclass(slots=True)
class Result:
    """What a search has played."""

    orders: int = 0
    states: int = 0
    """Distinct ones."""
    events: int = 0
    longest: int = 0
    """Events of the longest order."""
    failure: Failure | None = None


@dataclass(slots=True)
class Seen:
    """The states from which everything was played, by their digests."""

    _best: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By state: how many delays were left there, and in how many places they could be."""

    def __len__(self) -> int:
        return len(self._best)

    def covers(self, digest: int, delays: int, places: int) -> bool:
        """Whether a state was played with as much left, or is now to be played: that is noted."""
        left = (delays, places if delays else 0)
        before = self._best.setdefault(digest, [])
        if any(d >= left[0] and p >= left[1] for d, p in before):
            return True
        before.append(left)
        return False


def explore(story: Story, *, delays: int, places: int = PLACES) -> Result:
    """Plays all orders of a story, the ones with the fewest delays first, until one breaks a
    rule."""
    result, seen = Result(), Seen()
    queue: deque[Delays] = deque([()])
    while queue and result.failure is None:
        order = queue.popleft()
        result.orders += 1
        queue += _play_on(story, order, delays - len(order), places, seen, result)
    result.states = len(seen)
    return result


def _play_on(
    story: Story,
    order: Delays,
    left: int,
    places: int,
    seen: Seen,
    result: Result,
) -> list[Delays]:
    """Plays one order, until it comes to a state that was played; returns those with one delay
    after its last one."""
    following: list[Delays] = []

    def is_new(pair: Pair, event: int, task: str) -> bool:
        if seen.covers(pair.digest(), left, max(0, places - event)):
            return False
        if left and event < places and not pair.is_alone(task):
            following.append((*order, event))
        return True

    pair = Pair(story)
    try:
        events = play(pair, order, is_new)
        result.events += events
        result.longest = max(result.longest, events)
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to an order
        result.failure = Failure(order, f"{type(error).__name__}: {error}")
    finally:
        pair.close()
    return following


def play(
    pair: Pair, order: Delays, is_new: Callable[[Pair, int, str], bool] = lambda *_: True
) -> int:
    """Plays one order to its end; returns how many events it had.

    pair: before the first event. is_new: whether to go on from a place after the last delay.
    Raises `Violation` where a rule is broken.
    """
    delays = list(order)
    for event in range(MOST_EVENTS):
        task = pair.next()
        while task is not None and delays and delays[0] == event:
            del delays[0]
            pair.delay(task)
            task = pair.next()
        if task is None:
            pair.at_the_end()
            return event
        if not delays and not is_new(pair, event, task):
            return event
        pair.go_on(task)
    pair.stuck()
    raise Violation("R7: no end")
