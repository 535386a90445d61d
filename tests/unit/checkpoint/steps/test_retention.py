"""Which checkpoints stay, what failed saves leave, and what nobody else may touch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import MANIFEST_NAME, step_directory, token_generation
from elasticzero.checkpoint.steps import catalog, commit
from elasticzero.checkpoint.steps.retention import (
    COMMIT_S,
    DAY_S,
    HOUR_S,
    CleanupResult,
    RetentionPolicy,
    apply_retention,
    clean_up_after_manual_save,
    make_room,
)
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.errors import StorageError, UserError
from tests.unit.checkpoint.cases import (
    draft_of,
    elements,
    simple_layout,
    write_ranks,
    write_step,
)

LAYOUT = simple_layout(numel=100)
CONTENTS = elements(LAYOUT.tensors)
ALL = RetentionPolicy()


def token(generation: int) -> str:
    return f"g{generation:06d}-{'0123456789abcdef'}"


def draft(step: int, generation: int = 3) -> Manifest:
    return draft_of(LAYOUT, step=step, token=token(generation), generation=generation)


def write(directory: Path, *steps: int, generation: int = 3) -> None:
    for step in steps:
        write_step(directory, draft(step, generation), CONTENTS)


def shards(directory: Path, manifest: Manifest) -> list[str]:
    """A save that got no manifest; its files."""
    storage = DiskStorage(directory / step_directory(manifest.step), durable=False)
    storage.path.mkdir(exist_ok=True)
    write_ranks(storage, manifest, CONTENTS)
    return [n for n in storage.names() if manifest.token in n]


def age(directory: Path, step: int, seconds: float) -> None:
    """Make a step's files older."""
    for path in (directory / step_directory(step)).iterdir():
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


def steps(directory: Path) -> list[int]:
    return [info.step for info in catalog.steps(DiskDirectory(directory))]


def names(directory: Path, step: int) -> list[str]:
    return DiskStorage(directory / step_directory(step)).names()


def run(
    directory: Path,
    committed: Manifest,
    keep: RetentionPolicy = ALL,
    *,
    bad_steps: Collection[int] = (),
) -> CleanupResult:
    tidied = apply_retention(DiskDirectory(directory), committed, keep, bad_steps=bad_steps)
    assert not tidied.problems
    return tidied


def test_tokens_say_their_generation() -> None:
    assert token_generation("g000012-0123456789abcdef") == 12
    assert token_generation("g1234567-0123456789abcdef") == 1234567
    for other in ("0123456789abcdef", "g12-0123456789abcdef", "g000012-xyz", ""):
        assert token_generation(other) is None


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (ALL, [8, 7, 6, 5, 4, 3, 2, 1]),
        (RetentionPolicy(last=1), [8]),
        (RetentionPolicy(last=3), [8, 7, 6]),
        (RetentionPolicy(last=2, every=3), [8, 7, 6, 3]),
        (RetentionPolicy(last=8), [8, 7, 6, 5, 4, 3, 2, 1]),
        (RetentionPolicy(last=9), [8, 7, 6, 5, 4, 3, 2, 1]),
    ],
)
def test_the_newest_stay(tmp_path: Path, keep: RetentionPolicy, left: list[int]) -> None:
    write(tmp_path, *range(1, 9))
    tidied = run(tmp_path, draft(8), keep)
    assert steps(tmp_path) == left
    assert sorted(tidied.steps) == sorted(set(range(1, 9)) - set(left))
    assert sorted(os.listdir(tmp_path)) == [step_directory(step) for step in left[::-1]]
    assert not tidied.files


@pytest.mark.parametrize(
    "numbers", [{"last": 0}, {"last": -1}, {"last": 1, "every": 0}, {"every": 5}]
)
def test_numbers_that_make_no_sense(numbers: dict[str, int]) -> None:
    with pytest.raises(UserError, match="--keep"):
        RetentionPolicy(**numbers)


def test_good_steps_count_and_damaged_ones_newer_than_these_stay(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4, 5)
    os.truncate(tmp_path / step_directory(4) / draft(4).file_name(0), 10)
    run(tmp_path, draft(5), RetentionPolicy(last=2))
    assert steps(tmp_path) == [5, 4, 3]


def test_a_damaged_step_with_right_sizes_does_not_count(tmp_path: Path) -> None:
    """The job went back to step 2, for step 9 is damaged, and has come to step 4."""
    write(tmp_path, 1, 2, 9)
    write(tmp_path, 4, generation=4)
    run(tmp_path, draft(4, 4), RetentionPolicy(last=1), bad_steps={9})
    assert steps(tmp_path) == [9, 4]


