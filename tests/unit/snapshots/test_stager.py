"""A worker warns of late checkpoints, waits for slots, and tells what it could not finish."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elasticzero.checkpoint.ram.slots import SlotsInUse
from elasticzero.checkpoint.ram.staging import StagedShard
from elasticzero.errors import StorageError
from elasticzero.ipc.agent_client import STANDALONE, AgentClient
from elasticzero.snapshots.stager import StateStager


def stager_of_a_job() -> StateStager:
    link = AgentClient(None, replace(STANDALONE, checkpoint_dir="/nowhere"))
    share: Any = None
    return StateStager(link, "ddp", share, shards=1, saving=True)


def test_late_checkpoints_are_said_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    stager = stager_of_a_job()
    with caplog.at_level(logging.WARNING):
        for step in range(1, 11):
            stager._warn_late(f"no checkpoint of step {step}")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == [
        f"no checkpoint of step {step}" for step in (1, 2, 4, 8)
    ]
    assert "times so far" not in lines[0]
    assert lines[3].endswith("(8 times so far)")


@pytest.mark.parametrize(("checkpoint", "tries"), [(True, 3), (False, 1)])
def test_a_checkpoint_waits_for_a_slot_that_the_agent_still_reads(
    checkpoint: bool, tries: int
) -> None:
    """A snapshot is left out instead, and said to be."""
    stager, errors = stager_of_a_job(), [SlotsInUse("both slots are read")] * 2
    tries_made: list[object] = []

    def begin(drafted: Any, keep: Any, **_: Any) -> StagedShard:
        tries_made.append(drafted)
        if errors:
            raise errors.pop()
        return StagedShard(1000)

    writer: Any = SimpleNamespace(begin_into_memory=begin)
    drafted: Any = SimpleNamespace(manifest=SimpleNamespace(step=5))
    stager._writer = writer
    written = stager._write(drafted, checkpoint=checkpoint)
    assert len(tries_made) == tries
    assert (written is not None and written.size == 1000) == checkpoint


def test_nobody_waits_for_the_save_of_a_capture_that_could_not_be_finished() -> None:
    stager = stager_of_a_job()

    def finish() -> None:
        raise StorageError("the snapshot is gone")

    stager._beside.begin(finish, lambda: None)
    stager.settle()
    with pytest.raises(StorageError, match="the snapshot is gone"):
        _ = stager.newest_save
