"""Storage that does not answer a request of a commit, or of a removal, and may have done it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.steps import commit
from elasticzero.checkpoint.steps.loose_files import remove_loose
from elasticzero.checkpoint.storage.base import Storage
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import StorageError
from tests.unit.checkpoint.steps.test_fence import (
    OLD,
    Unanswered,
    assert_all_good,
    before_the_manifest,
    draft,
    shards,
    state,
)

is_done = pytest.mark.parametrize("done", [False, True])


class CommittedAtTheFirstRemoval(Unanswered):
    """The save whose files are removed is committed just before the first of them goes; a request
    fails after that."""

    def __init__(self, storage: Storage, request: str, *, done: bool) -> None:
        super().__init__(storage, set(), done=done)
        self._request = request
        self.committed = False

    @property
    def has_failed(self) -> bool:
        return self.committed and not self._requests

    def remove(self, name: str, **condition: Any) -> None:
        if not self.committed:
            self.committed = commit.commit(self._storage, draft(100, OLD), wait_s=0.0)
            self._requests.add(self._request)
        self.__getattr__("remove")(name, **condition)


@is_done
@pytest.mark.parametrize("request_name", ["create_exclusive", "remove", "read_into"])
def test_a_save_is_left_whole_that_is_committed_meanwhile(
    request_name: str, done: bool, tmp_path: Path
) -> None:
    """The checksum files that were removed are written back, whatever request fails once."""
    directory = open_directory(str(tmp_path))
    plain = shards(directory, 100, OLD)
    storage: Any = CommittedAtTheFirstRemoval(plain, request_name, done=done)
    with suppress(StorageError):
        assert remove_loose(storage, OLD, plain.names()) == []
    assert storage.has_failed
    assert_all_good(directory)
    assert state(directory) == {100: (OLD, None)}


def test_a_manifest_is_withdrawn_whose_request_was_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage made it and did not say so. The shards had been removed before, so that the step was
    committed without them."""
    directory = open_directory(str(tmp_path))
    shards(directory, 100, OLD)
    plain = directory.step(step_directory(100))
    requests = {"create_exclusive"}
    storage: Any = Unanswered(plain, requests, done=True)
    names = [draft(100, OLD).file_name(1)]
    before_the_manifest(monkeypatch, lambda: remove_loose(plain, OLD, names))
    with pytest.raises(StorageError, match="the shards of rank 1 of 2 were removed"):
        commit.commit(storage, draft(100, OLD), wait_s=0.0)
    assert not requests
    assert state(directory) == {}


def test_a_manifest_counts_whose_request_was_not_answered(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path))
    requests = {"create_exclusive"}
    storage: Any = Unanswered(shards(directory, 100, OLD), requests, done=True)
    assert commit.commit(storage, draft(100, OLD), wait_s=0.0)
    assert state(directory) == {100: (OLD, None)} and not requests