def test_what_was_just_committed_stays_though_others_are_newer(tmp_path: Path) -> None:
    write(tmp_path, 1, 8, 9)
    write(tmp_path, 4, generation=4)
    run(tmp_path, draft(4, 4), RetentionPolicy(last=1))
    assert steps(tmp_path) == [9, 4]


@pytest.mark.parametrize("harm", ["gone", "damaged", "another's"])
def test_nothing_goes_unless_what_was_committed_stands(tmp_path: Path, harm: str) -> None:
    write(tmp_path, 1, 2, 3)
    shards(tmp_path, draft(5, 2))
    file = (
        tmp_path / step_directory(3) / (MANIFEST_NAME if harm == "gone" else draft(3).file_name(1))
    )
    if harm != "another's":
        file.unlink()
    committed = draft(3, 4) if harm == "another's" else draft(3)
    tidied = apply_retention(DiskDirectory(tmp_path), committed, RetentionPolicy(last=1))
    assert (tidied.steps, tidied.files) == ([], [])
    assert len(os.listdir(tmp_path)) == 4


def test_leftovers_of_older_generations_and_steps_go(tmp_path: Path) -> None:
    write(tmp_path, 1, 7)
    whole = names(tmp_path, 1)
    left = [step_directory(1) + "/" + n for n in shards(tmp_path, draft(1, 2))]
    left += [step_directory(2) + "/" + n for n in shards(tmp_path, draft(2))]
    left += [step_directory(9) + "/" + n for n in shards(tmp_path, draft(9, 2))]
    partial = f".{draft(9, 2).file_name(1)}.123-ab12cd34.partial"
    (tmp_path / step_directory(9) / partial).write_bytes(b"x")
    left.append(f"{step_directory(9)}/{partial}")
    for step in (1, 7, 9):
        staged = f".{MANIFEST_NAME}.123-ab12cd34.partial"
        (tmp_path / step_directory(step) / staged).write_bytes(b"x")
        left.append(f"{step_directory(step)}/{staged}")
    (tmp_path / step_directory(3)).mkdir()
    age(tmp_path, 9, COMMIT_S + 1)
    tidied = run(tmp_path, draft(7))
    assert sorted(tidied.files) == sorted(left)
    assert sorted(os.listdir(tmp_path)) == [step_directory(1), step_directory(7)]
    assert names(tmp_path, 1) == whole
    assert run(tmp_path, draft(7)).files == []


def test_what_others_may_still_be_writing_stays(tmp_path: Path) -> None:
    """A zombie of generation 3 tidies up while generation 4 saves, a person does by hand, and its
    own next save has begun."""
    write(tmp_path, 5, 7)
    write(tmp_path, 6, generation=4)
    going_on = [draft(2, 4), draft(8), draft(9, 4), draft_of(LAYOUT, step=3, token="byhand")]
    for manifest in going_on:
        shards(tmp_path, manifest)
    (tmp_path / step_directory(8) / f".{MANIFEST_NAME}.12-aabbccdd.partial").write_bytes(b"")
    before = sorted(tmp_path.rglob("*"))
    assert run(tmp_path, draft(7)).files == []
    assert sorted(tmp_path.rglob("*")) == before
    run(tmp_path, draft(7), RetentionPolicy(last=1))
    assert steps(tmp_path) == [7, 6]


def test_what_is_long_untouched_is_nobody_s(tmp_path: Path) -> None:
    """Ages count from what was committed, by the storage's clock: another job's numbers say
    nothing."""
    write(tmp_path, 7)
    write(tmp_path, 1, generation=9)
    shards(tmp_path, draft(2, 9))
    shards(tmp_path, draft_of(LAYOUT, step=3, token="byhand"))
    (tmp_path / step_directory(2) / f".{MANIFEST_NAME}.12-aabbccdd.partial").write_bytes(b"")
    for step in (2, 3):
        age(tmp_path, step, HOUR_S + 60)
    age(tmp_path, 1, DAY_S + 60)
    assert len(run(tmp_path, draft(7)).files) == 4
    assert len(names(tmp_path, 2)) == 4 + 1
    age(tmp_path, 2, DAY_S)
    assert len(run(tmp_path, draft(7), RetentionPolicy(last=1)).files) == 4 + 1
    assert os.listdir(tmp_path) == [step_directory(7)]


def test_a_save_by_hand_replaces_killed_saves_but_none_of_a_job(
    tmp_path: Path,
) -> None:
    manual_draft = draft_of(LAYOUT, step=7, token="mine", generation=9)
    write_step(tmp_path, manual_draft, CONTENTS)
    left = shards(tmp_path, draft_of(LAYOUT, step=7, token="killed"))
    left.append(f".{draft_of(LAYOUT, token='killed').file_name(1)}.123-ab12cd34.partial")
    (tmp_path / step_directory(7) / left[-1]).write_bytes(b"x")
    for manifest in (draft(5, 3), draft(7, 3), draft_of(LAYOUT, step=6, token="other")):
        shards(tmp_path, manifest)
    (tmp_path / step_directory(4)).mkdir()
    before = {*tmp_path.rglob("*")}
    tidied = clean_up_after_manual_save(DiskDirectory(tmp_path), manual_draft)
    assert not tidied.problems
    gone = {tmp_path / step_directory(7) / name for name in left}
    assert before - {*tmp_path.rglob("*")} == gone


