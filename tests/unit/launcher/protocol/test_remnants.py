"""A store was restored from a backup a moment ago: what is registered may be a remnant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticzero.launcher.protocol.decide import decide
from elasticzero.launcher.protocol.view import View
from tests.unit.launcher.protocol.test_decide import (
    ALONE,
    AT_REST,
    NOW,
    POLICY,
    SILENT_B,
    SPARE,
    A,
    B,
    C,
    named,
    next_world,
    v,
)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(v(ALONE, members=named(A, B), last_join_s=90.0), id="a first world"),
        pytest.param(SPARE, id="a world whose nodes are all gone"),
        pytest.param(v(AT_REST, members=named(A, B, C), last_join_s=90.0), id="a larger world"),
    ],
)
def test_no_world_is_begun_with_remnants(view: View) -> None:
    assert decide(view, NOW, POLICY).actions
    assert not decide(replace(view, remnants=True), NOW, POLICY).actions


def test_a_remnant_has_no_place_in_the_next_world() -> None:
    view = v(SILENT_B, round_s=98.0, members=named(A, C), remnants=True)
    assert next_world(replace(view, remnants=False)).members == (A, C)
    decision = decide(view, NOW, POLICY)
    assert decision.reason == "1 of at least 2 nodes are left; state is kept"
    assert not decision.actions
