"""A node that stood still while it saved commits nothing, and tries again where that is asked."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import MANIFEST_NAME, step_directory
from elasticzero.checkpoint.io.writer import TensorPiece
from elasticzero.checkpoint.ram import transfer
from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.checkpoint.steps import catalog, commit, tags
from elasticzero.checkpoint.steps import owner as owner_record
from elasticzero.checkpoint.steps.owner import OwnerRecord
from elasticzero.checkpoint.steps.retention import RetentionPolicy
from elasticzero.checkpoint.storage.base import Storage
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.errors import StorageError
from elasticzero.ipc.messages import Captured, Tagged, TagStep
from elasticzero.launcher.snapshots import checkpoint_saver
from elasticzero.launcher.snapshots.checkpoint_saver import CheckpointSaver
from elasticzero.launcher.snapshots.roles import SnapshotRole
from elasticzero.launcher.snapshots.save_events import SaveEvent, SaveFailed, SaveFinished
from elasticzero.launcher.snapshots.standstill import StandstillCounter
from tests.unit.checkpoint.cases import draft_of, elements, write_snapshot, write_step

TOKEN = "g000002-0123456789abcdef"
LAYOUT = Layout(
    world_size=1, tensors={"a": TensorSpec("F32", (8,))}, groups=(Group("even", ("a",)),)
)
CONTENTS = elements(LAYOUT.tensors)
LEASE_S = 5.0
JOB = OwnerRecord(job="job", cluster="c")


def draft(step: int) -> Manifest:
    return draft_of(LAYOUT, generation=2, token=TOKEN, step=step)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds since the machine was started, as a test sets them."""
    now_s = [100.0]
    monkeypatch.setattr(checkpoint_saver, "TRY_AGAIN_S", 0.01)
    monkeypatch.setattr(time, "clock_gettime", lambda _: now_s[0])
    return now_s


def saver_of(tmp_path: Path, owner: OwnerRecord | None = None) -> CheckpointSaver:
    memory = tmp_path / "memory"
    for step in (9, 10, 11):
        piece = TensorPiece("a", torch.arange(8, dtype=torch.float32))
        write_snapshot(memory, draft(step), 0, [piece])
    saver = CheckpointSaver(
        SnapshotStore(memory),
        str(tmp_path / "run"),
        RetentionPolicy(last=1),
        lambda: None,
        lease_s=LEASE_S,
        owner=owner,
    )
    saver.begin(SnapshotRole(generation=2, token=TOKEN, world_size=1, ranks=(0,)))
    return saver


def claimed(tmp_path: Path) -> tuple[DiskDirectory, CheckpointSaver]:
    """The checkpoint directory, which the job has claimed, and the job's saver."""
    directory = DiskDirectory(tmp_path / "run")
    owner_record.claim(directory, JOB, lambda _: False)
    return directory, saver_of(tmp_path, JOB)


@pytest.fixture
def saver(tmp_path: Path, clock: list[float]) -> Iterator[CheckpointSaver]:
    made = saver_of(tmp_path)
    yield made
    made.close()


def save(saver: CheckpointSaver, step: int) -> list[SaveEvent]:
    saver.save_held([ShardName(2, step, 0, 1)])
    deadline_s = time.monotonic() + 60.0
    while saver.saving and time.monotonic() < deadline_s:
        time.sleep(0.005)
    return saver.events()


def test_standstills_are_counted_whoever_notices_them() -> None:
    now_s = [0.0]
    counter = StandstillCounter(float("inf"), lambda: now_s[0])
    now_s[0] = 1e9
    assert counter.tick() == 0
    counter = StandstillCounter(1000.0, lambda: now_s[0])
    for passed_s, count in ((999.0, 0), (1000.0, 0), (1001.0, 1), (1.0, 1), (5000.0, 2)):
        now_s[0] += passed_s
        assert counter.tick() == count
    counter.close()


