"""Which Python processes of a test are forked from a warm one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm


@pytest.fixture(autouse=True)
def _no_variables_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_at_start", {})


def is_forked(*, directory: Path | None, path: Path | None) -> bool:
    unusual = dict.fromkeys(("executable", "preexec_fn", "shell", "gid", "gids", "uid"))
    values: dict[str, Any] = {
        **unusual,
        "umask": -1,
        "process_group": -1,
        "start_new_session": False,
        "pass_fds": (),
        "args": [sys.executable, "-m", "tests.simulation"],
        "cwd": directory,
        "env": {} if path is None else {"PYTHONPATH": str(path)},
    }
    return warm.requested(values) is not None


def test_a_process_that_imports_the_repository_is_forked(tmp_path: Path) -> None:
    assert is_forked(directory=None, path=None)
    assert is_forked(directory=tmp_path, path=warm.ROOT)
    assert is_forked(directory=warm.ROOT, path=tmp_path)


def test_a_process_with_a_copy_of_the_code_is_not_forked(tmp_path: Path) -> None:
    """The warm process has imported the repository: no mutant would ever have been found."""
    (tmp_path / "elasticzero").mkdir()
    assert not is_forked(directory=tmp_path, path=None)
    assert not is_forked(directory=None, path=tmp_path)
