"""A worker warns of late checkpoints without filling its log."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from elasticzero.ipc.agent_client import STANDALONE, AgentClient
from elasticzero.snapshots.stager import StateStager


def test_late_checkpoints_are_said_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    link = AgentClient(None, replace(STANDALONE, checkpoint_dir="/nowhere"))
    share: Any = None
    stager = StateStager(link, "ddp", share, shards=1, saving=True)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 11):
            stager._warn_late(f"no checkpoint of step {step}")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == [
        f"no checkpoint of step {step}" for step in (1, 2, 4, 8)
    ]
    assert "times so far" not in lines[0]
    assert lines[3].endswith("(8 times so far)")
