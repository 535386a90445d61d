"""The grammar draws all that it has, writes scripts that Python can read, and shrinks draws."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from elasticzero.spans import STRATEGIES
from tests.integration.generator.buffers import BUFFERS
from tests.integration.generator.calls import CALLS, LOSSES
from tests.integration.generator.changes import CHANGES
from tests.integration.generator.draws import NETWORK, STEPS, Draw, World, draw
from tests.integration.generator.elements import ALL, Element
from tests.integration.generator.optimizers import OPTIMIZERS, PLAIN
from tests.integration.generator.play import difference
from tests.integration.generator.render import render
from tests.integration.generator.schedules import SCHEDULES
from tests.integration.generator.shrink import shrink

TABLES = [NETWORK, CHANGES, CALLS, OPTIMIZERS, SCHEDULES, LOSSES]
EVERY = [element for table in TABLES for element in table]


def test_names_are_those_of_one_element_each() -> None:
    names = [element.name for element in EVERY]
    assert len(names) == len(set(names)) > 150
    for element in EVERY:
        assert {*element.limits} <= {ALL, *STRATEGIES}


def test_every_element_is_drawn_with_every_strategy_that_it_has() -> None:
    drawn = {(p.name, d.strategy) for d in map(draw, range(8000)) for p in d.pieces}
    possible = {(e.name, s) for e in EVERY for s in STRATEGIES if e.limit(s) is None}
    assert drawn == possible


@pytest.mark.parametrize("nested", [False, True])
def test_every_element_becomes_a_script(nested: bool) -> None:
    for element in EVERY:
        role: dict[str, Any] = {"elements": (element,)}
        if element in OPTIMIZERS:
            role = {"optimizer": element}
        elif element in SCHEDULES:
            role = {"schedule": element}
        elif element in LOSSES:
            role = {"loss": element}
        whole = Draw(seed=0, strategy="ddp", worlds=(World(ranks=1),), elements=(), optimizer=PLAIN)
        text = render(replace(whole, nested=nested, **role))
        assert "OWNER" not in text
        compile(text, element.name, "exec")


def test_a_draw_is_the_same_each_time() -> None:
    for seed in range(50):
        assert draw(seed) == draw(seed)
        assert render(draw(seed)) == render(draw(seed))


def test_a_rank_is_killed_in_a_world_that_it_is_in() -> None:
    for drawn in map(draw, range(2000)):
        first, *others = drawn.worlds
        assert first.end == "kill" and first.step > drawn.since + 1
        assert all(world.rank < world.ranks for world in drawn.worlds)
        assert [world.step for world in drawn.worlds] == sorted(w.step for w in drawn.worlds)
        assert others[-1].step == STEPS and others[-1].end == "finish"
        sizes = [world.ranks for world in drawn.worlds]
        assert all(a != b for a, b in pairwise(sizes))


def test_a_failing_draw_is_shrunk_to_what_fails() -> None:
    guilty: Element = BUFFERS[0]
    failing = next(d for d in map(draw, range(9999)) if guilty in d.elements and len(d.worlds) == 3)
    played: list[Draw] = []

    def fails(candidate: Draw) -> bool:
        played.append(candidate)
        return guilty in candidate.elements and candidate.worlds[0].end == "kill"

    smallest = shrink(failing, fails)
    assert smallest.elements == (guilty,)
    assert smallest.optimizer == PLAIN and smallest.rows == 40 and len(smallest.worlds) == 2
    assert len(played) < 40


def test_results_differ_in_names_kinds_and_numbers() -> None:
    assert not difference({"a": [1.0, None]}, {"a": [1.0 + 1e-12, None]}, 1e-9)
    assert "off by 0.5" in difference({"a": [1.0]}, {"a": [1.5]}, 1e-9)
    assert "has ['a']" in difference({"a": 1}, {"b": 1}, 1e-9)
    assert "/a is None" in difference({"a": None}, {"a": 1}, 1e-9)
