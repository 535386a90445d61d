"""The house rules that a program can check."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import elasticzero

MAX_LINES = 600
FOLDERS = ("elasticzero", "launcher", "checkpoint", "examples", "benchmarks", "tests")


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def sources(root: Path) -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]


def test_no_file_is_longer_than_the_cap(root: Path) -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources(root)}
    assert len(lengths) > 20
    too_long = {str(path.relative_to(root)): n for path, n in lengths.items() if n > MAX_LINES}
    assert not too_long, f"files past {MAX_LINES} lines: {too_long}"


def test_imports_go_one_way(root: Path) -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    found = run(str(lint), "--no-cache", cwd=root)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    "module",
    [
        "elasticzero",
        "elasticzero.checkpoint",
        "elasticzero.launcher.cli.main",
        "elasticzero.checkpoint.cli.main",
    ],
)
def test_import_leaves_torch_alone(root: Path, module: str) -> None:
    program = f"import {module}, sys; assert 'torch' not in sys.modules"
    found = run(sys.executable, "-c", program, cwd=root)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("name", ["launcher", "checkpoint"])
def test_a_bare_import_is_refused(root: Path, name: str) -> None:
    found = run(sys.executable, "-c", f"import {name}", cwd=root)
    assert found.returncode == 1
    reason = found.stderr.splitlines()[-1]
    assert reason.startswith("ImportError: ")
    assert f"elasticzero.{name}" in reason


def test_there_is_one_version(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert elasticzero.__version__ == project["version"]


@pytest.mark.parametrize("name", ["launcher", "checkpoint"])
def test_the_links_into_the_package_are_relative(root: Path, name: str) -> None:
    link = root / "elasticzero" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
