"""The release before this one: the packages of its wheel, in `tests/fixtures/releases`."""

from __future__ import annotations

import tarfile
from pathlib import Path

BEFORE = "0.1.0"


def unpack_release_before(root: Path, folder: Path) -> dict[str, str]:
    """Unpacks the packages into `folder`; returns the environment in which Python imports them.

    root: the repository.
    """
    archive = root / "tests" / "fixtures" / "releases" / f"elasticzero-{BEFORE}.tar.xz"
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
