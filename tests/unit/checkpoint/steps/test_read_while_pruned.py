"""A reader beside a job that removes old steps gets a good step, or a sentence that says why."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticzero import checkpoint
from elasticzero.checkpoint.format.names import MANIFEST_NAME, step_directory
from elasticzero.checkpoint.io.reader import Checkpoint
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import CheckpointDamaged, StorageError, UserError


def save(directory: Path, step: int) -> None:
    checkpoint.save(directory, {"w": torch.full((3,), float(step))}, step=step)


def remove(directory: Path, step: int) -> None:
    shutil.rmtree(directory / step_directory(step))


def at_look(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Lets something happen after a listing of the steps, before the first of them is read."""
    every_step, calls = catalog.every_step, [0]

    def listed(directory: Any) -> Any:
        infos = every_step(directory)
        calls[0] += 1
        if number in (0, calls[0]):
            act()
        return infos

    monkeypatch.setattr(catalog, "every_step", listed)


def test_a_step_that_is_removed_after_the_listing_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def prune() -> None:
        save(tmp_path, 2)
        remove(tmp_path, 1)

    at_look(monkeypatch, 1, prune)
    assert checkpoint.load(tmp_path)["w"].tolist() == [2.0] * 3


def test_a_step_that_was_not_committed_when_it_was_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both looks list the same two steps; in the second one the other of them is committed."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    kept = tmp_path / step_directory(2) / MANIFEST_NAME
    manifest = kept.read_bytes()
    kept.unlink()
    examine = catalog.examine

    def examined(storage: Any) -> Any:
        result = examine(storage)
        if storage.where.endswith(step_directory(2)) and not kept.exists():
            kept.write_bytes(manifest)
            (tmp_path / step_directory(1) / MANIFEST_NAME).unlink()
        return result

    monkeypatch.setattr(catalog, "examine", examined)
    assert catalog.newest_good(open_directory(tmp_path)) == 2


def test_steps_that_go_as_fast_as_they_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    step = [1]

    def prune() -> None:
        save(tmp_path, step[0] + 1)
        remove(tmp_path, step[0])
        step[0] += 1

    at_look(monkeypatch, 0, prune)
    with pytest.raises(StorageError, match="are removed as fast as they are found: try again"):
        catalog.resolve(tmp_path)


@pytest.mark.parametrize("into", [None, {"w": torch.zeros(3)}])
def test_a_step_that_is_removed_within_the_load_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, into: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    read = Checkpoint.load

    def load(self: Checkpoint, targets: Any) -> None:
        if self.manifest.step == 1:
            save(tmp_path, 2)
            remove(tmp_path, 1)
        read(self, targets)

    monkeypatch.setattr(Checkpoint, "load", load)
    assert checkpoint.load(tmp_path, into=into)["w"].tolist() == [2.0] * 3
    assert "was removed while it was read: the next good step is read" in caplog.text


def test_one_step_that_is_removed_is_said_to_be(tmp_path: Path) -> None:
    save(tmp_path, 1)
    step = tmp_path / step_directory(1)
    (step / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointDamaged, match="never committed, or was removed, as --keep"):
        checkpoint.load(step)
    shutil.rmtree(step)
    with pytest.raises(UserError, match="does not exist, or was removed, as --keep"):
        checkpoint.load(step)


def test_damage_in_a_directory_is_still_damage(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for path in (tmp_path / step_directory(1)).glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointDamaged, match=r"checksum|not what was written|differ"):
        checkpoint.load(tmp_path)