def test_a_node_that_stood_still_commits_at_its_next_try(
    saver: CheckpointSaver, tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = commit._check_readable

    def freeze(storage: Storage, data: bytes) -> None:
        check(storage, data)
        monkeypatch.setattr(commit, "_check_readable", check)
        clock[0] += LEASE_S + 1
        assert catalog.steps(DiskDirectory(tmp_path / "run")) == []

    monkeypatch.setattr(commit, "_check_readable", freeze)
    failed, finished = save(saver, 9)
    assert (
        isinstance(failed, SaveFailed) and "stood still for longer than its lease" in failed.error
    )
    assert isinstance(finished, SaveFinished) and finished.committed, finished
    assert [info.step for info in catalog.steps(DiskDirectory(tmp_path / "run"))] == [9]


def test_a_node_that_stood_still_after_its_commit_removes_nothing(
    saver: CheckpointSaver, tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(saver, 9)
    really_set = tags.set_tags

    def freeze(*arguments: object) -> None:
        clock[0] += LEASE_S + 1
        really_set(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint_saver, "set_tags", freeze)
    (finished,) = save(saver, 10)
    assert isinstance(finished, SaveFinished) and finished.committed
    assert "leftovers stay this time: this node stood still" in finished.notes[0]
    assert [info.step for info in catalog.steps(DiskDirectory(tmp_path / "run"))] == [10, 9]


def first_failure(saver: CheckpointSaver) -> str:
    """Why a save of step 10 fails, which is tried again and again."""
    saver.save_held([ShardName(2, 10, 0, 1)])
    deadline_s = time.monotonic() + 60.0
    events: list[SaveEvent] = []
    while not events and time.monotonic() < deadline_s:
        events = saver.events()
        time.sleep(0.005)
    assert isinstance(events[0], SaveFailed)
    return events[0].error


def all_files(directory: Path) -> dict[Path, int]:
    """Every file, with the time of its last change."""
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


def test_a_saver_of_an_earlier_run_writes_nothing(tmp_path: Path, clock: list[float]) -> None:
    """A later run goes on in the same directory; its own files had been written before."""
    directory, saver = claimed(tmp_path)
    (finished,) = save(saver, 9)
    assert isinstance(finished, SaveFinished) and finished.committed
    owner_record.claim(directory, replace(JOB, run=2), lambda _: False)
    before = all_files(directory.path)
    assert "run 2 of job 'job' has taken the checkpoint directory" in first_failure(saver)
    saver.tag(TagStep(generation=2, step=9, tags=("best",)))
    saver.close(job_ended=True)
    assert all_files(directory.path) == before


def test_a_tag_of_an_earlier_run_is_not_written(tmp_path: Path, clock: list[float]) -> None:
    directory, saver = claimed(tmp_path)
    save(saver, 9)
    owner_record.claim(directory, replace(JOB, run=2), lambda _: False)
    saver.tag(TagStep(generation=2, step=9, tags=("best",)))
    deadline_s = time.monotonic() + 60.0
    while saver.saving and time.monotonic() < deadline_s:
        time.sleep(0.005)
    (tagged,) = saver.events()
    assert isinstance(tagged, Tagged) and tagged.error is not None
    assert "step 9 gets no tag: run 2 of job 'job'" in tagged.error
    assert not (directory.path / "tags").exists()
    saver.close()


def test_a_saver_whose_run_ends_as_it_commits_commits_nothing(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shards are there, and the later run claims the directory just before the manifest."""
    directory, saver = claimed(tmp_path)
    check = commit._check_readable

    def take(storage: Storage, data: bytes) -> None:
        check(storage, data)
        owner_record.claim(directory, replace(JOB, run=2), lambda _: False)

    monkeypatch.setattr(commit, "_check_readable", take)
    assert "run 2 of job 'job' has taken" in first_failure(saver)
    saver.close()
    assert catalog.steps(directory) == []


def test_a_saver_whose_run_ends_after_its_commit_removes_nothing(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later run has written shards that an older generation would take for leftovers."""
    directory, saver = claimed(tmp_path)
    save(saver, 9)
    really_set = tags.set_tags

    def take(*arguments: object) -> None:
        really_set(*arguments)  # type: ignore[arg-type]
        owner_record.claim(directory, replace(JOB, run=2), lambda _: False)

    monkeypatch.setattr(checkpoint_saver, "set_tags", take)
    (finished,) = save(saver, 10)
    assert isinstance(finished, SaveFinished) and finished.committed
    assert "leftovers stay this time: run 2 of job 'job' has taken" in finished.notes[0]
    assert [info.step for info in catalog.steps(directory)] == [10, 9]
    saver.close()


@pytest.mark.parametrize(("generation", "of_an_earlier_job"), [(3, False), (50, True)])
def test_a_damaged_step_is_replaced_unless_a_newer_generation_has_done_so(
    tmp_path: Path, clock: list[float], generation: int, of_an_earlier_job: bool
) -> None:
    """Generations of an earlier job in the directory say nothing."""
    other = draft_of(LAYOUT, step=9, generation=generation, token=f"g{generation:06d}-{9:016x}")
    stored = tmp_path / "run" / step_directory(9) / MANIFEST_NAME
    if of_an_earlier_job:
        write_step(tmp_path / "run", other, CONTENTS)
        os.utime(stored, (stored.stat().st_mtime - 60,) * 2)
    directory, saver = claimed(tmp_path)
    if not of_an_earlier_job:
        write_step(tmp_path / "run", other, CONTENTS)
    role = SnapshotRole(generation=2, token=TOKEN, world_size=1, ranks=(0,))
    saver.begin(replace(role, bad_steps=frozenset({9})))
    (finished,) = save(saver, 9)
    assert isinstance(finished, SaveFinished) and finished.committed == of_an_earlier_job
    token = catalog.read_manifest(directory.step(step_directory(9))).token
    assert token == (TOKEN if of_an_earlier_job else other.token)
    saver.close()


def test_a_saver_whose_run_ends_after_its_commit_writes_no_tag(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wrote the tags of its own step without a look at who has the directory by then."""
    directory, saver = claimed(tmp_path)
    tagged = replace(draft(11), tags=("best",))
    piece = TensorPiece("a", torch.arange(8, dtype=torch.float32))
    write_snapshot(tmp_path / "memory", tagged, 0, [piece])
    really_list = commit._check_listed

    def take(*arguments: object) -> None:
        really_list(*arguments)  # type: ignore[arg-type]
        owner_record.claim(directory, replace(JOB, run=2), lambda _: False)

    monkeypatch.setattr(commit, "_check_listed", take)
    (finished,) = save(saver, 11)
    assert isinstance(finished, SaveFinished) and finished.committed and finished.tags == ()
    assert "step 11 has no tag best: run 2 of job 'job' has taken" in finished.notes[0]
    assert not (directory.path / "tags").exists()
    saver.close()


def test_a_commit_counts_though_the_owner_cannot_be_read_after_it(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is removed then; the next commit sees to it."""
    directory, saver = claimed(tmp_path)
    save(saver, 9)
    really_set = tags.set_tags

    def fail(*_: object) -> None:
        raise StorageError("the storage does not answer")

    def set_and_fail(*arguments: object) -> None:
        really_set(*arguments)  # type: ignore[arg-type]
        monkeypatch.setattr(owner_record, "taken_by", fail)

    monkeypatch.setattr(checkpoint_saver, "set_tags", set_and_fail)
    (finished,) = save(saver, 10)
    assert isinstance(finished, SaveFinished) and finished.committed
    assert "leftovers stay this time: the storage does not answer" in finished.notes[0]
    assert [info.step for info in catalog.steps(directory)] == [10, 9]
    saver.close()


def test_a_save_fails_where_another_job_has_taken_the_directory(
    tmp_path: Path, clock: list[float]
) -> None:
    directory = DiskDirectory(tmp_path / "run")
    saver = saver_of(tmp_path, JOB)
    owner_record.claim(directory, JOB, lambda _: False)
    (finished,) = save(saver, 9)
    assert isinstance(finished, SaveFinished) and finished.committed
    other = replace(JOB, job="other")
    owner_record.claim(directory, other, lambda _: True)
    assert "belongs to job 'other'" in first_failure(saver)
    assert directory.step(step_directory(10)).names() == []
    saver.close(job_ended=True)
    assert owner_record.read_owner(directory)[0] == other


def test_the_end_of_a_job_leaves_the_directory_to_others(
    tmp_path: Path, clock: list[float]
) -> None:
    directory, saver = claimed(tmp_path)
    save(saver, 9)
    saver.close(job_ended=True)
    owner_record.claim(directory, replace(JOB, job="other"), lambda _: False)


def wait_for_saves(saver: CheckpointSaver) -> list[SaveFinished]:
    """The ends of all saves."""
    deadline_s = time.monotonic() + 60.0
    while saver.saving and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert not saver.saving
    return [event for event in saver.events() if isinstance(event, SaveFinished)]


def test_a_save_from_memory_does_not_wait_for_retention(
    saver: CheckpointSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each removal may take minutes. A job that ends has the time of --save-timeout in all."""
    save(saver, 9)
    directory = DiskDirectory(tmp_path / "run")
    really_remove = DiskStorage.remove
    removed: list[tuple[str, list[int]]] = []

    def remove(storage: DiskStorage, name: str, **condition: Any) -> None:
        if not removed:
            saver.save_held([ShardName(2, 11, 0, 1)])
        removed.append((name, [info.step for info in catalog.steps(directory)]))
        really_remove(storage, name, **condition)

    monkeypatch.setattr(DiskStorage, "remove", remove)
    saver.save_held([ShardName(2, 10, 0, 1)])
    first, second = wait_for_saves(saver)
    assert first.committed and "may stay this time: another save waits" in first.notes[-1]
    assert second.committed and second.notes == ("2 files of saves that failed removed",)
    assert removed[0] == (MANIFEST_NAME, [10, 9])
    assert [newest for _, (newest, *_) in removed[1:]] == [11] * len(removed[1:]), removed
    assert [info.step for info in catalog.steps(directory)] == [11]


@pytest.mark.parametrize(("step", "copied"), [(10, [9, 10]), (11, [9, 11]), (9, [9, 10, 9])])
def test_a_save_that_another_one_replaces_is_not_begun(
    saver: CheckpointSaver, monkeypatch: pytest.MonkeyPatch, step: int, copied: list[int]
) -> None:
    """A save of step 10 waits for one of step 9. Then another step is to be saved from memory: one
    that is no older makes the save of step 10 needless. Of a newer step than that in memory the
    other nodes' parts may be there."""
    really_persist, steps = transfer.persist, []
    copies, goes_on = threading.Event(), threading.Event()

    def persist(memory: SnapshotStore, shard: ShardName, *arguments: Any, **options: Any) -> Any:
        steps.append(shard.step)
        copies.set()
        assert goes_on.wait(60.0)
        return really_persist(memory, shard, *arguments, **options)

    monkeypatch.setattr(checkpoint_saver, "persist", persist)
    for saved in (9, 10, step):
        saver.save_held([ShardName(2, saved, 0, 1)])
        assert copies.wait(60.0)
    goes_on.set()
    _, second, _ = wait_for_saves(saver)
    assert steps == copied
    replaced = second.error is not None and "is saved instead" in second.error
    assert replaced == (10 not in copied[:-1])


TWO_WORKERS = SnapshotRole(generation=2, token=TOKEN, world_size=2, ranks=(0, 1))


def captured_by(rank: int, step: int) -> Captured:
    return Captured(
        step=step, generation=2, rank=rank, world_size=2, checkpoint=True, seconds=0.0, bytes=1
    )


@pytest.mark.parametrize("before", [0, 1])
def test_a_save_that_was_abandoned_before_it_began_never_begins(
    saver: CheckpointSaver, before: int
) -> None:
    """Another node could not write its part, and this node's workers capture late."""
    saver.begin(TWO_WORKERS)
    for rank in range(before):
        saver.captured(captured_by(rank, 9))
    saver.abandon(2, 9)
    saver.abandon(2, 9)  # as the other worker asks
    (finished,) = [event for event in saver.events() if isinstance(event, SaveFinished)]
    assert (finished.step, finished.error) == (9, "a worker could not write its part")
    for rank in range(before, 2):
        saver.captured(captured_by(rank, 9))
    assert not saver.saving
    saver.begin(TWO_WORKERS)
    for rank in range(2):
        saver.captured(captured_by(rank, 9))
    assert saver.saving


def test_a_save_that_newer_captures_have_followed_is_not_abandoned(saver: CheckpointSaver) -> None:
    saver.begin(TWO_WORKERS)
    saver.captured(captured_by(0, 10))
    saver.abandon(2, 9)
    assert not [event for event in saver.events() if isinstance(event, SaveFinished)]
