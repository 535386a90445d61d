"""Drops from a failing draw what its failure does not need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.integration.generator.calls import MEAN
from tests.integration.generator.draws import ROWS, Draw, World
from tests.integration.generator.optimizers import PLAIN
from tests.integration.generator.schedules import NONE

MOST_TRIES = 40


def shrink(draw: Draw, fails: Callable[[Draw], bool], most: int = MOST_TRIES) -> Draw:
    """Returns a draw that fails as well, and of which nothing can be dropped.

    Args:
        draw: A draw that fails.
        fails: Plays a draw, and returns whether it fails too.
        most: Number of draws that are played at most.
    """
    tried: list[Draw] = []
    while (smaller := _smaller(draw, fails, tried, most)) is not None:
        draw = smaller
    return draw


def _smaller(
    draw: Draw, fails: Callable[[Draw], bool], tried: list[Draw], most: int
) -> Draw | None:
    """Returns a draw with one thing less that fails; None: there is none, or all tries are made."""
    for candidate in simpler(draw):
        if candidate in tried:
            continue
        if len(tried) == most:
            return None
        tried.append(candidate)
        if fails(candidate):
            return candidate
    return None


def simpler(draw: Draw) -> Iterator[Draw]:
    """Yields draws that have one thing less each."""
    for index in range(len(draw.elements)):
        yield replace(draw, elements=draw.elements[:index] + draw.elements[index + 1 :])
    changes: dict[str, Any] = {
        "optimizer": PLAIN,
        "schedule": NONE,
        "loss": MEAN,
        "dtype": "float64",
        "micro": None,
        "weighted": False,
        "clip": None,
        "each_epoch": False,
        "nested": False,
        "on_storage": False,
        "mirrored": False,
        "bucket_bytes": None,
        "verify_every": None,
        "rows": ROWS[0],
    }
    for name, value in changes.items():
        if getattr(draw, name) != value:
            yield replace(draw, **{name: value})
    for worlds in _fewer_worlds(draw.worlds):
        if not draw.each_epoch or all(world.end != "finish" for world in worlds[:-1]):
            yield replace(draw, worlds=worlds)


def _fewer_worlds(worlds: tuple[World, ...]) -> Iterator[tuple[World, ...]]:
    """Yields sequences with a world less, or with one that ends by itself instead of a fault."""
    for index in range(len(worlds) - 1):
        yield worlds[:index] + worlds[index + 1 :]
    for index, world in enumerate(worlds[:-1]):
        if world.end != "finish":
            yield (*worlds[:index], replace(world, end="finish"), *worlds[index + 1 :])
