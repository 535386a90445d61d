"""What is built from this tree holds every module under its import name, and works by itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKED_AS = {
    "elasticzero": "elasticzero",
    "launcher": "elasticzero/launcher",
    "checkpoint": "elasticzero/checkpoint",
}
BUILD = "import sys; from setuptools import build_meta as b; b.build_wheel(sys.argv[1])"
IMPORT = """
import elasticzero, elasticzero.launcher.cli as cli, elasticzero.checkpoint.cli, sys
assert elasticzero.__file__.startswith(sys.argv[1]), elasticzero.__file__
assert cli.__file__.startswith(sys.argv[1]), cli.__file__
"""


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, without network."""
    folder = tmp_path_factory.mktemp("build")
    copy = folder / "tree"
    copy.mkdir()
    for name in PACKED_AS:
        shutil.copytree(root / name, copy / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, copy)
    command = [sys.executable, "-c", BUILD, str(folder)]
    built = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("elasticzero-*.whl")
    return found


def test_the_wheel_holds_every_module(root: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        str(Path(packed_as) / path.relative_to(root / folder))
        for folder, packed_as in PACKED_AS.items()
        for path in (root / folder).rglob("*.py")
    }
    assert packed == expected | {"elasticzero/py.typed"}


def test_the_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, sys.argv[1])\n{IMPORT}"]
    ran = subprocess.run(
        [*command, str(tmp_path)], cwd="/", capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
