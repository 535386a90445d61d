"""When a process begins to stand by for a worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticzero.launcher.workers.reserve.standby_rules import (
    StandbyFacts,
    must_end,
    reason_for_none,
)
from elasticzero.processes import Ram

SLOW_SCRIPT = StandbyFacts(settled_s=5.0, script_s=3.0)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, ""),
        ({"mode": "off"}, "--standby is off"),
        ({"is_program": True}, "the workers are programs that are executed without Python"),
        ({"refused": "the script looks at RANK"}, "the script looks at RANK"),
        ({"settled_s": None}, "the world is changing"),
        ({"settled_s": 1.0}, "the world is changing"),
        ({"script_s": 0.2}, "the script comes to elasticzero.run in 0.2 s"),
        ({"script_s": 0.2, "on_gpu": True}, ""),
        ({"script_s": 0.2, "is_spare": True}, ""),
        ({"script_s": None}, ""),
        ({"memory": Ram(9, 100)}, "memory is short"),
        ({"memory": Ram(50, 100), "script_bytes": 26}, "memory is short"),
        ({"memory": Ram(50, 100), "script_bytes": 24}, ""),
        ({"beginning": True}, "another one has begun"),
    ],
)
def test_the_first_reason_counts(facts: dict[str, Any], reason: str) -> None:
    assert reason_for_none(replace(SLOW_SCRIPT, **facts)) == reason


def test_those_that_wait_end_where_memory_is_exhausted() -> None:
    """Later than none begins any more, so that they do not come and go."""
    assert not must_end(replace(SLOW_SCRIPT, memory=Ram(6, 100)))
    assert must_end(replace(SLOW_SCRIPT, memory=Ram(4, 100)))