def test_what_is_not_of_a_save_is_never_touched(tmp_path: Path) -> None:
    write(tmp_path, 1, 7)
    (tmp_path / "notes").mkdir()
    for place in ("notes/rank-00000-of-00002-x.safetensors", "step-000000000001/notes.txt"):
        (tmp_path / place).write_bytes(b"mine")
        os.utime(tmp_path / place, (0, 0))
    run(tmp_path, draft(7), RetentionPolicy(last=1))
    assert steps(tmp_path) == [7]
    assert (tmp_path / "notes/rank-00000-of-00002-x.safetensors").exists()
    assert names(tmp_path, 1) == ["notes.txt"]


ORDERS = tuple(itertools.product((1, 2), (1, 3, 5)))
"""Runs, each with generations; a run begins with generation 1 again."""


def draft_in(step: int, number: int, generation: int) -> Manifest:
    """A save of a generation of that run."""
    token = f"g{generation:06d}-{number:016x}"
    return draft_of(LAYOUT, step=step, token=token, generation=generation, run=number)


def empty(directory: Path, step: int) -> None:
    """Take all files of a step but its manifest."""
    for name in names(directory, step):
        if name != MANIFEST_NAME:
            (directory / step_directory(step) / name).unlink()


@pytest.mark.parametrize("committed", ORDERS)
@pytest.mark.parametrize("there", ORDERS)
def test_the_run_counts_before_the_generation(
    tmp_path: Path, there: tuple[int, int], committed: tuple[int, int]
) -> None:
    """A second run with generation 1 kept what a first one with generation 5 had left for a day,
    and a saver of the first run removed what the second had committed."""
    for step, order in {8: there, 9: committed}.items():
        write_step(tmp_path, draft_in(step, *order), CONTENTS)
    run(tmp_path, draft_in(9, *committed), RetentionPolicy(last=1))
    assert steps(tmp_path) == ([9, 8] if there > committed else [9])


@pytest.mark.parametrize("committed", ORDERS)
@pytest.mark.parametrize("there", ORDERS)
def test_an_emptied_step_of_an_earlier_run_goes(
    tmp_path: Path, there: tuple[int, int], committed: tuple[int, int]
) -> None:
    """Its manifest has no file any more: its writer was killed before it looked again (FC1)."""
    for step, order in {10: there, 9: committed}.items():
        write_step(tmp_path, draft_in(step, *order), CONTENTS)
    empty(tmp_path, 10)
    run(tmp_path, draft_in(9, *committed))
    assert steps(tmp_path) == ([10, 9] if there >= committed else [9])


def test_a_save_by_hand_leaves_the_emptied_steps_of_every_run(tmp_path: Path) -> None:
    """The run that its manifest states is that of the step that was copied."""
    write(tmp_path, 10)
    empty(tmp_path, 10)
    by_hand = draft_of(LAYOUT, step=9, token="byhand", generation=3, run=2)
    write_step(tmp_path, by_hand, CONTENTS)
    assert not clean_up_after_manual_save(DiskDirectory(tmp_path), by_hand).problems
    assert steps(tmp_path) == [10, 9]


def test_a_manifest_that_does_not_parse_is_left_for_a_person(tmp_path: Path) -> None:
    write(tmp_path, 1, 7)
    shards(tmp_path, draft(1, 2))
    (tmp_path / step_directory(1) / MANIFEST_NAME).write_bytes(b"")
    before = names(tmp_path, 1)
    run(tmp_path, draft(7))
    assert names(tmp_path, 1) == before


class Stuck(DiskStorage):
    """A file system that does not remove one file."""

    def remove(
        self, name: str, *, holding: bytes | None = None, version: str | None = None
    ) -> None:
        if (self.path.name, name) == (step_directory(2), draft(2).file_name(0)):
            raise StorageError(f"cannot remove {name}: Read-only file system")
        super().remove(name, holding=holding, version=version)


class StuckDirectory(DiskDirectory):
    def step(self, name: str) -> DiskStorage:
        return Stuck(self.path / name)


def test_what_cannot_be_removed_is_said_and_the_rest_goes(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 7)
    tidied = apply_retention(StuckDirectory(tmp_path), draft(7), RetentionPolicy(last=1))
    assert [problem.split(": ")[1] for problem in tidied.problems] == ["Read-only file system"]
    assert steps(tmp_path) == [7]
    assert tidied.steps == [1, 2, 3]
    assert run(tmp_path, draft(7)).files
    assert os.listdir(tmp_path) == [step_directory(7)]


