"""What `elasticzero doctor` finds out about a checkpoint directory, wherever it lies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from elasticzero.checkpoint.storage.trial import try_storage
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import StorageError

SIZE = 3 << 20


class Careless(MemoryFileSystem):  # type: ignore[misc]
    """A store that has no conditional puts: it writes a file anew that must be created once."""

    protocol = "careless"
    store: dict[str, Any] = {}  # noqa: RUF012 - of all instances, as in the class above
    pseudo_dirs = [""]  # noqa: RUF012

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> Any:
        return super().pipe_file(path, value, mode="overwrite", **options)


@pytest.mark.parametrize("kind", ["disk", "memory", "s3"])
def test_storage_that_is_fit_for_checkpoints(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = {"disk": str(tmp_path), "memory": f"memory://{os.getpid()}/trial"}.get(kind, "")
    if kind == "s3":
        request.getfixturevalue("s3")
        url = "s3://bucket/some/run"
    trial = try_storage(url, SIZE)
    assert (trial.same, trial.exclusive, trial.leftovers) == (True, True, ())
    assert trial.size_bytes == SIZE
    assert trial.write_s > 0 and trial.read_s > 0
    assert open_directory(url).names() == []


def test_a_store_without_conditional_puts_is_found_out() -> None:
    fsspec.register_implementation("careless", Careless, clobber=True)
    trial = try_storage("careless://bucket/run", SIZE)
    assert (trial.same, trial.exclusive) == (True, False)
    assert not [name for name in Careless.store if "trial" in name]


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot make the directory"):
        try_storage(str(tmp_path / "file" / "c"), SIZE)
