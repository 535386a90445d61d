"""Which step a tag names: whatever is killed, and whoever else writes it meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticzero.checkpoint.format.manifest import Manifest, from_json, to_json
from elasticzero.checkpoint.format.names import (
    MANIFEST_NAME,
    TAGS_DIRECTORY,
    is_tag,
    step_directory,
    tag_file_name,
    tag_of_file,
)
from elasticzero.checkpoint.steps import catalog, commit, tags
from elasticzero.checkpoint.steps.retention import (
    HOUR_S,
    CleanupResult,
    RetentionPolicy,
    apply_retention,
)
from elasticzero.checkpoint.steps.tag_files import read_tag, read_tags, write_tag
from elasticzero.checkpoint.steps.tags import set_tags
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.errors import CheckpointDamaged, StorageError, UserError
from tests.support.cases import slow
from tests.unit.checkpoint.cases import draft_of, elements, simple_layout, write_ranks, write_step
from tests.unit.checkpoint.disk_faults import Faults, Harm, Killed

LAYOUT = simple_layout(numel=40)
CONTENTS = elements(LAYOUT.tensors)
ONE = RetentionPolicy(last=1)


def draft(step: int, *names: str, generation: int = 3) -> Manifest:
    token = f"g{generation:06d}-0123456789abcdef"
    made = draft_of(LAYOUT, step=step, token=token, generation=generation)
    return replace(made, tags=names)


def write(directory: Path, step: int, *names: str, generation: int = 3) -> Manifest:
    made = draft(step, *names, generation=generation)
    write_step(directory, made, CONTENTS)
    return made


def keep(directory: Path, committed: Manifest, policy: RetentionPolicy = ONE) -> CleanupResult:
    done = apply_retention(DiskDirectory(directory), committed, policy)
    assert not done.problems
    return done


def steps(directory: Path) -> list[int]:
    return [info.step for info in catalog.steps(DiskDirectory(directory))]


def named(directory: Path) -> dict[str, int]:
    return read_tags(DiskDirectory(directory))


@pytest.mark.parametrize("tag", ["best", "a", "0.125", "-x", "_", "v1.json", "x" * 64, "A-b_c.d"])
def test_a_tag_is_the_name_of_a_file(tag: str) -> None:
    assert is_tag(tag) and tag_of_file(tag_file_name(tag)) == tag


@pytest.mark.parametrize("tag", ["", ".", "..", ".best", "a/b", "a b", "é", "x" * 65, "a\n", "a\0"])
def test_what_is_no_tag(tag: str) -> None:
    assert not is_tag(tag)
    assert tag_of_file(tag + ".json") is None
    with pytest.raises(ValueError, match="is no tag"):
        draft(1, tag)


def test_a_manifest_without_tags_is_as_before() -> None:
    assert b"tags" not in to_json(draft(1))


def test_a_manifest_says_its_tags(tmp_path: Path) -> None:
    write(tmp_path, 4, "best", "last")
    data = (tmp_path / step_directory(4) / MANIFEST_NAME).read_bytes()
    assert json.loads(data)["tags"] == ["best", "last"]
    assert from_json(data, "there").tags == ("best", "last")


def test_the_file_is_for_scripts_too(tmp_path: Path) -> None:
    write(tmp_path, 4)
    set_tags(DiskDirectory(tmp_path), 4, ["best"])
    assert json.loads((tmp_path / "tags" / "best.json").read_text()) == {
        "version": 1,
        "tag": "best",
        "step": 4,
        "directory": "step-000000000004",
    }


def test_tags_move_to_newer_steps_and_not_back(tmp_path: Path) -> None:
    directory = DiskDirectory(tmp_path)
    for step in (1, 2, 3):
        write(tmp_path, step)
    set_tags(directory, 2, ["best", "last"])
    set_tags(directory, 1, ["best", "first"])
    set_tags(directory, 3, ["last"])
    assert named(tmp_path) == {"best": 2, "last": 3, "first": 1}


def test_a_tag_leaves_a_step_that_is_gone_or_damaged(tmp_path: Path) -> None:
    """Training went back to before it: the newer step is no state that anyone can load."""
    directory = DiskDirectory(tmp_path)
    for step in (1, 8, 9):
        write(tmp_path, step)
    set_tags(directory, 8, ["gone"])
    set_tags(directory, 9, ["damaged"])
    (tmp_path / step_directory(8) / MANIFEST_NAME).unlink()
    os.truncate(tmp_path / step_directory(9) / draft(9).file_name(0), 10)
    set_tags(directory, 1, ["gone", "damaged"])
    assert named(tmp_path) == {"gone": 1, "damaged": 1}


def test_a_step_that_is_not_there_gets_no_tag(tmp_path: Path) -> None:
    write(tmp_path, 1)
    set_tags(DiskDirectory(tmp_path), 1, ["best"])
    storage = DiskStorage(tmp_path / step_directory(2), durable=False)
    storage.path.mkdir()
    write_ranks(storage, draft(2, "best"), CONTENTS)
    with pytest.raises(StorageError, match=r"step 2 gets no tag.*never committed"):
        set_tags(DiskDirectory(tmp_path), 2, ["best"])
    assert named(tmp_path) == {"best": 1}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"{}",
        b'{"version":1,"tag":"other","step":1,"directory":"step-000000000001"}',
        b'{"version":2,"tag":"best","step":1,"directory":"step-000000000001"}',
        b'{"version":1,"tag":"best","step":1,"directory":"step-000000000002"}',
        b'{"version":1,"tag":"best","step":-1,"directory":"step--00000000001"}',
        b"[" * 5000,
    ],
)
def test_a_damaged_tag_removes_nothing_and_is_written_anew(tmp_path: Path, text: bytes) -> None:
    directory = DiskDirectory(tmp_path)
    for step in (1, 2):
        last = write(tmp_path, step)
    (tmp_path / TAGS_DIRECTORY).mkdir()
    (tmp_path / "tags" / "best.json").write_bytes(text)
    with pytest.raises(CheckpointDamaged, match=r"tags/best.json is damaged"):
        read_tag(directory, "best")
    done = apply_retention(directory, last, ONE)
    assert "tags/best.json is damaged" in done.problems[0] and steps(tmp_path) == [2, 1]
    set_tags(directory, 2, ["best"])
    assert named(tmp_path) == {"best": 2}
    keep(tmp_path, last)
    assert steps(tmp_path) == [2]


def test_steps_with_tags_stay(tmp_path: Path) -> None:
    directory = DiskDirectory(tmp_path)
    for step in range(1, 9):
        last = write(tmp_path, step)
    set_tags(directory, 2, ["best", "small"])
    set_tags(directory, 5, ["other"])
    keep(tmp_path, last, RetentionPolicy(last=2))
    assert steps(tmp_path) == [8, 7, 5, 2]
    assert named(tmp_path) == {"best": 2, "small": 2, "other": 5}


def test_a_tag_that_moves_frees_the_older_step(tmp_path: Path) -> None:
    directory = DiskDirectory(tmp_path)
    write(tmp_path, 1, "best")
    set_tags(directory, 1, ["best"])
    keep(tmp_path, write(tmp_path, 2))
    assert steps(tmp_path) == [2, 1]
    last = write(tmp_path, 3, "best")
    set_tags(directory, 3, ["best"])
    keep(tmp_path, last)
    assert steps(tmp_path) == [3]


def test_a_step_about_to_be_named_stays_and_gets_its_tag(tmp_path: Path) -> None:
    """Its writer was killed between the manifest and the tag, or is slow; a newer save tidies."""
    directory = DiskDirectory(tmp_path)
    write(tmp_path, 1, "best")
    set_tags(directory, 1, ["best"])
    write(tmp_path, 2, "best", "other")
    last = write(tmp_path, 3)
    keep(tmp_path, last)
    assert steps(tmp_path) == [3, 2, 1]
    assert named(tmp_path) == {"best": 2, "other": 2}
    keep(tmp_path, last)
    assert steps(tmp_path) == [3, 2]


def test_a_damaged_step_about_to_be_named_does_not_stay(tmp_path: Path) -> None:
    write(tmp_path, 2, "best")
    os.truncate(tmp_path / step_directory(2) / draft(2).file_name(0), 10)
    keep(tmp_path, write(tmp_path, 3))
    assert steps(tmp_path) == [3] and named(tmp_path) == {}


def test_what_killed_writers_of_tags_have_left_goes_when_it_is_old(tmp_path: Path) -> None:
    last = write(tmp_path, 1)
    set_tags(DiskDirectory(tmp_path), 1, ["best"])
    old, new = (tmp_path / "tags" / f".best.json.{n}-0123abcd.partial" for n in (12, 13))
    for path in (old, new):
        path.write_bytes(b"{")
    then = last_written(tmp_path, 1) - HOUR_S - 60
    os.utime(old, (then, then))
    keep(tmp_path, last, RetentionPolicy())
    assert sorted(os.listdir(tmp_path / "tags")) == [new.name, "best.json"]


def last_written(directory: Path, step: int) -> float:
    return (directory / step_directory(step) / MANIFEST_NAME).stat().st_mtime


def test_a_directory_of_tags_alone_is_as_good_as_new(tmp_path: Path) -> None:
    write_tag(DiskDirectory(tmp_path), "best", 5)
    catalog.check_writable(DiskDirectory(tmp_path))


class Interrupted(DiskDirectory):
    """Something else happens before the `at`-th call, counted from 0, of one writer."""

    def __init__(self, path: Path, at: int, happens: Callable[[], object]) -> None:
        super().__init__(path)
        self.calls = 0
        self._at, self._happens = at, happens

    def _count(self) -> None:
        self.calls += 1
        if self.calls - 1 == self._at:
            self._happens()

    def names(self) -> list[str]:
        self._count()
        return super().names()

    def make(self, name: str) -> DiskStorage:
        super().make(name)
        return self.step(name)

    def step(self, name: str) -> DiskStorage:
        count = self._count

        class Counting(DiskStorage):
            def size(self, name: str) -> int:
                count()
                return super().size(name)

            def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
                count()
                return super().read_into(name, start, *buffers)

            def write(self, *arguments: object, **options: object) -> None:
                count()
                super().write(*arguments, **options)  # type: ignore[arg-type]

        return Counting(self.path / name, durable=False)


def save(directory: DiskDirectory, manifest: Manifest) -> None:
    """As a node that commits does."""
    storage = commit.prepare(directory, manifest.step)
    write_ranks(storage, manifest, CONTENTS)
    commit.commit(storage, manifest, wait_s=0.0)
    set_tags(directory, manifest.step, manifest.tags)


@pytest.mark.parametrize(("first", "second"), [(5, 9), (9, 5)])
def test_of_two_writers_the_newer_step_wins(tmp_path: Path, first: int, second: int) -> None:
    """The save of `second` is done whole between any two calls of that of `first`."""
    at, calls = 0, 1
    while at < calls:
        place = tmp_path / str(at)
        write(place, 1, "best")
        set_tags(DiskDirectory(place), 1, ["best"])
        write(place, first, "best", generation=4)
        other = draft(second, "best", generation=6)
        writer = Interrupted(place, at, partial(save, DiskDirectory(place), other))
        set_tags(writer, first, ["best"])
        calls = writer.calls
        if at < calls:
            assert named(place) == {"best": 9}, at
        at += 1
    assert calls > 8


@given(
    order=st.permutations(range(6)),
    tagged=st.lists(st.booleans(), min_size=6, max_size=6),
    killed=st.lists(st.booleans(), min_size=6, max_size=6),
)
@settings(max_examples=40, deadline=None)
def test_saves_in_any_order_against_the_newest_of_all(
    tmp_path_factory: pytest.TempPathFactory,
    order: list[int],
    tagged: list[bool],
    killed: list[bool],
) -> None:
    """Each save tags its step, unless it is killed before it; then all begin once more."""
    place = tmp_path_factory.mktemp("steps")
    directory = DiskDirectory(place)
    tagged_steps: list[int] = []
    for step in order:
        write(place, step, *(["best"] if tagged[step] else []))
        if tagged[step] and not killed[step]:
            set_tags(directory, step, ["best"])
        tagged_steps += [step] if tagged[step] else []
        best = named(place).get("best")
        assert best is None or best in tagged_steps
        written = [s for s in tagged_steps if not killed[s]]
        assert not written or (best is not None and best >= max(written))
    for step in tagged_steps:
        set_tags(directory, step, ["best"])
    assert named(place) == ({"best": max(tagged_steps)} if tagged_steps else {})


def save_harmed(place: Path, harm: Harm, at: int) -> Faults:
    """The first step has the tag, and the save of the second is harmed."""
    write(place, 1, "best")
    directory, second = DiskDirectory(place), draft(2, "best")
    set_tags(directory, 1, ["best"])
    faults = Faults(place, harm, at)
    try:
        with faults:
            save(directory, second)
            apply_retention(directory, second, ONE)
    except (Killed, StorageError):
        pass
    return faults


@pytest.mark.usefixtures("in_one_thread")
@pytest.mark.parametrize("harm", ["kill", slow("power cut"), slow("error")])
def test_a_tagged_save_harmed_at_each_call(place: Path, harm: Harm) -> None:
    """The tag names the old step or the new one, which is whole; then the next save works."""
    calls = save_harmed(place / "counted", "kill", -1).calls
    outcomes = set()
    for at in range(len(calls)):
        root = place / str(at)
        faults = save_harmed(root, harm, at)
        directory = DiskDirectory(root)
        tagged = named(root)["best"]
        assert catalog.step_error(directory.step(step_directory(tagged))) is None, faults.calls[at:]
        new = commit.is_good(directory.step(step_directory(2)))
        assert tagged == 1 or new
        outcomes.add((tagged, new))
        third = draft(3, generation=5)
        save(directory, third)
        for _ in range(2):
            keep(root, third)
        best = 2 if new else 1
        assert named(root) == {"best": best} and steps(root) == [3, best], faults.calls[at:]
    assert outcomes == {(1, False), (1, True), (2, True)}


@pytest.fixture
def tagged_run(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "run"
    for step in (1, 2):
        write(place, step)
    set_tags(DiskDirectory(place), 1, ["best"])
    yield place


@pytest.mark.parametrize("path", ["{}/tags/best", "{}/tags/best.json", "file://{}/tags/best"])
def test_a_tag_is_the_path_of_its_step(tagged_run: Path, path: str) -> None:
    storage = catalog.resolve(path.format(tagged_run))
    assert storage.where == str(tagged_run / step_directory(1))
    assert catalog.find(path.format(tagged_run)).where == storage.where


def test_no_job_begins_in_a_tag(tagged_run: Path) -> None:
    """It would begin from nothing where a person wants to go on from the best step."""
    before = sorted(tagged_run.rglob("*"))
    with pytest.raises(UserError, match=r"is a tag, of .*: give the checkpoint directory, or"):
        catalog.check_writable(DiskDirectory(tagged_run / "tags" / "best"))
    assert sorted(tagged_run.rglob("*")) == before


def test_a_tag_of_a_step_that_is_gone(tagged_run: Path) -> None:
    (tagged_run / step_directory(1) / MANIFEST_NAME).unlink()
    with pytest.raises(UserError, match=r"tags/best.json names step 1, which does not exist in"):
        catalog.resolve(tagged_run / "tags" / "best")


def test_a_tag_that_nobody_gave(tagged_run: Path) -> None:
    with pytest.raises(UserError, match="holds no checkpoint"):
        catalog.resolve(tagged_run / "tags" / "worst")


def test_a_checkpoint_directory_may_lie_in_one_named_tags(tmp_path: Path) -> None:
    write(tmp_path / "tags" / "run", 3)
    info = catalog.resolve(tmp_path / "tags" / "run")
    assert info.where.endswith(step_directory(3))


def test_unwritten_tags_are_those_that_name_older_steps() -> None:
    unwritten = tags.unwritten_tags(draft(5, "a", "b", "c", "d"), {"a": 4, "b": 5, "c": 6})
    assert unwritten == ["a", "d"]
