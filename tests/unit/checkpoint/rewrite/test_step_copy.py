"""New directories to export into, and what killed runs left in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elasticzero.checkpoint.rewrite.step_copy import new_directory
from elasticzero.errors import UserError


def test_what_a_killed_export_left_half_written_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".model.safetensors.123-ab12cd34.partial").write_bytes(b"x")
    with new_directory(str(tmp_path)) as storage:
        assert storage.names() == []


def test_what_somebody_put_there_is_not(tmp_path: Path) -> None:
    for name in (".model.safetensors.123-ab12cd34.partial", "notes.partial"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match="is not empty"), new_directory(str(tmp_path)):
        pass
    assert len(os.listdir(tmp_path)) == 2
