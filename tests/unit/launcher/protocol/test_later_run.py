"""A node of an earlier run gives way, whatever else it sees."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticzero.errors import ExitCode
from elasticzero.launcher.protocol.actions import ExitAgent, KillWorkers
from elasticzero.launcher.protocol.decide import decide
from elasticzero.launcher.protocol.documents import Done
from elasticzero.launcher.protocol.view import GroupOrder, View
from tests.unit.launcher.protocol.test_decide import (
    ALONE,
    AT_REST,
    ENDED,
    LAPSED,
    NOW,
    POLICY,
    ROUND,
    SPARE,
    A,
    B,
    C,
    named,
)

DONE = Done(outcome="finished", step=9, reason="finished after step 9")
LEADS_THE_FIRST = replace(ALONE, members=named(A, B, C))
VIEWS = (AT_REST, LAPSED, ROUND, ENDED, SPARE, LEADS_THE_FIRST, replace(ENDED, done=DONE))


@pytest.mark.parametrize("view", VIEWS)
def test_a_later_run_comes_before_all_else(view: View) -> None:
    """A13: the workers are killed, and the agent exits when they are gone."""
    me = replace(view.me, run=1)
    over = replace(view, me=me, later_run=3)
    decision = decide(over, NOW, POLICY)
    assert "run 3 of the job has taken the place of run 1" in decision.reason
    if view.workers.running:
        assert decision.actions == (KillWorkers(decision.reason),)
        killed = replace(view.workers, order=GroupOrder.KILL)
        assert not decide(replace(over, workers=killed), NOW, POLICY).actions
    else:
        assert decision.actions == (ExitAgent(ExitCode.SUPERSEDED),)
