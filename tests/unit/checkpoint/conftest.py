"""What tests that harm a save at each of its calls share."""

from __future__ import annotations

import pytest

from elasticzero.checkpoint.steps import catalog, commit
from tests.unit.checkpoint.turns import one_by_one


@pytest.fixture
def in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the calls of a process have one order, and none waits for a thread to start."""
    for module in (commit, catalog):
        monkeypatch.setattr(module, "run_parallel", one_by_one)
