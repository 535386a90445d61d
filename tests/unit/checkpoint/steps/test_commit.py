"""When a step exists, which one is chosen, and what is cleared away."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from elasticzero.checkpoint.cli import report
from elasticzero.checkpoint.format.names import MANIFEST_NAME, step_directory
from elasticzero.checkpoint.steps import catalog, commit, verify
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.errors import CheckpointDamaged, CheckpointMismatch, StorageError, UserError
from tests.unit.checkpoint.cases import (
    draft_of,
    elements,
    simple_layout,
    write_ranks,
    write_step,
)

LAYOUT = simple_layout(numel=100)
CONTENTS = elements(LAYOUT.tensors)


def write(directory: Path, step: int, token: str = "token") -> DiskStorage:
    return write_step(directory, draft_of(LAYOUT, step=step, token=token), CONTENTS)


def shards(directory: Path, step: int, token: str) -> DiskStorage:
    """A save that got no manifest."""
    storage = DiskStorage(directory / step_directory(step), durable=False)
    storage.path.mkdir(parents=True, exist_ok=True)
    write_ranks(storage, draft_of(LAYOUT, step=step, token=token), CONTENTS)
    return storage


def test_the_manifest_names_what_was_written(tmp_path: Path) -> None:
    storage = write(tmp_path, 12)
    manifest = catalog.read_manifest(storage)
    assert manifest.layout == LAYOUT
    assert [file.name for file in manifest.files] == [
        "rank-00000-of-00002-token.safetensors",
        "rank-00001-of-00002-token.safetensors",
    ]
    assert [file.bytes for file in manifest.files] == [
        storage.size(file.name) for file in manifest.files
    ]
    assert catalog.step_error_text(storage) is None
    assert commit.is_good(storage)


def test_prepare_makes_the_step_s_directory(tmp_path: Path) -> None:
    storage = commit.prepare(DiskDirectory(tmp_path / "new" / "place"), 5)
    assert Path(storage.where) == tmp_path / "new" / "place" / "step-000000000005"
    assert storage.names() == []
    assert commit.prepare(DiskDirectory(tmp_path / "new" / "place"), 5).where == storage.where


def test_prepare_where_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot make the directory"):
        commit.prepare(DiskDirectory(tmp_path / "file"), 5)


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    storage = shards(tmp_path, 1, "token")
    draft = draft_of(LAYOUT, step=1)
    storage.remove(draft.file_name(1) + ".sums")
    with pytest.raises(StorageError, match=r"rank 1 of 2 are missing; .* shared by all nodes"):
        commit.commit(storage, draft, wait_s=0.0)
    with pytest.raises(StorageError, match=r"2 ranks \(0, 1\) of 2"):
        commit.commit(storage, replace(draft, token="other"), wait_s=0.0)
    assert not commit.is_good(storage)


def test_ranks_that_disagree_about_the_layout_commit_nothing(tmp_path: Path) -> None:
    storage = shards(tmp_path, 1, "token")
    even, scalar = LAYOUT.groups
    swapped = replace(even, tensors=even.tensors[::-1])
    draft = draft_of(replace(LAYOUT, groups=(swapped, scalar)), step=1)
    with pytest.raises(CheckpointMismatch, match="the ranks must save the same tensors"):
        commit.commit(storage, draft, wait_s=0.0)
    assert not commit.is_good(storage)


def test_a_shard_cut_short_after_its_checksums_is_not_committed(tmp_path: Path) -> None:
    storage = shards(tmp_path, 1, "token")
    draft = draft_of(LAYOUT, step=1)
    os.truncate(storage.path / draft.file_name(1), 100)
    with pytest.raises(CheckpointDamaged, match=r"has 100 bytes, not"):
        commit.commit(storage, draft, wait_s=0.0)
    assert not commit.is_good(storage)


def test_the_first_whole_save_of_a_step_wins(tmp_path: Path) -> None:
    storage = write(tmp_path, 1, "first")
    shards(tmp_path, 1, "second")
    assert not commit.commit(storage, draft_of(LAYOUT, step=1, token="second"), wait_s=0.0)
    assert catalog.read_manifest(storage).token == "first"


def test_a_save_that_waits_gives_way_to_one_that_stands(tmp_path: Path) -> None:
    storage = write(tmp_path, 1, "first")
    assert not commit.commit(storage, draft_of(LAYOUT, step=1, token="second"), wait_s=60.0)


def test_a_damaged_step_is_replaced_by_a_whole_save(tmp_path: Path) -> None:
    storage = write(tmp_path, 1, "first")
    storage.remove(draft_of(LAYOUT, token="first").file_name(0))
    assert not commit.is_good(storage)
    shards(tmp_path, 1, "second")
    assert commit.commit(storage, draft_of(LAYOUT, step=1, token="second"), wait_s=0.0)
    assert catalog.read_manifest(storage).token == "second"
    assert commit.is_good(storage)


def test_a_damaged_step_stays_until_a_whole_save_replaces_it(
    tmp_path: Path,
) -> None:
    """Its sizes are right, so only who has read its bytes knows."""
    storage = write(tmp_path, 1, "first")
    first = (storage.path / MANIFEST_NAME).read_bytes()
    second = draft_of(LAYOUT, step=1, token="second")
    with pytest.raises(StorageError, match=r"2 ranks \(0, 1\) of 2 are missing"):
        commit.commit(storage, second, wait_s=0.0, replacing=True)
    shards(tmp_path, 1, "second")
    assert (storage.path / MANIFEST_NAME).read_bytes() == first
    with watched(storage.path / MANIFEST_NAME) as missing:
        assert commit.commit(storage, second, wait_s=0.0, replacing=True)
    assert not missing
    assert catalog.read_manifest(storage).token == "second"
    assert commit.is_good(storage)
    assert not [name for name in storage.names() if "first" in name]


@contextmanager
def watched(path: Path) -> Iterator[list[str]]:
    """Whether the file was missing at any call into the operating system."""
    missing: list[str] = []
    on = True

    def look(event: str, _: object) -> None:
        if on and event.startswith("os.") and not path.is_file():
            missing.append(event)

    sys.addaudithook(look)
    try:
        yield missing
    finally:
        on = False


def test_a_failed_save_is_discarded_unless_its_manifest_stands(tmp_path: Path) -> None:
    storage = shards(tmp_path, 2, "failed")
    directory = DiskDirectory(tmp_path)
    commit.discard(directory, draft_of(LAYOUT, step=2, token="failed"), (0, 1))
    assert not storage.path.exists()
    good = write(tmp_path, 3)
    shards(tmp_path, 3, "failed")
    for token in ("failed", "token"):
        commit.discard(directory, draft_of(LAYOUT, step=3, token=token), (0, 1))
    assert commit.is_good(good) and not [name for name in good.names() if "failed" in name]


def test_steps_are_listed_newest_first_and_only_when_committed(tmp_path: Path) -> None:
    for step in (5, 100, 20):
        write(tmp_path, step)
    shards(tmp_path, 200, "token")
    (tmp_path / "step-3").mkdir()
    (tmp_path / "notes.txt").write_bytes(b"")
    assert [info.step for info in catalog.steps(DiskDirectory(tmp_path))] == [100, 20, 5]
    assert [info.step for info in catalog.uncommitted(DiskDirectory(tmp_path))] == [200]
    assert catalog.steps(DiskDirectory(tmp_path / "nowhere")) == []


def remove_shard(storage: DiskStorage) -> None:
    storage.remove(draft_of(LAYOUT).file_name(1))


def remove_sums(storage: DiskStorage) -> None:
    storage.remove(draft_of(LAYOUT).file_name(1) + ".sums")


def truncate(storage: DiskStorage) -> None:
    os.truncate(storage.path / draft_of(LAYOUT).file_name(0), 10)


def empty_manifest(storage: DiskStorage) -> None:
    (storage.path / MANIFEST_NAME).write_bytes(b"")


@pytest.mark.parametrize("damage", [remove_shard, remove_sums, truncate, empty_manifest])
def test_the_newest_good_step_is_chosen(
    tmp_path: Path, damage: object, capsys: pytest.CaptureFixture[str]
) -> None:
    storages = {step: write(tmp_path, step) for step in (1, 2, 3)}
    assert catalog.newest_good(DiskDirectory(tmp_path)) == 3
    assert catalog.newest_good(DiskDirectory(tmp_path), excluding={3}) == 2
    damage(storages[3])  # type: ignore[operator]
    assert catalog.step_error_text(storages[3]) is not None
    assert catalog.newest_good(DiskDirectory(tmp_path)) == 2
    assert catalog.newest_good(DiskDirectory(tmp_path), excluding=(2,)) == 1
    assert catalog.newest_good(DiskDirectory(tmp_path), excluding=(1, 2)) is None
    assert capsys.readouterr().err == ""
    assert catalog.resolve(tmp_path).where == storages[2].where
    told = capsys.readouterr().err
    assert told.startswith("step 3 is damaged (") and told.endswith("); step 2 is used\n")
    (tmp_path / step_directory(4)).mkdir()
    assert catalog.resolve(storages[2].path).where == storages[2].where
    assert capsys.readouterr().err == ""
    assert catalog.find(storages[3].path).where == storages[3].where
    with pytest.raises(CheckpointDamaged):
        catalog.resolve(storages[3].path)


def test_paths_that_mean_no_step(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        catalog.resolve(tmp_path / "nowhere")
    with pytest.raises(UserError, match="does not exist"):
        catalog.resolve(tmp_path / "step-000000000001")
    with pytest.raises(UserError, match="holds no checkpoint: it is empty"):
        catalog.resolve(tmp_path)
    empty_manifest(write(tmp_path, 1))
    with pytest.raises(UserError, match="1 damaged"):
        catalog.resolve(tmp_path)


def test_a_step_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    storages = {step: write(tmp_path, step) for step in (1, 2)}
    refuse(monkeypatch, storages[2].path)
    assert catalog.resolve(tmp_path).where == storages[1].where
    told = capsys.readouterr().err
    assert told.startswith("step 2 cannot be read (") and "Permission denied); step 1" in told
    refuse(monkeypatch, tmp_path)
    with pytest.raises(StorageError, match="Permission denied"):
        catalog.resolve(tmp_path)
    rows = [report.row_of(info) for info in catalog.steps(DiskDirectory(tmp_path))]
    assert [row["unreadable"] for row in rows] == [True, True]
    text = report.steps_text("there", rows, [])
    assert "UNREADABLE: " in text and "DAMAGED" not in text
    with pytest.raises(StorageError, match="Permission denied"):
        list(verify.find_corruption(storages[1]))


def refuse(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Files below a place can no longer be opened: as for another user, and also for root."""
    opens = os.open

    def refusing(path: str | Path, *rest: int) -> int:
        if Path(path).is_file() and Path(path).is_relative_to(place):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opens(path, *rest)

    monkeypatch.setattr(os, "open", refusing)


def test_a_new_directory_is_made_and_left_empty(tmp_path: Path) -> None:
    catalog.check_writable(DiskDirectory(tmp_path / "a" / "b"))
    assert os.listdir(tmp_path / "a" / "b") == []


def test_directories_of_checkpoints_and_fresh_volumes_are_taken(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".snapshot").mkdir()
    catalog.check_writable(DiskDirectory(tmp_path))
    write(tmp_path, 1)
    (tmp_path / "notes.txt").write_bytes(b"")
    catalog.check_writable(DiskDirectory(tmp_path))


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    for name in ("thesis.tex", "b", "c", "d"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"holds other things \(b, c, d, \.\.\.\)"):
        catalog.check_writable(DiskDirectory(tmp_path))


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/elasticzero")):
        with pytest.raises(StorageError, match=f"directory {place} cannot be written"):
            catalog.check_writable(DiskDirectory(place))
