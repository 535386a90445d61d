"""Real shells complete what a person has begun to write."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.clusters import elasticzero

BASH = """
source <(elasticzero completion bash)
complete -p elasticzero >&2
COMP_LINE="$1" COMP_POINT=${#1}
_elasticzero elasticzero
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = 'elasticzero completion fish | source; complete -C "$argv[1]"'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with files, and `elasticzero` on PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "elasticzero"
    program.write_text(f'#!/bin/sh\nexec {" ".join(elasticzero())} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    directory = tmp_path / "here"
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "chart.py").touch()
    monkeypatch.chdir(directory)
    return directory


def in_shell(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [line.partition("\t")[0] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("elasticzero st", ["status", "stop"]),
        ("elasticzero checkpoint ins", ["inspect"]),
        ("elasticzero run --checkpoint-d", ["--checkpoint-dir"]),
        ("elasticzero run --strategy z", ["zero1", "zero2", "zero3"]),
        ("elasticzero run --strategy=zero1", ["zero1"]),
        ("elasticzero run --keep 3 ch", ["chart.py", "checkpoints"]),
        ("elasticzero run --checkpoint-dir ch", ["checkpoints"]),
        ("elasticzero run --checkpoint-dir=ch", ["checkpoints"]),
        ("elasticzero run train.py --str", []),
        ("elasticzero completion ", ["bash", "zsh", "fish"]),
    ],
)
def test_bash_completes(line: str, expected: list[str], place: Path) -> None:
    """Of `--strategy=zero1` bash wants what follows `=`, where it takes that for a word's end."""
    assert sorted(in_shell("bash", "-c", BASH, "bash", line)) == sorted(expected)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("elasticzero st", ["status", "stop"]),
        ("elasticzero run --strategy z", ["zero1", "zero2", "zero3"]),
        ("elasticzero run --strategy=zero1", ["--strategy=zero1"]),
        ("elasticzero run --checkpoint-dir ch", ["checkpoints/"]),
        ("elasticzero run ch", ["chart.py", "checkpoints/"]),
    ],
)
def test_fish_completes(line: str, expected: list[str], place: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    assert sorted(in_shell("fish", "--no-config", "-c", FISH, line)) == sorted(expected)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_valid(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    command = [sys.executable, "-m", "elasticzero.cli", "completion", shell]
    script.write_bytes(subprocess.run(command, capture_output=True, timeout=60, check=True).stdout)
    assert in_shell(shell, "-n", str(script)) == []
