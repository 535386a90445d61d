"""A place for checkpoints that costs no time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticzero.checkpoint.steps import catalog, commit
from tests.unit.checkpoint.turns import one_by_one


@pytest.fixture
def place() -> Iterator[Path]:
    """In memory, where fsync takes no time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


@pytest.fixture
def in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the calls of a process have one order, and none waits for a thread to start."""
    for module in (commit, catalog):
        monkeypatch.setattr(module, "run_parallel", one_by_one)
