"""Which job has a checkpoint directory, and what that means for the steps of earlier jobs."""

from __future__ import annotations

import os
import re
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import OWNER_DIRECTORY, step_directory
from elasticzero.checkpoint.steps import catalog, commit, owner
from elasticzero.checkpoint.steps.loose_files import remove_uncommitted
from elasticzero.checkpoint.steps.owner import LIVES_S, OwnerRecord
from elasticzero.checkpoint.steps.retention import COMMIT_S, RetentionPolicy, apply_retention
from elasticzero.checkpoint.storage.base import Directory
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import UserError
from tests.unit.checkpoint.cases import draft_of, elements, simple_layout, write_ranks, write_step

LAYOUT = simple_layout(numel=100)
CONTENTS = elements(LAYOUT.tensors)
FIRST = OwnerRecord(job="first", cluster="a1")
SECOND = OwnerRecord(job="second", cluster="b2")


@pytest.fixture(params=["disk", "object"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Directory:
    if request.param == "disk":
        return open_directory(tmp_path / "run")
    return open_directory(f"memory://{uuid.uuid4().hex}")


def unknown(_: OwnerRecord) -> bool:
    return False


def gone(_: OwnerRecord) -> bool:
    return True


def age(place: Path, seconds: float) -> None:
    """Make all files of a directory older."""
    for path in place.rglob("*"):
        if path.is_file():
            then_s = path.stat().st_mtime - seconds
            os.utime(path, (then_s, then_s))


def test_a_second_job_is_refused_with_the_name_of_the_first(directory: Directory) -> None:
    owner.claim(directory, FIRST, unknown)
    owner.claim(directory, FIRST, unknown)
    catalog.check_target(directory)
    with pytest.raises(UserError, match=r"belongs to job 'first', .* another directory"):
        owner.claim(directory, SECOND, unknown)
    owner.renew(directory, FIRST)
    assert owner.refusal(directory, SECOND, unknown) is not None
    assert owner.read_owner(directory)[0] is not None
    owner.claim(directory, SECOND, gone)
    record, _ = owner.read_owner(directory)
    assert record == SECOND
    text = owner.taken_by(directory, FIRST)
    assert text is not None and "'second'" in text


def test_a_job_that_has_ended_leaves_the_directory(directory: Directory) -> None:
    owner.claim(directory, FIRST, unknown)
    owner.end(directory, SECOND)
    assert owner.refusal(directory, SECOND, unknown) is not None
    owner.end(directory, FIRST)
    owner.claim(directory, SECOND, unknown)
    assert owner.taken_by(directory, SECOND) is None
    owner.end(directory, FIRST)
    assert owner.taken_by(directory, FIRST) is not None


def test_a_job_whose_etcd_is_another_cluster_by_now_goes_on(directory: Directory) -> None:
    """etcd lost its data while the job ran."""
    owner.claim(directory, FIRST, unknown)
    later = replace(FIRST, cluster="c3")
    assert owner.taken_by(directory, later) is None
    owner.renew(directory, later)
    record, _ = owner.read_owner(directory)
    assert record is not None and record.cluster == "c3" and record.renewals == 1


def test_a_later_run_takes_the_directory_over(directory: Directory) -> None:
    owner.claim(directory, FIRST, unknown)
    later = replace(FIRST, run=2)
    owner.claim(directory, later, unknown)
    assert owner.taken_by(directory, later) is None
    assert owner.taken_by(directory, FIRST) is not None
    owner.renew(directory, FIRST)
    record, _ = owner.read_owner(directory)
    assert record == later
    with pytest.raises(UserError, match="'first'"):
        owner.claim(directory, FIRST, gone)


def write_saves(directory: Directory) -> dict[int, list[str]]:
    """What an earlier run leaves: step 1 is committed, and 2 by a save that another came before;
    3 to 5 lack their manifests, and 5 is a save by hand. The files that stay, by step."""
    loose = draft(2, 4)
    for manifest in (draft(1, 5), draft(2, 5), loose, draft(3, 5), draft(4, 6), by_hand(5)):
        write_ranks(directory.make(step_directory(manifest.step)), manifest, CONTENTS)
    for step in (1, 2):
        assert commit.commit(directory.step(step_directory(step)), draft(step, 5), wait_s=0.0)
    return {
        step: [name for name in names(directory, step) if loose.token not in name]
        for step in (1, 2, 5)
    } | {3: [], 4: []}


def by_hand(step: int) -> Manifest:
    return draft_of(LAYOUT, step=step, token="by-hand")


def names(directory: Directory, step: int) -> list[str]:
    return directory.step(step_directory(step)).names()


@pytest.mark.parametrize("next_owner", [replace(FIRST, run=2), SECOND])
def test_the_next_owner_removes_what_is_not_committed(
    directory: Directory, next_owner: OwnerRecord
) -> None:
    """A committer that has stopped just before its manifest can make none of it a checkpoint."""
    owner.claim(directory, FIRST, unknown)
    stay = write_saves(directory)
    owner.claim(directory, FIRST, unknown)
    assert len(names(directory, 3)) == 4, "it is the same run"
    owner.claim(directory, next_owner, gone)
    assert {step: names(directory, step) for step in stay} == stay
    assert owner.read_owner(directory)[0] == next_owner
    write_ranks(directory.make(step_directory(6)), draft(6, 1), CONTENTS)
    owner.claim(directory, next_owner, unknown)
    assert len(names(directory, 6)) == 4


def test_a_removal_that_was_cut_short_is_done_by_the_next_node(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.claim(directory, FIRST, unknown)
    stay = write_saves(directory)
    second = replace(FIRST, run=2)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, "remove_uncommitted", killed)
        with pytest.raises(KeyboardInterrupt):
            owner.claim(directory, second, unknown)
    record, _ = owner.read_owner(directory)
    assert record == replace(second, unswept=True)
    elsewhere = replace(second, cluster="c3")  # etcd has lost its data meanwhile
    owner.claim(directory, elsewhere, gone)
    assert {step: names(directory, step) for step in stay} == stay
    assert owner.read_owner(directory)[0] == elsewhere


def test_two_nodes_remove_at_once(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one finds the other's record, and removes nothing that is newer."""
    owner.claim(directory, FIRST, unknown)
    stay = write_saves(directory)
    second = replace(FIRST, run=2)

    def stop(place: Directory, until_s: float) -> None:
        monkeypatch.setattr(owner, "remove_uncommitted", remove_uncommitted)
        owner.claim(directory, second, unknown)
        while owner._times_s(place)[1] <= until_s:
            pass  # the clock that files are dated by has ticks
        write_ranks(directory.make(step_directory(6)), draft(6, 1), CONTENTS)
        remove_uncommitted(place, until_s)

    monkeypatch.setattr(owner, "remove_uncommitted", stop)
    owner.claim(directory, second, unknown)
    assert {step: names(directory, step) for step in stay} == stay
    assert len(names(directory, 6)) == 4
    assert owner.read_owner(directory)[0] == second


def test_an_earlier_run_may_write_nothing_though_the_later_one_is_over(
    directory: Directory,
) -> None:
    """Its saver may wake hours later, and its etcd may be another cluster by then."""
    owner.claim(directory, FIRST, unknown)
    assert owner.taken_by_later_run(directory, "first", 1) is None
    later = replace(FIRST, run=3, cluster="c3")
    owner.claim(directory, later, gone)
    owner.end(directory, later)
    text = owner.taken_by(directory, replace(FIRST, run=2))
    assert text is not None
    assert re.fullmatch(
        "run 3 of job 'first' has taken the checkpoint directory .* from run 2, which writes "
        "nothing more there",
        text,
    )
    assert owner.taken_by_later_run(directory, "first", 2) == text
    assert owner.taken_by_later_run(directory, "first", 3) is None
    assert owner.taken_by_later_run(directory, "second", 1) is None
    assert owner.taken_by(directory, later) is None
    owner.claim(directory, FIRST, unknown)  # a job that begins anew in another etcd


def test_a_record_of_long_ago_holds_nobody_off(tmp_path: Path) -> None:
    directory = DiskDirectory(tmp_path)
    owner.claim(directory, FIRST, unknown)
    age(tmp_path, LIVES_S - 30)
    with pytest.raises(UserError, match="10 min ago"):
        owner.claim(directory, SECOND, unknown)
    age(tmp_path, 60)
    assert owner.taken_by(directory, SECOND) is None
    owner.claim(directory, SECOND, unknown)


def test_a_job_that_commits_seldom_lives_longer(tmp_path: Path) -> None:
    directory = DiskDirectory(tmp_path)
    owner.claim(directory, FIRST, unknown)
    owner.renew(directory, FIRST)
    age(tmp_path, 1000.0)
    assert owner.refusal(directory, SECOND, unknown) is None, "no interval is known yet"
    owner.renew(directory, FIRST)
    age(tmp_path, 2500.0)
    assert owner.refusal(directory, SECOND, unknown) is not None
    age(tmp_path, 600.0)
    assert owner.refusal(directory, SECOND, unknown) is None


@pytest.mark.parametrize("data", [b"", b"[]", b'{"version": 1}', b'{"job": 5}', b"\xff" * 9])
def test_a_record_that_cannot_be_understood_is_replaced(directory: Directory, data: bytes) -> None:
    directory.make(OWNER_DIRECTORY).write("job.json", [data])
    assert owner.taken_by(directory, FIRST) is None
    owner.claim(directory, FIRST, unknown)
    owner.renew(directory, FIRST)
    record, _ = owner.read_owner(directory)
    assert record is not None and record.job == "first"


def test_a_lost_record_is_written_again_at_the_next_commit(directory: Directory) -> None:
    assert owner.renew(directory, FIRST) == 0.0
    assert owner.read_owner(directory)[0] == FIRST
    before_s = time.time()
    assert 0.0 < owner.renew(directory, FIRST) <= before_s + 1.0
    assert directory.step(OWNER_DIRECTORY).names() == ["job.json"]


def draft(step: int, generation: int) -> Manifest:
    token = f"g{generation:06d}-0123456789abcdef"
    return draft_of(LAYOUT, step=step, token=token, generation=generation)


def test_steps_of_an_earlier_job_go_though_their_generations_are_higher(tmp_path: Path) -> None:
    """A new job id began with generation 1 in the directory of one that had come to 50."""
    directory = DiskDirectory(tmp_path)
    for step in (100, 200, 300, 400):
        write_step(tmp_path, draft(step, 50), CONTENTS)
    write_ranks(directory.make(step_directory(500)), draft(500, 50), CONTENTS)
    age(tmp_path, COMMIT_S + 1)
    owner.claim(directory, FIRST, unknown)
    keep = RetentionPolicy(last=2)
    for step in (410, 420):
        write_step(tmp_path, draft(step, 1), CONTENTS)
        since_s = owner.renew(directory, FIRST)
        done = apply_retention(directory, draft(step, 1), keep, since_s=since_s)
        assert not done.problems
    assert [info.step for info in catalog.steps(directory)] == [420, 410]
    assert sorted(directory.names()) == [OWNER_DIRECTORY, step_directory(410), step_directory(420)]


def test_steps_of_a_newer_generation_of_the_same_job_stay(tmp_path: Path) -> None:
    directory = DiskDirectory(tmp_path)
    owner.claim(directory, FIRST, unknown)
    for step, generation in ((100, 7), (200, 6), (300, 6)):
        write_step(tmp_path, draft(step, generation), CONTENTS)
    since_s = owner.renew(directory, FIRST)
    apply_retention(directory, draft(300, 6), RetentionPolicy(last=1), since_s=since_s)
    assert [info.step for info in catalog.steps(directory)] == [300, 100]
