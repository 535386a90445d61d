"""With which checkpoint an island begins that has none of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elasticzero import checkpoint
from elasticzero.checkpoint.steps.catalog import newest_good
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import UserError
from elasticzero.launcher.islands.newcomers.from_checkpoint import adopt_checkpoint


def save(folder: Path, step: int) -> None:
    checkpoint.save(folder, {"model": {"w": torch.full((3,), float(step))}}, step=step)


def adopted(folder: Path) -> tuple[int | None, list[str]]:
    """The step that node-9 has afterwards, and what is said of it."""
    lines: list[str] = []
    adopt_checkpoint(str(folder), "node-9", 2, lines.append)
    return newest_good(open_directory(str(folder / "islands" / "node-9"))), lines


def test_it_takes_the_newest_of_another_island(tmp_path: Path) -> None:
    save(tmp_path, 90)
    save(tmp_path / "islands" / "a", 10)
    save(tmp_path / "islands" / "b", 30)
    step, (line,) = adopted(tmp_path)
    assert step in (30, 90)
    assert "node-9 had no checkpoint: it begins with" in line
    assert adopted(tmp_path) == (step, []), "it has one now"


def test_without_islands_it_takes_that_of_the_job(tmp_path: Path) -> None:
    assert adopted(tmp_path) == (None, [])
    save(tmp_path, 90)
    assert adopted(tmp_path)[0] == 90


def test_what_is_damaged_or_none_is_passed_over(tmp_path: Path) -> None:
    islands = tmp_path / "islands"
    save(islands / "a", 10)
    save(islands / "b", 30)
    (islands / ".DS_Store").write_text("")
    for manifest in (islands / "b").rglob("manifest.json"):
        manifest.write_text("{")
    assert adopted(tmp_path)[0] == 10


def test_it_does_not_begin_anew_where_there_is_something_that_cannot_be_taken(
    tmp_path: Path,
) -> None:
    save(tmp_path / "islands" / "a", 10)
    for shard in (tmp_path / "islands" / "a").rglob("*.safetensors"):
        shard.write_bytes(b"")
    with pytest.raises(UserError, match="none of those of other islands can be taken"):
        adopted(tmp_path)
