"""A save that is harmed at each of its calls into the operating system, one after another.

Whatever happened, a reader gets the old state or the new one, bit for bit; and the next save works
and clears away what the harmed one left.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from elasticzero.checkpoint import commit, verify
from elasticzero.checkpoint.disk import DiskDirectory
from elasticzero.checkpoint.manifest import MANIFEST_NAME, Manifest, step_directory
from elasticzero.checkpoint.retention import Keep, tidy
from elasticzero.checkpoint.shards import open_shard, shard_specs
from elasticzero.checkpoint.storage import Readable
from elasticzero.errors import ElasticZeroError
from elasticzero.spans import Span
from tests.unit.checkpoint_cases import (
    cut,
    draft_of,
    elements,
    flip,
    simple_layout,
    write_ranks,
)
from tests.unit.disk_faults import Faults, Harm, Killed

LAYOUT = simple_layout(world_size=2, numel=40)
HARMS = [harm for harm in get_args(Harm) if harm != "none"]


@pytest.fixture
def root() -> Iterator[Path]:
    """In memory, where fsync takes no time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


def draft(step: int, generation: int) -> Manifest:
    token = f"g{generation:06d}-0123456789abcdef"
    return draft_of(LAYOUT, step=step, token=token, generation=generation)


def save(root: Path, manifest: Manifest, *, replacing: bool = False, keep: int = 1) -> bool:
    """Both ranks' part, the commit and what follows it; whether the step stands with our files."""
    directory = DiskDirectory(root)
    try:
        storage = commit.prepare(directory, manifest.step)
        write_ranks(storage, manifest, elements(LAYOUT.tensors, seed=manifest.generation))
        if not commit.commit(storage, manifest, wait_s=0.0, replacing=replacing):
            return False
    except ElasticZeroError:
        for rank in range(LAYOUT.world_size):
            commit.discard(directory, manifest, rank)
        return False
    tidy(directory, manifest, Keep(last=keep))
    return True


def save_harmed(
    root: Path, faults: Faults, manifest: Manifest, *, replacing: bool = False, keep: int = 1
) -> bool:
    try:
        with faults:
            return save(root, manifest, replacing=replacing, keep=keep)
    except Killed:
        return False


def assert_holds(storage: Readable, generation: int) -> None:
    """A step is whole, and holds just what that generation saved."""
    assert list(verify.faults(storage)) == []
    manifest = commit.read_manifest(storage)
    assert manifest.generation == generation
    contents = elements(LAYOUT.tensors, seed=generation)
    for rank in range(LAYOUT.world_size):
        shard = open_shard(storage, manifest, rank)
        spans = LAYOUT.spans(rank)
        for name, spec in shard_specs(manifest, rank).items():
            read = bytearray(spec.nbytes)
            shard.read_into(name, Span(0, spec.numel), memoryview(read))
            assert read == cut(contents[name], spec.dtype, spans[name])


def assert_next_save_works(root: Path) -> None:
    """And leaves nothing of the harmed one."""
    assert save(root, draft(3, 9))
    assert_holds(commit.resolve(root), 9)
    files = DiskDirectory(root).files()
    assert all(len(names) == 5 and MANIFEST_NAME in names for names in files.values()), files


def number_of_calls(root: Path, harm: Harm, *, replacing: bool) -> int:
    counting: Harm = "full" if harm.startswith("full") else "kill"
    faults = Faults(root, counting)
    assert save_harmed(root, faults, draft(2, 5), replacing=replacing)
    return len(faults.calls)


@pytest.mark.parametrize("harm", HARMS)
def test_the_old_state_or_the_new_one(root: Path, harm: Harm) -> None:
    assert save(root / "count", draft(1, 4))
    calls = number_of_calls(root / "count", harm, replacing=False)
    assert calls > 25
    outcomes = set()
    for at in range(calls):
        place = root / str(at)
        assert save(place, draft(1, 4))
        faults = Faults(place, harm, at)
        saved = save_harmed(place, faults, draft(2, 5))
        newest = commit.newest_good(DiskDirectory(place))
        outcomes.add(newest)
        try:
            assert newest == 2 or (newest == 1 and not saved)
            assert_holds(commit.resolve(place), 4 if newest == 1 else 5)
            assert_next_save_works(place)
        except BaseException as error:
            error.add_note(f"{harm} at call {at}, {faults.calls[at]}, of {faults.calls}")
            raise
    assert outcomes == {1, 2}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_step_is_replaced_without_a_moment_with_less(root: Path, harm: Harm) -> None:
    def damaged(place: Path) -> dict[str, bytes]:
        """Step 1 is good; of step 2 a byte is wrong, which only who reads it knows."""
        assert save(place, draft(1, 3), keep=9)
        assert save(place, draft(2, 4), keep=9)
        step = place / step_directory(2)
        flip(step / draft(2, 4).file_name(0), -1)
        return {path.name: path.read_bytes() for path in step.iterdir()}

    damaged(root / "count")
    calls = number_of_calls(root / "count", harm, replacing=True)
    for at in range(calls):
        place = root / str(at)
        before = damaged(place)
        faults = Faults(place, harm, at)
        save_harmed(place, faults, draft(2, 5), replacing=True, keep=9)
        try:
            step = DiskDirectory(place).step(step_directory(2))
            assert commit.fault(step) is None
            if commit.read_manifest(step).generation == 5:
                assert_holds(step, 5)
            else:
                assert {name: (step.path / name).read_bytes() for name in before} == before
            assert_holds(DiskDirectory(place).step(step_directory(1)), 3)
            assert_next_save_works(place)
        except BaseException as error:
            error.add_note(f"{harm} at call {at}, {faults.calls[at]}, of {faults.calls}")
            raise
