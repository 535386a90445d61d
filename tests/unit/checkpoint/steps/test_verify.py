"""What `verify` says of files that stand in each other's place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticzero.checkpoint.steps import verify
from elasticzero.checkpoint.storage.disk import DiskStorage
from tests.unit.checkpoint.cases import draft_of, elements, simple_layout, write_ranks, write_step

LAYOUT = simple_layout(numel=100)
DRAFT = draft_of(LAYOUT, step=20, token="g000003-0123456789abcdef")
OTHER = draft_of(LAYOUT, step=20, token="g000004-0123456789abcdef")


@pytest.fixture
def storage(tmp_path: Path) -> DiskStorage:
    return write_step(tmp_path, DRAFT, elements(LAYOUT.tensors))


def swap(storage: DiskStorage, suffix: str) -> None:
    first, second = (storage.path / (DRAFT.file_name(rank) + suffix) for rank in (0, 1))
    aside = first.with_name("aside")
    for source, target in ((first, aside), (second, first), (aside, second)):
        source.rename(target)


def swap_shards(storage: DiskStorage) -> None:
    swap(storage, "")


def swap_ranks(storage: DiskStorage) -> None:
    swap(storage, "")
    swap(storage, ".sums")


@pytest.mark.parametrize("harm", [swap_shards, swap_ranks])
def test_swapped_files_are_told(storage: DiskStorage, harm: Callable[[DiskStorage], None]) -> None:
    harm(storage)
    reasons = {fault.file: fault.reason for fault in verify.find_corruption(storage)}
    assert list(reasons) == [DRAFT.file_name(0), DRAFT.file_name(1)]
    assert "it is the file of rank '1', from another" in reasons[DRAFT.file_name(0)]
    assert "it is the file of rank '0', from another" in reasons[DRAFT.file_name(1)]


@pytest.mark.parametrize("suffixes", [("",), ("", ".sums")])
def test_another_generation_s_file_is_told(storage: DiskStorage, suffixes: tuple[str, ...]) -> None:
    write_ranks(storage, OTHER, elements(LAYOUT.tensors, seed=1))
    for suffix in suffixes:
        shutil.copy(
            storage.path / (OTHER.file_name(1) + suffix),
            storage.path / (DRAFT.file_name(1) + suffix),
        )
    (fault,) = verify.find_corruption(storage)
    assert fault.file == DRAFT.file_name(1)
    assert "it is the file of token 'g000004-0123456789abcdef'" in fault.reason


def test_a_wrong_byte_does_not_make_a_file_another_one(storage: DiskStorage) -> None:
    path = storage.path / DRAFT.file_name(1)
    os.truncate(path, path.stat().st_size - 1)
    (fault,) = verify.find_corruption(storage)
    assert (fault.start, fault.stop) == (0, path.stat().st_size + 1)
    assert fault.reason == "not what was written, or missing"
