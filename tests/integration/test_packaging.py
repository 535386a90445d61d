"""What is built from this tree holds every module under its import name, and works by itself."""

from __future__ import annotations

import shutil
import site
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
DATA = {"elasticzero/py.typed", "elasticzero/launcher/dashboard/page.html"}
ADDED = ("elasticzero/added", "launcher/added", "launcher/added/deeper", "checkpoint/added")
"""Packages that only the copy of the tree has: nothing in pyproject.toml names them."""
NOT_COPIED = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "*.log")
WHEEL = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet")
INSTALL = ("install", "--no-deps", "--no-index", "--quiet")
IMPORT = """
import elasticzero, elasticzero.launcher.cli.main as cli, elasticzero.checkpoint.cli.main, sys
import elasticzero.launcher.added.deeper
assert elasticzero.__file__.startswith(sys.argv[1]), elasticzero.__file__
assert cli.__file__.startswith(sys.argv[1]), cli.__file__
"""


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints that ends well."""
    words = [str(word) for word in command]
    ran = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def modules(tree: Path) -> set[str]:
    """Every module of a tree, under the name that it must have in a wheel."""
    return {
        str(Path(packed_as) / path.relative_to(tree / folder))
        for folder, packed_as in PACKED_AS.items()
        for path in (tree / folder).rglob("*.py")
    }


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree with a few packages more, without network."""
    folder = tmp_path_factory.mktemp("build")
    copy = folder / "tree"
    shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    for package in ADDED:
        (copy / package).mkdir()
        (copy / package / "__init__.py").touch()
    run(sys.executable, *WHEEL, "--wheel-dir", folder, copy, cwd=folder)
    (found,) = folder.glob("elasticzero-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with the wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, *INSTALL, wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A plain path: the files there that point at this tree are not read.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    return folder


def test_the_wheel_holds_every_module(root: Path, wheel: Path) -> None:
    """Also of packages that pyproject.toml does not name, and no test or benchmark."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    copy = wheel.parent / "tree"
    added = {f"{name}/__init__.py" for name in ADDED}
    assert len(modules(root)) > 100
    assert len(modules(copy)) == len(modules(root)) + len(added)
    assert packed == modules(copy) | DATA


def test_the_wheel_works_alone(installed: Path, tmp_path: Path) -> None:
    (packages,) = installed.glob("lib/python*/site-packages")
    run(installed / "bin" / "python", "-c", IMPORT, packages, cwd=tmp_path)


@pytest.mark.parametrize("words", [(), ("checkpoint",)])
def test_the_installed_command_starts(
    installed: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    said = run(installed / "bin" / "elasticzero", *words, "--help", cwd=tmp_path)
    assert said.startswith(" ".join(["usage: elasticzero", *words])), said
