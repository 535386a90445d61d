"""The release before this one, of its wheel in `tests/fixtures/releases`; and one that comes after:
it is this one under the next number."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import elasticzero

BEFORE, AFTER = "0.1.0", "0.3.0"


def unpack_release_before(root: Path, folder: Path) -> dict[str, str]:
    """Unpacks the packages into `folder`; returns the environment in which Python imports them.

    root: the repository.
    """
    archive = root / "tests" / "fixtures" / "releases" / f"elasticzero-{BEFORE}.tar.xz"
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


def copy_as_release_after(root: Path, folder: Path) -> dict[str, str]:
    """Copies this release into `folder` under the number of the next minor one; returns the
    environment in which Python imports it.

    root: the repository.
    """
    names = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / "elasticzero", folder / "elasticzero", ignore=names)
    version = folder / "elasticzero" / "version.py"
    text = version.read_text().replace(f'"{elasticzero.__version__}"', f'"{AFTER}"')
    version.write_text(text)
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
