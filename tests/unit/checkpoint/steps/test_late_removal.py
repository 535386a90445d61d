"""A process removes the files of a failed save late, while the save is tried again.

The second attempt has files of the same names and bytes, and is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.steps import commit, verify
from elasticzero.checkpoint.steps.loose_files import remove_loose, written_anew
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.errors import StorageError
from tests.unit.checkpoint.cases import draft_of, simple_layout, write_ranks
from tests.unit.checkpoint.steps.test_fence import (
    ALL,
    CONTENTS,
    OLD,
    draft,
    shards,
    state,
    whole_save,
)


class Meanwhile(DiskStorage):
    """Something else happens just after a file was removed."""

    def __init__(self, storage: DiskStorage, name: str, happens: Callable[[], object]) -> None:
        super().__init__(storage.path, durable=False)
        self._name = name
        self._happens = happens

    def remove(
        self, name: str, *, holding: bytes | None = None, version: str | None = None
    ) -> None:
        super().remove(name, holding=holding, version=version)
        if name == self._name:
            self._happens()


def test_a_save_that_is_committed_during_the_removal_stays(place: Path) -> None:
    """Its committer lists its files before the first one goes, and is told that all is well."""
    directory = DiskDirectory(place)
    storage = shards(directory, 100, OLD)
    assert isinstance(storage, DiskStorage)
    sums = draft(100, OLD).file_name(0) + ".sums"
    data = (storage.path / sums).read_bytes()

    def commit_before() -> None:
        storage.write(sums, [data])
        assert commit.commit(storage, draft(100, OLD), wait_s=0.0)
        storage.remove(sums)

    names = [name for name in storage.names() if OLD in name]
    assert remove_loose(Meanwhile(storage, sums, commit_before), OLD, names) == []
    assert state(directory) == {100: (OLD, None)}


AGAIN = [draft(100, OLD).file_name(rank) + end for end in (".sums", "") for rank in (0, 1)]
"""The files of a failed save, in the order in which they are removed."""


@pytest.mark.parametrize("name", AGAIN)
def test_a_save_that_is_tried_again_during_the_removal_stays(place: Path, name: str) -> None:
    """It was committed, and then lost the shards that it had written under the same names."""
    directory = DiskDirectory(place)
    storage = shards(directory, 100, OLD)
    assert isinstance(storage, DiskStorage)
    again: list[bool] = []
    removed = Meanwhile(storage, name, lambda: again.append(whole_save(directory, 100, OLD, ALL)))
    remove_loose(removed, OLD, [name for name in storage.names() if OLD in name])
    assert again == [True]
    assert state(directory) == {100: (OLD, None)}
    assert not list(verify.find_corruption(directory.step(step_directory(100))))


class MeanwhileUnconditional(Meanwhile):
    """A storage that cannot compare a file and remove it in one request."""

    def remove(
        self, name: str, *, holding: bytes | None = None, version: str | None = None
    ) -> None:
        super().remove(name, holding=holding)


def test_a_step_whose_files_went_nevertheless_is_withdrawn(place: Path) -> None:
    """A step without files does not stay."""
    directory = DiskDirectory(place)
    storage = shards(directory, 100, OLD)
    assert isinstance(storage, DiskStorage)
    removed = MeanwhileUnconditional(
        storage, AGAIN[2], lambda: whole_save(directory, 100, OLD, ALL)
    )
    remove_loose(removed, OLD, [name for name in storage.names() if OLD in name])
    assert state(directory) == {}


class Late(Meanwhile):
    """Something else happens just before a file is removed."""

    def remove(
        self, name: str, *, holding: bytes | None = None, version: str | None = None
    ) -> None:
        if name == self._name:
            self._happens()
        DiskStorage.remove(self, name, holding=holding, version=version)


@pytest.mark.parametrize("room", [True, False])
def test_a_shard_that_is_written_anew_leaves_a_step_that_was_committed_meanwhile(
    place: Path, room: bool
) -> None:
    """Two nodes hold it. One saw it without its checksum file, for the other was about to write
    that, and removed it seconds later: the last checkpoint was withdrawn, which the committer had
    said was saved. Where it cannot be written again the step does not stay."""
    directory = DiskDirectory(place)
    storage = shards(directory, 100, OLD)
    assert isinstance(storage, DiskStorage)
    shard = draft(100, OLD).file_name(0)
    files = (shard, shard + ".sums")
    data, sums = ((storage.path / name).read_bytes() for name in files)
    storage.remove(files[1])

    def commit_before() -> None:
        storage.write(files[1], [sums])
        assert commit.commit(storage, draft(100, OLD), wait_s=0.0)

    late = Late(storage, shard, commit_before)
    ends = nullcontext() if room else pytest.raises(StorageError)
    with ends, written_anew(late, OLD, files):
        assert not (storage.path / shard).exists()
        if not room:
            raise StorageError("no space left")
        storage.write(shard, [data])
    assert state(directory) == ({100: (OLD, None)} if room else {})


def test_another_save_of_the_token_outlives_the_removal(place: Path) -> None:
    """A node that holds the snapshot whole saves it in a file of its own, while the part of a save
    that has failed is removed. The last good step was withdrawn, though nothing of it was gone."""
    directory = DiskDirectory(place)
    storage = shards(directory, 100, OLD)
    layout = simple_layout(world_size=1, numel=100)
    whole = replace(draft_of(layout, step=100, token=OLD), generation=5)

    def save_whole() -> None:
        write_ranks(storage, whole, CONTENTS)
        assert commit.commit(storage, whole, wait_s=0.0)

    assert isinstance(storage, DiskStorage)
    names = [name for name in storage.names() if OLD in name]
    remove_loose(Meanwhile(storage, draft(100, OLD).file_name(1), save_whole), OLD, names)
    assert state(directory) == {100: (OLD, None)}
    assert not set(names) & set(storage.names())
