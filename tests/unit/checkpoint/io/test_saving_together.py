"""What the ranks of a save agree on; ranks are threads here."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.io.writer import (
    SaveCoordination,
    TensorPiece,
    WriteResult,
    write_checkpoint,
)
from elasticzero.checkpoint.steps import catalog, commit
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.errors import ElasticZeroError, RetryError, StorageError
from tests.unit.checkpoint.cases import draft_of, simple_layout

WORLD = 3
DRAFT = draft_of(simple_layout(world_size=WORLD))


class Table:
    """Where the ranks meet to compare numbers."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(WORLD, timeout=20)
        self._numbers: list[int] = []

    def greatest(self, number: int) -> int:
        self._numbers.append(number)
        self._barrier.wait()
        maximum = max(self._numbers)
        if self._barrier.wait() == 0:
            self._numbers.clear()
        self._barrier.wait()
        return maximum


def pieces(rank: int, fails: bool) -> Iterator[TensorPiece]:
    for name, span in DRAFT.layout.spans(rank).items():
        if fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        dtype = torch.float32 if name == "optimizer/w/step" else torch.float64
        yield TensorPiece(name, torch.ones(len(span), dtype=dtype))


def save_all(
    directory: Path, draft: Manifest, *, fails: int = -1, replacing: int = -1
) -> list[WriteResult | ElasticZeroError]:
    """What came of each rank's part."""
    table = Table()

    def save(rank: int) -> WriteResult | ElasticZeroError:
        terms = SaveCoordination(
            allreduce_max=table.greatest, wait_s=600.0, replacing=rank == replacing
        )
        try:
            held = pieces(rank, rank == fails)
            return write_checkpoint(DiskDirectory(directory), draft, rank, held, terms)
        except ElasticZeroError as error:
            return error

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(save, range(WORLD)))


@pytest.mark.parametrize("fails", range(WORLD))
def test_if_one_rank_fails_all_fail_at_once_and_leave_no_file(tmp_path: Path, fails: int) -> None:
    outcomes = save_all(tmp_path, DRAFT, fails=fails)
    assert isinstance(outcomes[fails], StorageError) and "No space left" in str(outcomes[fails])
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != fails]
    assert all(isinstance(outcome, RetryError) for outcome in others)
    assert os.listdir(tmp_path) == []


def test_one_rank_that_knows_of_the_damage_is_enough(tmp_path: Path) -> None:
    def written(**options: int) -> list[bool]:
        token = f"save{len(tokens)}"
        tokens.append(token)
        outcomes = save_all(tmp_path, replace(DRAFT, token=token), **options)
        assert all(isinstance(outcome, WriteResult) for outcome in outcomes), outcomes
        return [outcome.committed for outcome in outcomes if isinstance(outcome, WriteResult)]

    tokens: list[str] = []
    storage = DiskStorage(tmp_path / step_directory(DRAFT.step))
    assert written() == [True, False, False]
    assert written() == [False, False, False]
    assert catalog.read_manifest(storage).token == "save0"
    assert written(replacing=2) == [True, False, False]
    assert catalog.read_manifest(storage).token == "save2" and commit.is_good(storage)


def test_a_failed_replacement_leaves_what_stood(tmp_path: Path) -> None:
    save_all(tmp_path, DRAFT)
    storage = DiskStorage(tmp_path / step_directory(DRAFT.step))
    names = storage.names()
    outcomes = save_all(tmp_path, replace(DRAFT, token="again"), fails=1, replacing=0)
    assert all(isinstance(outcome, ElasticZeroError) for outcome in outcomes)
    assert storage.names() == names and commit.is_good(storage)