def tree(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """A run, and another one's directory, to which links in the first one lead."""
    run, other = tmp_path / "run", tmp_path / "other"
    write(other, 1, 2, 3, generation=2)
    write(run, 7)
    return run, other


@pytest.mark.parametrize("step", [2, 6, 9])
@pytest.mark.parametrize("broken", [False, True])
def test_a_step_that_is_a_link_is_left_alone(
    runs: tuple[Path, Path], step: int, broken: bool
) -> None:
    """With `--keep 1` the checkpoint of the other run was removed."""
    directory, other = runs
    if broken:
        (other / step_directory(2) / MANIFEST_NAME).unlink()
    (directory / step_directory(step)).symlink_to(other / step_directory(2))
    before = tree(other)
    for _ in range(2):
        run(directory, draft(7), RetentionPolicy(last=1))
        clean_up_after_manual_save(DiskDirectory(directory), draft(7))
        make_room(DiskDirectory(directory), draft(10, 9))
    assert tree(other) == before
    assert (directory / step_directory(step)).is_symlink()


def test_links_within_a_step_lose_their_names_at_most(runs: tuple[Path, Path]) -> None:
    directory, other = runs
    write(directory, 2, 3)
    for step in (2, 3):
        source, place = other / step_directory(step), directory / step_directory(step)
        for path in source.iterdir():
            (place / path.name).unlink(missing_ok=True)
            (place / path.name).symlink_to(path)
    (directory / step_directory(3) / MANIFEST_NAME).unlink()
    (directory / "notes").symlink_to(other)
    (directory / "tags").symlink_to(other / step_directory(1))
    (other / step_directory(1) / ".best.json.12-aabbccdd.partial").write_bytes(b"x")
    age(other, 1, 2 * DAY_S)
    before = tree(other)
    apply_retention(DiskDirectory(directory), draft(7), RetentionPolicy(last=1))
    make_room(DiskDirectory(directory), draft(10, 9))
    assert tree(other) == before


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    write(tmp_path / "disk", 1, 2, 7)
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    run(tmp_path / "run", draft(7), RetentionPolicy(last=1))
    assert steps(tmp_path / "disk") == [7]


def test_nothing_is_written_into_a_step_that_is_a_link(runs: tuple[Path, Path]) -> None:
    directory, other = runs
    (directory / step_directory(2)).symlink_to(other / step_directory(2))
    before = tree(other)
    place = DiskDirectory(directory)
    assert commit.is_good(place.step(step_directory(2)))
    with pytest.raises(StorageError, match="is a link to another directory"):
        commit.prepare(place, 2)
    storage = place.step(step_directory(2))
    name = draft(2, 2).file_name(0)
    uses: list[Callable[[], object]] = [
        lambda: storage.write("new", [b"x"]),
        lambda: storage.create_exclusive("new", b"x"),
        lambda: storage.remove(name),
        lambda: storage.remove(MANIFEST_NAME, holding=before["step-000000000002/manifest.json"]),
    ]
    for use in uses:
        with pytest.raises(StorageError, match="is a link to another directory"):
            use()
    commit.discard(place, draft(2, 9), (0, 1))
    assert tree(other) == before


def old_files(directory: Path) -> None:
    """Three committed steps, and what two saves of an earlier generation have left."""
    directory.mkdir()
    write(directory, 2, 5, 9)
    for step in (5, 7):
        shards(directory, draft(step, generation=2))


def files_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_retention_that_ends_early_goes_on_the_next_time(tmp_path: Path) -> None:
    """It is ended before each of its removals in turn: what a job that ends still saves from memory
    waits for it. Every step that is committed has its files then."""
    last = RetentionPolicy(last=1)
    whole = tmp_path / "whole"
    old_files(whole)
    asked = itertools.count()
    apply_retention(DiskDirectory(whole), draft(9), last, go_on=lambda: next(asked) >= 0)
    removals = next(asked)
    assert removals > 12 and steps(whole) == [9]
    left = []
    for most in range(removals):
        directory = tmp_path / str(most)
        old_files(directory)
        asked = itertools.count()
        place, so_far = DiskDirectory(directory), asked
        ended = apply_retention(place, draft(9), last, go_on=lambda: next(so_far) < most)  # noqa: B023
        assert not ended.problems
        assert all(catalog.step_error_text(info.storage) is None for info in catalog.steps(place))
        left.append(len(files_in(directory)))
        run(directory, draft(9), last)
        assert files_in(directory) == files_in(whole)
    assert left == sorted(left, reverse=True) and left[0] > left[-1]
