"""Saves that a worker writes to storage itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.io.writer import TensorPiece
from elasticzero.checkpoint.steps import owner
from elasticzero.checkpoint.steps.owner import OwnerRecord
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.errors import StorageError
from elasticzero.ipc.assignment import Assignment, Resume
from elasticzero.snapshots.direct_save import write_directly
from tests.unit.checkpoint.cases import draft_of

LAYOUT = Layout(
    world_size=1, tensors={"a": TensorSpec("F32", (8,))}, groups=(Group("even", ("a",)),)
)
ASSIGNMENT = Assignment(
    job="job",
    node="a",
    generation=3,
    token="g000003-0123456789abcdef",
    rank=0,
    local_rank=0,
    world_size=1,
    local_world_size=1,
    group_rank=0,
    master_address="127.0.0.1",
    master_port=1234,
    store_fd=None,
    strategy="ddp",
    resume=Resume(tier="fresh"),
    snapshot_root="/dev/shm/none",
)


def save(directory: DiskDirectory, assignment: Assignment) -> str:
    manifest = draft_of(LAYOUT, step=9, token=assignment.token, run=assignment.run)
    pieces = [TensorPiece("a", torch.arange(8, dtype=torch.float32))]
    return write_directly(directory, assignment, manifest, pieces, ["a"])


def test_a_worker_of_an_earlier_run_writes_nothing(tmp_path: Path) -> None:
    """Its agent was away while a later run of the job began in the same directory."""
    directory = DiskDirectory(tmp_path)
    owner.claim(directory, OwnerRecord(job="job", run=2), lambda _: False)
    with pytest.raises(StorageError, match="step 9 is not saved: run 2 of job 'job' has taken"):
        save(directory, ASSIGNMENT)
    assert directory.step(step_directory(9)).names() == []
    assert '"run":2' in save(directory, replace(ASSIGNMENT, run=2))
    assert len(directory.step(step_directory(9)).names()) == 2


def test_a_worker_of_another_job_is_the_agents_concern(tmp_path: Path) -> None:
    """Its agent claims the directory, and commits nothing where another job has it."""
    directory = DiskDirectory(tmp_path)
    owner.claim(directory, OwnerRecord(job="other", run=2), lambda _: False)
    save(directory, ASSIGNMENT)
    assert len(directory.step(step_directory(9)).names()) == 2
