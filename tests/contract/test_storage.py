"""One contract for every place that checkpoints are written to: a disk, `memory://`, S3, others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import MANIFEST_NAME, step_directory
from elasticzero.checkpoint.steps import catalog, commit, verify
from elasticzero.checkpoint.steps.retention import RetentionPolicy, apply_retention
from elasticzero.checkpoint.steps.tag_files import read_tags
from elasticzero.checkpoint.steps.tags import set_tags
from elasticzero.checkpoint.storage import multipart
from elasticzero.checkpoint.storage.base import Directory, Storage, read_small
from elasticzero.checkpoint.storage.object_store import ObjectDirectory, Remote
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import StorageError, UserError
from tests.unit.checkpoint.cases import draft_of, elements, simple_layout, write_ranks

CONTENT = bytes(range(256)) * 40
LAYOUT = simple_layout(numel=100)
LARGE = bytes(range(251)) * (11 << 12)
"""More than two parts of an upload."""
_memories = itertools.count()


@pytest.fixture(params=["disk", "memory", "folders", "s3"])
def directory(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Directory:
    monkeypatch.setattr(multipart, "UPLOAD_PART_BYTES", 5 << 20)
    if request.param == "disk":
        return open_directory(tmp_path / "run")
    if request.param == "memory":
        return open_directory(f"memory://contract-{next(_memories)}/run")
    if request.param == "folders":
        # The way of all other file systems of fsspec, with one that is at hand.
        remote, root = Remote(LocalFileSystem()), str(tmp_path / "run")
        return ObjectDirectory(remote, root, root)
    request.getfixturevalue("s3")
    return open_directory("s3://bucket/some/run")


@pytest.fixture
def storage(directory: Directory) -> Storage:
    return directory.make("step")


def read(storage: Storage, name: str, start: int, count: int) -> bytes:
    data = bytearray(count)
    return bytes(data[: storage.read_into(name, start, memoryview(data))])


def write_step(directory: Directory, step: int, token: str = "token") -> Manifest:
    draft = draft_of(LAYOUT, step=step, token=token)
    storage = commit.prepare(directory, step)
    write_ranks(storage, draft, elements(LAYOUT.tensors))
    assert commit.commit(storage, draft, wait_s=0.0)
    return draft


@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_what_is_written_is_read_by_ranges(storage: Storage, size: int | None) -> None:
    storage.write("file", [CONTENT[:5], b"", memoryview(CONTENT)[5:]], size=size)
    assert storage.size("file") == len(CONTENT)
    for start, count in ((0, 1), (0, len(CONTENT)), (1000, 3000), (len(CONTENT) - 1, 1), (5, 0)):
        assert read(storage, "file", start, count) == CONTENT[start : start + count]
    assert read(storage, "file", len(CONTENT) - 10, 100) == CONTENT[-10:]
    assert read(storage, "file", len(CONTENT), 100) == b""
    assert read(storage, "file", len(CONTENT) + 1000, 100) == b""


def test_a_large_file_is_the_same_in_whatever_pieces_it_comes(storage: Storage) -> None:
    reused = bytearray(1 << 20)

    def chunks() -> Iterator[memoryview]:
        for start in range(0, len(LARGE), len(reused)):
            part = LARGE[start : start + len(reused)]
            reused[: len(part)] = part
            yield memoryview(reused)[: len(part)]

    storage.write("file", chunks(), size=len(LARGE))
    assert read(storage, "file", 0, len(LARGE) + 1) == LARGE
    assert read(storage, "file", 6_000_001, 100) == LARGE[6_000_001:6_000_101]


def test_an_empty_file(storage: Storage) -> None:
    storage.write("file", [])
    assert storage.size("file") == 0
    assert read(storage, "file", 0, 10) == b""
    assert storage.names() == ["file"]


def test_a_file_is_replaced(storage: Storage) -> None:
    storage.write("file", [b"old and longer"])
    storage.write("file", [b"new"])
    assert read_small(storage, "file", 99) == b"new"
    assert storage.names() == ["file"]


def test_files_are_named_and_removed(storage: Storage) -> None:
    assert storage.names() == []
    for name in ("b", "a", "c"):
        storage.write(name, [b"x"])
    storage.remove("b")
    storage.remove("b")
    assert storage.names() == ["a", "c"]


def test_a_file_that_is_not_there(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.size("file")
    with pytest.raises(FileNotFoundError):
        read(storage, "file", 0, 10)
    with pytest.raises(FileNotFoundError):
        read_small(storage, "file", 10)


def test_only_the_first_creates(storage: Storage) -> None:
    assert storage.create_exclusive("file", b"first")
    assert not storage.create_exclusive("file", b"second")
    assert not storage.create_exclusive("file", b"firs")
    assert storage.create_exclusive("file", b"first")
    assert read_small(storage, "file", 99) == b"first"
    assert storage.names() == ["file"]


def test_of_many_that_create_at_once_one_does(
    directory: Directory, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["directory"] in ("memory", "folders"):
        pytest.skip("this file system has no atomic create: it looks and then writes")
    directory.make("step")
    with ThreadPoolExecutor(8) as pool:
        data = [str(number).encode() for number in range(8)]
        created = list(
            pool.map(lambda text: directory.step("step").create_exclusive("file", text), data)
        )
    assert sum(created) == 1
    assert read_small(directory.step("step"), "file", 9) == data[created.index(True)]


def test_a_file_is_replaced_and_removed_only_as_it_was_read(storage: Storage) -> None:
    assert not storage.create_exclusive("file", b"new", instead_of=b"old")
    storage.remove("file", holding=b"old")
    assert storage.names() == []
    storage.write("file", [b"old"])
    assert not storage.create_exclusive("file", b"new", instead_of=b"older")
    storage.remove("file", holding=b"ol")
    assert read_small(storage, "file", 99) == b"old"
    assert storage.create_exclusive("file", b"new", instead_of=b"old")
    assert storage.create_exclusive("file", b"new", instead_of=b"old"), "an answer that was lost"
    assert not storage.create_exclusive("file", b"late", instead_of=b"old")
    storage.remove("file", holding=b"old")
    assert read_small(storage, "file", 99) == b"new"
    assert storage.names() == ["file"]
    storage.remove("file", holding=b"new")
    assert storage.names() == []


def test_a_file_that_was_written_again_is_another_version(storage: Storage) -> None:
    storage.write("file", [b"old"])
    storage.write("other", [b"old"])
    before = storage.versions()
    assert before.keys() == {"file", "other"}
    assert storage.versions() == before
    storage.write("file", [b"new"])
    after = storage.versions()
    assert after["file"] != before["file"] and after["other"] == before["other"]
    storage.remove("file", version=before["file"])
    assert read_small(storage, "file", 99) == b"new"
    storage.remove("file", version=after["file"], holding=b"old")
    assert storage.versions() == after
    storage.remove("file", version=after["file"], holding=b"new")
    storage.remove("other", version=before["other"])
    storage.remove("other", version=before["other"])
    assert storage.names() == []
    assert storage.versions() == {}


def test_of_many_that_replace_at_once_one_does(
    directory: Directory, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["directory"] == "folders":
        pytest.skip("this file system has no conditional put: it looks and then writes")
    directory.make("step").write("file", [b"old"])
    with ThreadPoolExecutor(8) as pool:
        data = [f"new {number}".encode() for number in range(8)]
        replaced = list(
            pool.map(
                lambda text: directory.step("step").create_exclusive(
                    "file", text, instead_of=b"old"
                ),
                data,
            )
        )
    assert sum(replaced) == 1
    storage = directory.step("step")
    assert read_small(storage, "file", 9) == data[replaced.index(True)]
    assert storage.names() == ["file"]


def test_of_many_that_write_at_once_one_whole_file_stays(storage: Storage) -> None:
    with ThreadPoolExecutor(4) as pool:
        contents = [bytes([number]) * (1 << 18) for number in range(4)]
        list(pool.map(lambda text: storage.write("file", [text] * 8), contents))
    assert read(storage, "file", 0, 1 << 22) in [text * 8 for text in contents]
    assert storage.names() == ["file"]


@pytest.mark.parametrize("before", [1, 12 << 20])
def test_a_failed_write_leaves_what_was_there_and_no_more(storage: Storage, before: int) -> None:
    def breaks() -> Iterator[bytes]:
        yield bytes(before)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        storage.write("new", breaks())
    assert storage.names() == []
    storage.write("file", [b"old"])
    with pytest.raises(ZeroDivisionError):
        storage.write("file", breaks())
    assert read_small(storage, "file", 99) == b"old"
    assert storage.names() == ["file"]


def test_a_directory_that_is_not_there_is_empty(directory: Directory) -> None:
    assert directory.names() == []
    assert directory.files() == {}
    assert directory.step("step").names() == []
    directory.remove("step")
    assert catalog.newest_good(directory) is None


def test_a_directory_names_its_steps_and_their_files(directory: Directory) -> None:
    directory.make("a").write("one", [b"1"])
    directory.make("b").write("two", [b"2"])
    directory.step("b").write("three", [b"3"])
    assert directory.names() == ["a", "b"]
    assert {step: sorted(files) for step, files in directory.files().items()} == {
        "a": ["one"],
        "b": ["three", "two"],
    }
    assert directory.step("b").where == f"{directory.where}/b"
    directory.remove("b")
    assert directory.step("b").names() == ["three", "two"]
    for name in directory.step("b").names():
        directory.step("b").remove(name)
    directory.remove("b")
    directory.remove("b")
    assert directory.names() == ["a"]


def test_a_new_directory_can_be_written_and_stays_empty(directory: Directory) -> None:
    catalog.check_writable(directory)
    assert directory.names() == []
    directory.make("thesis").write("text", [b"x"])
    with pytest.raises(UserError, match="holds other things"):
        catalog.check_writable(directory)


def test_a_checkpoint_is_written_found_verified_and_tidied(directory: Directory) -> None:
    for step in (1, 2, 3):
        draft = write_step(directory, step)
    left = replace(draft, step=2, token="g000001-0123456789abcdef")
    write_ranks(commit.prepare(directory, 2), left, elements(LAYOUT.tensors))
    assert catalog.newest_good(directory) == 3
    newest = catalog.resolve(directory.where)
    assert newest.where == f"{directory.where}/{step_directory(3)}"
    assert catalog.resolve(newest.where).where == newest.where
    assert list(verify.find_corruption(newest)) == []
    tidied = apply_retention(directory, draft, RetentionPolicy())
    assert (len(tidied.files), tidied.steps, tidied.problems) == (4, [], [])
    newest.remove(draft.file_name(1))
    assert catalog.newest_good(directory) == 2
    draft = write_step(directory, 4)
    tidied = apply_retention(directory, draft, RetentionPolicy(last=1))
    assert (sorted(tidied.steps), tidied.files, tidied.problems) == ([1, 2, 3], [], [])
    assert directory.names() == [step_directory(4)]


def test_a_tag_names_a_step_and_moves_to_a_newer_one(directory: Directory) -> None:
    for step in (1, 2, 3):
        write_step(directory, step)
    set_tags(directory, 1, ["best", "first"])
    set_tags(directory, 2, ["best"])
    set_tags(directory, 1, ["best"])
    assert read_tags(directory) == {"best": 2, "first": 1}
    assert directory.step("tags").names() == ["best.json", "first.json"]
    assert catalog.resolve(f"{directory.where}/tags/best").where == (
        f"{directory.where}/{step_directory(2)}"
    )
    draft = write_step(directory, 4)
    tidied = apply_retention(directory, draft, RetentionPolicy(last=1))
    assert (tidied.steps, tidied.files, tidied.problems) == ([3], [], [])
    set_tags(directory, 4, ["best", "first"])
    tidied = apply_retention(directory, draft, RetentionPolicy(last=1))
    assert (sorted(tidied.steps), tidied.problems) == ([1, 2], [])
    assert directory.names() == [step_directory(4), "tags"]
    assert catalog.newest_good(directory) == 4


def test_the_first_whole_save_wins_a_damaged_one_is_replaced(
    directory: Directory,
) -> None:
    first = write_step(directory, 1, "first")
    storage = directory.step(step_directory(1))
    second = draft_of(LAYOUT, step=1, token="second")
    write_ranks(storage, second, elements(LAYOUT.tensors, seed=2))
    assert not commit.commit(storage, second, wait_s=0.0)
    assert catalog.read_manifest(storage).token == "first"
    storage.remove(first.file_name(0))
    assert commit.commit(storage, second, wait_s=0.0)
    assert catalog.read_manifest(storage).token == "second"
    assert list(verify.find_corruption(storage)) == []
    assert len(storage.names()) == 5 and MANIFEST_NAME in storage.names()


def test_a_wait_for_the_others_ends_when_it_is_given_up(directory: Directory) -> None:
    storage = commit.prepare(directory, 1)
    reasons = iter([None, None, "generation 4 has begun"])
    with pytest.raises(StorageError, match=r"generation 4 has begun.* 2 ranks \(0, 1\) of 2"):
        commit.commit(storage, draft_of(LAYOUT, step=1), wait_s=60.0, give_up=lambda: next(reasons))
    assert storage.names() == []
