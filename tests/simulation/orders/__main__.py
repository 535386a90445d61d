"""Play all orders of stories: `python -m tests.simulation.orders [STORY ...] [--delays N]`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.orders.pair import Pair
from tests.simulation.orders.search import PLACES, Result, explore, play
from tests.simulation.orders.stories import STORIES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.orders", description=__doc__)
    parser.add_argument("stories", nargs="*", choices=[*STORIES, []], help="default: all")
    parser.add_argument("--delays", type=int, default=2, help="most places that leave the order")
    parser.add_argument("--places", type=int, default=PLACES, help="only before so many events")
    parser.add_argument("--play", help="one order: its delays, with commas between")
    parser.add_argument(
        "--first",
        action="store_true",
        help="look for a failure: all stories with few delays, before any with more of them",
    )
    options = parser.parse_args()
    names = options.stories or list(STORIES)
    if options.play is not None:
        return trace(names[0], options.play)
    first = 1 if options.first else options.delays
    orders, failure = search(names, range(first, options.delays + 1), options.places)
    print(f"{orders} schedules: {failure or 'none broke a rule'}")
    return 1 if failure else 0


def search(names: list[str], delays: range, places: int) -> tuple[int, str]:
    """Plays stories until one breaks a rule.

    Args:
        names: Of the stories.
        delays: Most places that leave the order: all stories are played with each number of them.
        places: Only before so many events is a task delayed.

    Returns:
        How many orders were played, and which one broke a rule; empty: none did.
    """
    orders = 0
    for most in delays:
        for name in names:
            began_s = time.monotonic()
            result = explore(STORIES[name], delays=most, places=places)
            print(f"{summary(name, result)}, {time.monotonic() - began_s:.1f} s", flush=True)
            orders += result.orders
            if result.failure is not None:
                failure = f"{name} breaks {result.failure.reason} ({_command(name, result)})"
                return orders, failure
    return orders, ""


def summary(name: str, result: Result) -> str:
    return (
        f"{name}: {result.orders} orders, {result.states} distinct states, {result.events} events, "
        f"at most {result.longest} in one"
    )


def _command(name: str, result: Result) -> str:
    assert result.failure is not None
    delays = ",".join(map(str, result.failure.delays))
    return f"again: python -m tests.simulation.orders {name} --play '{delays}'"


def trace(name: str, delays: str) -> int:
    """One order for a reader; the exit status."""
    pair = Pair(STORIES[name], print)
    try:
        events = play(pair, tuple(int(number) for number in delays.split(",") if number))
    except AssertionError as error:
        print(f"{name} breaks {error}", file=sys.stderr)
        return 1
    finally:
        pair.close()
    print(f"{name}: {events} events")
    return 0


if __name__ == "__main__":
    sys.exit(main())
